// Tokens to logits: pieces one ubatch wide, stopped within one graph.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <new>

#include "engine.h"
#include "error.h"
#include "os/cpu.h"

namespace bmoe {

using Clock = std::chrono::steady_clock;

// Called by ggml between two nodes of a graph, on the thread that runs prefill.
bool Engine::should_stop(void *self) {
    auto *engine = static_cast<Engine *>(self);
    if (engine->graph_failure_ || engine->is_device_lost()) return true;
    if (engine->cancel_.load(std::memory_order_relaxed)) return true;
    if (!engine->poll_) return false;
    const auto now = Clock::now();
    if (now - engine->last_poll_ < std::chrono::milliseconds(20)) return false;
    engine->last_poll_ = now;
    on_caller([&] {
        if (engine->poll_(engine->poll_user_) != 0) engine->cancel_ = true;
    });
    return engine->cancel_;
}

static bmoe_counters difference(const bmoe_counters &now, const bmoe_counters &before) {
    bmoe_counters spent = now;
    spent.n_prefill_tokens -= before.n_prefill_tokens;
    spent.n_graphs -= before.n_graphs;
    spent.prefill_s -= before.prefill_s;
    spent.prefill_cpu_s -= before.prefill_cpu_s;
    spent.n_major_faults -= before.n_major_faults;
    spent.read_bytes -= before.read_bytes;
    spent.routed_bytes -= before.routed_bytes;
    spent.ahead_bytes -= before.ahead_bytes;
    spent.wasted_bytes -= before.wasted_bytes;
    spent.n_hits -= before.n_hits;
    spent.n_misses -= before.n_misses;
    spent.io_s -= before.io_s;
    spent.stall_s -= before.stall_s;
    spent.mgmt_s -= before.mgmt_s;
    spent.dev_tokens -= before.dev_tokens;
    spent.dev_read_bytes -= before.dev_read_bytes;
    spent.dev_stall_s -= before.dev_stall_s;
    spent.dev_routed -= before.dev_routed;
    spent.dev_demand -= before.dev_demand;
    spent.dev_nodes -= before.dev_nodes;
    return spent;
}

// One piece, with the logits of its last token, of all, or of none.
void Engine::decode(llama_token *tokens, int32_t n_tokens, Rows rows) {
    std::vector<llama_pos> positions(static_cast<size_t>(n_tokens));
    std::vector<int32_t> n_seqs(static_cast<size_t>(n_tokens), 1);
    std::vector<int8_t> wanted(static_cast<size_t>(n_tokens), rows == Rows::all ? 1 : 0);
    llama_seq_id sequence = 0;
    std::vector<llama_seq_id *> sequences(static_cast<size_t>(n_tokens), &sequence);
    for (int32_t i = 0; i < n_tokens; ++i) positions[static_cast<size_t>(i)] = position_ + i;
    wanted.back() = rows == Rows::none ? 0 : 1;
    llama_batch batch{n_tokens, tokens, nullptr, positions.data(), n_seqs.data(), sequences.data(), wanted.data()};
    log_.first_error.clear();
    graph_failure_.reset();
    given_up_ = false;
    routed_.layer = -1;
    n_outputs_ = rows == Rows::all ? n_tokens : rows == Rows::last ? 1 : 0;
    on_device_ = device_ && device_->takes(n_tokens);
    if (experts_ && !on_device_) experts_->begin_graph();
    const TakenBack taken_back{*this};
    const int32_t status = on_device_ ? compute_on_device(batch) : llama_decode(context_.get(), batch);
    if (experts_ && !on_device_) experts_->end_graph();
    if (graph_failure_) {
        const Error why = *graph_failure_;
        graph_failure_.reset();
        throw why;
    }
    // llama.cpp calls a graph whose callback ended it a success.
    if (given_up_) throw Error(BMOE_E_CANCELLED, "the prefill was cancelled");
    if (status == 0) {
        position_ += n_tokens;
        counters_.n_prefill_tokens += n_tokens;
        counters_.n_graphs += 1;
        return;
    }
    if (status == 2) throw Error(BMOE_E_CANCELLED, "the prefill was cancelled");
    fail(BMOE_E_INTERNAL, "llama.cpp failed to compute %d tokens at position %d (status %d): %s", n_tokens, position_,
         status, log_.first_error.empty() ? "no reason given" : log_.first_error.c_str());
}

// Back to where a cancelled prefill began, or to nothing where the memory cannot be cut.
void Engine::undo_prefill(int32_t position) {
    has_logits_ = false;
    has_nan_ = true;
    if (position == 0 || !trim(position)) drop_state();
}

void Engine::check_tokens(const std::vector<llama_token> &tokens) const {
    const auto n_vocab = static_cast<llama_token>(info_.n_vocab);
    if (tokens.empty()) fail(BMOE_E_ARGUMENT, "there are no tokens to prefill");
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab)
            fail(BMOE_E_ARGUMENT, "token %zu is %d, outside the vocabulary of %d", i, tokens[i], n_vocab);
    }
    const auto room = static_cast<size_t>(info_.n_ctx - position_);
    if (tokens.size() > room) {
        fail(BMOE_E_TOO_LONG, "%zu tokens after the %d in the state are more than the context of %d", tokens.size(),
             position_, info_.n_ctx);
    }
}

bmoe_counters Engine::prefill(const std::vector<llama_token> &tokens) {
    require_context();
    check_tokens(tokens);
    return compute(tokens, Rows::last);
}

bmoe_counters Engine::prefill_rows(const std::vector<llama_token> &tokens, float *rows) {
    require_context();
    check_tokens(tokens);
    const auto limit = static_cast<size_t>(std::min<int32_t>(BMOE_MAX_ROWS, info_.n_ubatch));
    if (tokens.size() > limit)
        fail(BMOE_E_ARGUMENT, "%zu tokens, and rows are given for at most %zu at once", tokens.size(), limit);
    const bmoe_counters spent = compute(tokens, Rows::all);
    const auto n_vocab = static_cast<size_t>(info_.n_vocab);
    for (size_t i = 0; i < tokens.size(); ++i) {
        const float *row = llama_get_logits_ith(context_.get(), static_cast<int32_t>(i));
        if (!row) fail(BMOE_E_INTERNAL, "llama.cpp has no logits for token %zu", i);
        std::copy(row, row + n_vocab, rows + i * n_vocab);
    }
    return spent;
}

bmoe_counters Engine::compute(const std::vector<llama_token> &tokens, Rows rows) {
    const auto spent = std::make_shared<bmoe_counters>();
    run([this, tokens, rows, spent] { *spent = compute_here(tokens, rows); });
    return *spent;
}

bmoe_counters Engine::compute_here(const std::vector<llama_token> &tokens, Rows rows) {
    const int32_t begin = position_;
    const bmoe_counters before = counters_;
    std::vector<llama_token> copy = tokens;
    const auto start = Clock::now();
    const os::Usage usage_before = os::process_usage();
    std::string failure;
    std::optional<Error> unread;  // the state is as before, and the engine goes on
    bool cancelled = false;
    has_logits_ = false;
    last_poll_ = start;
    try {
        for (size_t at = 0; at < copy.size();) {
            if (cancel_) throw Error(BMOE_E_CANCELLED, "the prefill was cancelled");
            const size_t n = std::min(copy.size() - at, static_cast<size_t>(info_.n_ubatch));
            decode(copy.data() + at, static_cast<int32_t>(n), at + n == copy.size() ? rows : Rows::none);
            at += n;
        }
        llama_synchronize(context_.get());
        has_logits_ = true;
        const float *row = logits();
        has_nan_ = has_nan_ || std::any_of(row, row + info_.n_vocab, [](float logit) { return std::isnan(logit); });
    } catch (const Error &error) {
        cancelled = error.status == BMOE_E_CANCELLED;
        if (error.status == BMOE_E_READ || error.status == BMOE_E_UNSUPPORTED)
            unread = error;
        else if (!cancelled)
            failure = error.what();
    } catch (const std::bad_alloc &) {
        failure = "out of memory";
    } catch (const std::exception &error) {
        failure = error.what();
        if (on_device_) lose_device(error);
    }
    const os::Usage usage = os::process_usage();
    counters_.prefill_s += std::chrono::duration<double>(Clock::now() - start).count();
    counters_.prefill_cpu_s += usage.cpu_s - usage_before.cpu_s;
    counters_.n_major_faults += usage.n_major_faults - usage_before.n_major_faults;
    update_counters();
    if (unread) {
        undo_prefill(begin);
        throw *unread;
    }
    if (!failure.empty()) {
        broken_ = failure;
        fail(BMOE_E_INTERNAL, "%s", failure.c_str());
    }
    const bmoe_counters spent = difference(counters_, before);
    if (cancelled) {
        cancel_ = false;
        undo_prefill(begin);
        throw Cancelled(spent);
    }
    return spent;
}

const float *Engine::logits() const {
    require_context();
    if (!has_logits_)
        fail(BMOE_E_STATE,
             "there are no logits: nothing was prefilled since the state was opened, loaded, cut or dropped");
    const float *row = llama_get_logits_ith(context_.get(), -1);
    if (!row) fail(BMOE_E_INTERNAL, "llama.cpp has no logits for the last token");
    return row;
}

}  // namespace bmoe
