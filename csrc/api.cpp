// The C API: check arguments, find the engine, call inward, turn exceptions into codes. No logic.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>

#include "bmoe.h"
#include "contain.h"
#include "device/device.h"
#include "engine.h"
#include "error.h"
#include "handles.h"
#include "llama.h"
#include "os/cpu_level.h"

#ifndef BMOE_VERSION
#define BMOE_VERSION "0"
#endif
#ifndef BMOE_LLAMA_COMMIT
#define BMOE_LLAMA_COMMIT "unknown"
#endif

using bmoe::Engine;
using bmoe::Error;
using bmoe::fail;

namespace {

struct LastError {
    const bmoe_engine *handle = nullptr;
    std::string text;
};
thread_local LastError last_error;
thread_local const Engine *running = nullptr;  // the engine whose call is on this thread's stack

// Also where there is no memory left for the text: a shorter one then, which needs none.
int32_t report(const bmoe_engine *handle, int32_t status, const char *text, bool is_foreign = false) noexcept {
    last_error.handle = handle;
    try {
        last_error.text = is_foreign ? bmoe::legible(text) : text;
        std::replace(last_error.text.begin(), last_error.text.end(), '\n', ' ');
    } catch (const std::bad_alloc &) {
        last_error.text = "out of memory";
    }
    return status;
}

// Runs the body and turns whatever it throws into a code and a text. No exception passes the C border.
template <class Body>
int32_t guard(const bmoe_engine *handle, Body &&body) {
    try {
        body();
        return BMOE_OK;
    } catch (const Error &error) {
        return report(handle, error.status, error.what());
    } catch (const std::bad_alloc &) {
        return report(handle, BMOE_E_MEMORY, "out of memory");
    } catch (const std::exception &error) {
        return report(handle, BMOE_E_INTERNAL, error.what(), true);
    } catch (...) {
        return report(handle, BMOE_E_INTERNAL, "an unknown exception");
    }
}

class Busy {
  public:
    explicit Busy(Engine &engine) : engine_(engine), outer_(running) {
        if (engine.busy.exchange(true)) {
            if (engine.closing) throw Error(BMOE_E_CLOSED, "the engine is being closed");
            throw Error(BMOE_E_BUSY, "another call is running on this engine");
        }
        running = &engine;
    }
    ~Busy() {
        running = outer_;
        engine_.busy = false;
    }
    Busy(const Busy &) = delete;
    Busy &operator=(const Busy &) = delete;

  private:
    Engine &engine_;
    const Engine *outer_;
};

std::shared_ptr<Engine> open_engine(const bmoe_engine *handle) {
    std::shared_ptr<Engine> engine = bmoe::find_handle(handle);
    if (!engine)
        throw Error(BMOE_E_CLOSED, handle ? "the engine is not open in this process (closed, or opened before a fork)"
                                          : "the engine is NULL");
    return engine;
}

// One call on an engine: found, not busy, its log routed.
template <class Body>
int32_t with_engine(bmoe_engine *handle, Body &&body) {
    return guard(handle, [&] {
        const std::shared_ptr<Engine> engine = open_engine(handle);
        const Busy busy(*engine);
        const bmoe::LogScope scope(engine->log());
        body(*engine);
    });
}

void require(const void *pointer, const char *name) {
    if (!pointer) fail(BMOE_E_ARGUMENT, "%s is NULL", name);
}

// Copy n elements out, or set the size needed and throw.
template <class T>
void give(const T *from, size_t n, T *to, size_t capacity, size_t *n_out, const char *name) {
    *n_out = n;
    if (n > capacity) fail(BMOE_E_TOO_SMALL, "%s has room for %zu, %zu are needed", name, capacity, n);
    if (n > 0) memcpy(to, from, n * sizeof(T));
}

bmoe::Spans checked_spans(const bmoe_span *spans, size_t n_spans, size_t n_bytes) {
    if (n_spans > 0) require(spans, "spans");
    size_t end = 0;
    for (size_t i = 0; i < n_spans; ++i) {
        if (spans[i].begin < end || spans[i].end < spans[i].begin || spans[i].end > n_bytes) {
            fail(BMOE_E_ARGUMENT,
                 "span %zu is [%zu, %zu): spans rise, do not overlap and lie within the text's %zu bytes", i,
                 spans[i].begin, spans[i].end, n_bytes);
        }
        end = spans[i].end;
    }
    return {spans, spans + n_spans};
}

int32_t checked_range(int32_t value, int32_t low, int32_t high, const char *name) {
    if (value < low || value > high) fail(BMOE_E_ARGUMENT, "%s is %d, allowed are %d to %d", name, value, low, high);
    return value;
}

bmoe_open_params checked_params(const bmoe_open_params *given) {
    bmoe_open_params params;
    bmoe_open_params_init(&params);
    if (!given) return params;
    if (given->size_bytes != sizeof params) {
        fail(BMOE_E_ARGUMENT,
             "params->size_bytes is %zu, this library's bmoe_open_params has %zu: call bmoe_open_params_init() first",
             given->size_bytes, sizeof params);
    }
    params = *given;
    checked_range(params.n_ctx, 0, INT32_MAX, "n_ctx");
    checked_range(params.n_ubatch, 0, 65536, "n_ubatch");
    checked_range(params.n_threads, 0, 512, "n_threads");
    checked_range(params.kv_type, BMOE_KV_F16, BMOE_KV_F32, "kv_type");
    checked_range(params.inspect, 0, 1, "inspect");
    checked_range(params.stream, 0, 1, "stream");
    checked_range(params.io_threads, 0, 64, "io_threads");
    checked_range(params.no_direct, 0, 1, "no_direct");
    checked_range(params.prefetch, BMOE_PREFETCH_BOTH, BMOE_PREFETCH_OFF, "prefetch");
    checked_range(params.dense, BMOE_DENSE_MMAP, BMOE_DENSE_ANON, "dense");
    checked_range(params.no_repack, 0, 1, "no_repack");
    checked_range(params.n_expert_used, 0, INT32_MAX, "n_expert_used");
    checked_range(params.prefill_min_tokens, 0, 65536, "prefill_min_tokens");
    checked_range(params.prefill_loaders, 0, 64, "prefill_loaders");
    if (params.cache_bytes < -1) {
        fail(BMOE_E_ARGUMENT, "cache_bytes is %lld: a number of bytes, or -1 for what is available",
             static_cast<long long>(params.cache_bytes));
    }
    checked_range(params.log_level, BMOE_LOG_DEBUG, BMOE_LOG_ERROR, "log_level");
    if (!params.chat_template && params.chat_template_bytes > 0)
        fail(BMOE_E_ARGUMENT, "chat_template is NULL and chat_template_bytes is not 0");
    return params;
}

// Run a prefill and hand its costs out, also those of a cancelled one.
template <class Body>
void spending(bmoe_counters *spent, Body &&body) {
    if (spent && spent->size_bytes != sizeof *spent)
        fail(BMOE_E_ARGUMENT, "spent->size_bytes is %zu, expected %zu", spent->size_bytes, sizeof *spent);
    try {
        const bmoe_counters costs = body();
        if (spent) *spent = costs;
    } catch (const bmoe::Cancelled &cancelled) {
        if (spent) *spent = cancelled.spent;
        throw;
    }
}

std::vector<llama_token> checked_prompt(const Engine &engine, const int32_t *tokens, size_t n_tokens) {
    engine.require_context();
    if (n_tokens > 0) require(tokens, "tokens");
    const auto n_ctx = static_cast<size_t>(engine.info().n_ctx);
    if (n_tokens > n_ctx) fail(BMOE_E_TOO_LONG, "%zu tokens are more than the context of %zu", n_tokens, n_ctx);
    return {tokens, tokens + n_tokens};
}

void check_share(float value, float low, float high, const char *name) {
    if (!(value >= low && value <= high)) {
        fail(BMOE_E_ARGUMENT, "%s is %g, allowed are %g to %g", name, double{value}, double{low}, double{high});
    }
}

bmoe_sampling checked_sampling(const bmoe_sampling *given) {
    bmoe_sampling sampling;
    bmoe_sampling_init(&sampling);
    if (!given) return sampling;
    if (given->size_bytes != sizeof sampling)
        fail(BMOE_E_ARGUMENT, "sampling->size_bytes is %zu, expected %zu", given->size_bytes, sizeof sampling);
    sampling = *given;
    check_share(sampling.temperature, 0.0f, 100.0f, "temperature");
    checked_range(sampling.top_k, 0, INT32_MAX, "top_k");
    check_share(sampling.top_p, 0.0f, 1.0f, "top_p");
    check_share(sampling.min_p, 0.0f, 1.0f, "min_p");
    return sampling;
}

std::vector<bmoe::Message> checked_messages(const bmoe_message *messages, size_t n_messages) {
    if (n_messages == 0) fail(BMOE_E_ARGUMENT, "there are no messages to render");
    require(messages, "messages");
    std::vector<bmoe::Message> out;
    for (size_t i = 0; i < n_messages; ++i) {
        const bmoe_message &message = messages[i];
        require(message.role, "the role of a message");
        if (strcmp(message.role, "system") != 0 && strcmp(message.role, "user") != 0 &&
            strcmp(message.role, "assistant") != 0) {
            fail(BMOE_E_ARGUMENT, "message %zu has the role \"%s\"; roles are system, user and assistant", i,
                 bmoe::legible(message.role).c_str());
        }
        if (message.content_bytes > 0) require(message.content, "the content of a message");
        out.push_back({message.role, message.content_bytes > 0 ? std::string(message.content, message.content_bytes)
                                                               : std::string()});
    }
    return out;
}

// Before anything of llama.cpp's runs.
void prepare() {
    bmoe::os::require_cpu();
    bmoe::install_log_router();
    bmoe::catch_assertions();
}

void copy_error(char *error, size_t error_cap) {
    if (!error || error_cap == 0) return;
    const size_t n = std::min(last_error.text.size(), error_cap - 1);
    memcpy(error, last_error.text.data(), n);
    error[n] = '\0';
}

}  // namespace

extern "C" {

int32_t bmoe_abi_version(void) { return BMOE_ABI_VERSION; }

const char *bmoe_build_info(void) {
    static char text[64 + sizeof bmoe_cpu_features];
    static const int n_bytes = snprintf(text, sizeof text, "bmoe %s, llama.cpp %s%s%s", BMOE_VERSION, BMOE_LLAMA_COMMIT,
                                        bmoe_cpu_features.text[0] ? ", for" : "", bmoe_cpu_features.text);
    return n_bytes > 0 ? text : "";
}

void bmoe_open_params_init(bmoe_open_params *params) {
    if (!params) return;
    *params = bmoe_open_params{};
    params->size_bytes = sizeof *params;
    params->log_level = BMOE_LOG_WARN;
    params->cache_bytes = -1;
}

int32_t bmoe_device_count(void) {
    int32_t n = 0;
    guard(nullptr, [&] {
        prepare();
        n = bmoe::device_count();
    });
    return n;
}

int32_t bmoe_get_device(int32_t index, bmoe_device *device) {
    return guard(nullptr, [&] {
        require(device, "device");
        if (device->size_bytes != sizeof *device)
            fail(BMOE_E_ARGUMENT, "device->size_bytes is %zu, expected %zu", device->size_bytes, sizeof *device);
        prepare();
        bmoe::describe_device(index, *device);
    });
}

int32_t bmoe_open(bmoe_engine **engine, const char *path, const bmoe_open_params *params, char *error,
                  size_t error_cap) {
    if (engine) *engine = nullptr;
    const int32_t status = guard(nullptr, [&] {
        require(engine, "engine");
        require(path, "path");
        const bmoe_open_params checked = checked_params(params);
        prepare();
        *engine = bmoe::add_handle(Engine::open(path, checked));
    });
    if (status != BMOE_OK) copy_error(error, error_cap);
    return status;
}

void bmoe_close(bmoe_engine *handle) {
    guard(handle, [&] {
        const std::shared_ptr<Engine> engine = bmoe::remove_handle(handle);
        if (!engine) return;
        engine->closing = true;
        engine->request_cancel();
        // From a hook the call that runs it still holds the engine, and frees it when it ends.
        if (running == engine.get()) return;
        const auto a_moment = std::chrono::milliseconds(1);
        while (engine->busy.exchange(true)) std::this_thread::sleep_for(a_moment);
        // The call that ended may hold it an instant longer; freed is to mean freed.
        while (engine.use_count() > 1) std::this_thread::sleep_for(a_moment);
    });
}

const char *bmoe_last_error(const bmoe_engine *engine) {
    return engine == last_error.handle ? last_error.text.c_str() : "";
}

int32_t bmoe_get_info(bmoe_engine *handle, bmoe_info *info) {
    return with_engine(handle, [&](Engine &engine) {
        require(info, "info");
        if (info->size_bytes != sizeof *info)
            fail(BMOE_E_ARGUMENT, "info->size_bytes is %zu, expected %zu", info->size_bytes, sizeof *info);
        *info = engine.info();
    });
}

int32_t bmoe_get_counters(bmoe_engine *handle, bmoe_counters *counters) {
    return with_engine(handle, [&](Engine &engine) {
        require(counters, "counters");
        if (counters->size_bytes != sizeof *counters)
            fail(BMOE_E_ARGUMENT, "counters->size_bytes is %zu, expected %zu", counters->size_bytes, sizeof *counters);
        *counters = engine.counters();
    });
}

int32_t bmoe_render(bmoe_engine *handle, const bmoe_message *messages, size_t n_messages, int32_t reasoning,
                    int32_t generate, char *text, size_t text_cap, size_t *n_bytes, bmoe_span *spans, size_t spans_cap,
                    size_t *n_spans) {
    return with_engine(handle, [&](Engine &engine) {
        require(n_bytes, "n_bytes");
        require(n_spans, "n_spans");
        if (text_cap > 0) require(text, "text");
        if (spans_cap > 0) require(spans, "spans");
        checked_range(reasoning, 0, 1, "reasoning");
        checked_range(generate, 0, 1, "generate");
        const auto list = checked_messages(messages, n_messages);
        const bmoe::Rendered rendered =
            engine.chat_template().render(list, reasoning != 0, generate != 0, engine.specials());
        *n_bytes = rendered.text.size();
        *n_spans = rendered.data.size();
        if (*n_bytes > text_cap || *n_spans > spans_cap) {
            fail(BMOE_E_TOO_SMALL, "the prompt takes %zu bytes and %zu spans, there is room for %zu and %zu", *n_bytes,
                 *n_spans, text_cap, spans_cap);
        }
        give(rendered.text.data(), rendered.text.size(), text, text_cap, n_bytes, "text");
        give(rendered.data.data(), rendered.data.size(), spans, spans_cap, n_spans, "spans");
    });
}

int32_t bmoe_tokenize(bmoe_engine *handle, const char *text, size_t n_bytes, const bmoe_span *spans, size_t n_spans,
                      int32_t add_bos, int32_t *tokens, size_t tokens_cap, size_t *n_tokens) {
    return with_engine(handle, [&](Engine &engine) {
        require(n_tokens, "n_tokens");
        if (n_bytes > 0) require(text, "text");
        if (tokens_cap > 0) require(tokens, "tokens");
        checked_range(add_bos, 0, 1, "add_bos");
        const bmoe::Spans data = checked_spans(spans, n_spans, n_bytes);
        const std::string copy = n_bytes > 0 ? std::string(text, n_bytes) : std::string();
        std::vector<llama_token> out = bmoe::tokenize(engine.vocab(), engine.specials(), copy, data);
        if (add_bos) bmoe::lead_with_bos(engine.vocab(), out);
        give(out.data(), out.size(), tokens, tokens_cap, n_tokens, "tokens");
    });
}

int32_t bmoe_detokenize(bmoe_engine *handle, const int32_t *tokens, size_t n_tokens, int32_t special, char *text,
                        size_t text_cap, size_t *n_bytes) {
    return with_engine(handle, [&](Engine &engine) {
        require(n_bytes, "n_bytes");
        if (n_tokens > 0) require(tokens, "tokens");
        if (text_cap > 0) require(text, "text");
        checked_range(special, 0, 1, "special");
        for (size_t i = 0; i < n_tokens; ++i) checked_range(tokens[i], 0, engine.info().n_vocab - 1, "a token");
        const std::string out = bmoe::detokenize(engine.vocab(), {tokens, tokens + n_tokens}, special != 0);
        give(out.data(), out.size(), text, text_cap, n_bytes, "text");
    });
}

int32_t bmoe_token_attr(bmoe_engine *handle, int32_t token) {
    int32_t bits = 0;
    const int32_t status = with_engine(handle, [&](Engine &engine) {
        checked_range(token, 0, engine.info().n_vocab - 1, "token");
        bits = bmoe::token_attr(engine.vocab(), token);
    });
    return status == BMOE_OK ? bits : status;
}

int32_t bmoe_prefill(bmoe_engine *handle, const int32_t *tokens, size_t n_tokens, bmoe_counters *spent) {
    return with_engine(handle, [&](Engine &engine) {
        spending(spent, [&] { return engine.prefill(checked_prompt(engine, tokens, n_tokens)); });
    });
}

int32_t bmoe_prefill_rows(bmoe_engine *handle, const int32_t *tokens, size_t n_tokens, float *rows, size_t rows_cap,
                          bmoe_counters *spent) {
    return with_engine(handle, [&](Engine &engine) {
        const auto prompt = checked_prompt(engine, tokens, n_tokens);
        const size_t n_floats = n_tokens * static_cast<size_t>(engine.info().n_vocab);
        if (n_floats > rows_cap)
            fail(BMOE_E_TOO_SMALL, "rows has room for %zu floats, %zu are needed", rows_cap, n_floats);
        if (n_floats > 0) require(rows, "rows");
        spending(spent, [&] { return engine.prefill_rows(prompt, rows); });
    });
}

void bmoe_sampling_init(bmoe_sampling *sampling) {
    if (!sampling) return;
    *sampling = bmoe_sampling{};
    sampling->size_bytes = sizeof *sampling;
    sampling->top_p = 1.0f;
}

int32_t bmoe_sampling_start(bmoe_engine *handle, const bmoe_sampling *sampling) {
    return with_engine(handle, [&](Engine &engine) { engine.start_sampling(checked_sampling(sampling)); });
}

int32_t bmoe_sample(bmoe_engine *handle, int32_t *token) {
    return with_engine(handle, [&](Engine &engine) {
        require(token, "token");
        *token = engine.sample();
    });
}

int32_t bmoe_get_head(bmoe_engine *engine, bmoe_head *head, float *norm_weight, float *norm_bias, size_t norm_cap) {
    return with_engine(engine, [&](Engine &e) {
        require(head, "head");
        if (head->size_bytes != sizeof *head)
            fail(BMOE_E_ARGUMENT, "head->size_bytes is %zu, expected %zu", head->size_bytes, sizeof *head);
        *head = e.head().describe();
        const std::vector<float> weight = e.head().norm_weight(e.file()), bias = e.head().norm_bias(e.file());
        size_t n = 0;
        if (norm_cap > 0) {
            require(norm_weight, "norm_weight");
            require(norm_bias, "norm_bias");
        }
        give(weight.data(), weight.size(), norm_weight, norm_cap, &n, "norm_weight");
        give(bias.data(), bias.size(), norm_bias, norm_cap, &n, "norm_bias");
    });
}

int32_t bmoe_head_rows(bmoe_engine *engine, const int32_t *tokens, size_t n_tokens, float *rows, size_t rows_cap,
                       float *biases) {
    return with_engine(engine, [&](Engine &e) {
        require(tokens, "tokens");
        require(rows, "rows");
        require(biases, "biases");
        const std::vector<int32_t> wanted(tokens, tokens + n_tokens);
        for (const int32_t token : wanted) checked_range(token, 0, e.info().n_vocab - 1, "token");
        size_t n = 0;
        const size_t n_embd = static_cast<size_t>(e.head().describe().n_embd);
        if (n_tokens > rows_cap / n_embd)
            fail(BMOE_E_TOO_SMALL, "rows has room for %zu floats, %zu times %zu are needed", rows_cap, n_tokens,
                 n_embd);
        const std::vector<float> found = e.head().rows(e.file(), wanted), added = e.head().biases(e.file(), wanted);
        give(found.data(), found.size(), rows, rows_cap, &n, "rows");
        give(added.data(), added.size(), biases, n_tokens, &n, "biases");
    });
}

int32_t bmoe_head_logits(bmoe_engine *engine, const float *states, size_t n_states, const int32_t *tokens,
                         size_t n_tokens, float *logits) {
    return with_engine(engine, [&](Engine &e) {
        require(states, "states");
        require(tokens, "tokens");
        require(logits, "logits");
        const std::vector<int32_t> wanted(tokens, tokens + n_tokens);
        for (const int32_t token : wanted) checked_range(token, 0, e.info().n_vocab - 1, "token");
        const auto n_embd = static_cast<size_t>(e.head().describe().n_embd);
        const std::vector<float> given(states, states + n_states * n_embd);
        const std::vector<float> made = e.head().logits(e.file(), given, wanted);
        std::copy(made.begin(), made.end(), logits);
    });
}

int32_t bmoe_set_cache(bmoe_engine *handle, int64_t n_bytes) {
    return with_engine(handle, [&](Engine &engine) {
        if (n_bytes < 0) fail(BMOE_E_ARGUMENT, "the cache cannot hold %lld bytes", static_cast<long long>(n_bytes));
        engine.set_cache_budget(n_bytes);
    });
}

int32_t bmoe_position(bmoe_engine *handle) {
    int32_t position = 0;
    const int32_t status = with_engine(handle, [&](Engine &engine) { position = engine.position(); });
    return status == BMOE_OK ? position : status;
}

int32_t bmoe_logits(bmoe_engine *handle, float *logits, size_t logits_cap, size_t *n_logits) {
    return with_engine(handle, [&](Engine &engine) {
        require(n_logits, "n_logits");
        if (logits_cap > 0) require(logits, "logits");
        give(engine.logits(), static_cast<size_t>(engine.info().n_vocab), logits, logits_cap, n_logits, "logits");
    });
}

int32_t bmoe_cancel(bmoe_engine *handle) {
    return guard(handle, [&] { open_engine(handle)->request_cancel(); });
}

int32_t bmoe_cancel_clear(bmoe_engine *handle) {
    return guard(handle, [&] { open_engine(handle)->clear_cancel(); });
}

int32_t bmoe_state_size(bmoe_engine *handle, size_t *n_bytes) {
    return with_engine(handle, [&](Engine &engine) {
        require(n_bytes, "n_bytes");
        *n_bytes = engine.state_size();
    });
}

int32_t bmoe_state_save(bmoe_engine *handle, void *state, size_t state_cap, size_t *n_bytes) {
    return with_engine(handle, [&](Engine &engine) {
        require(n_bytes, "n_bytes");
        if (state_cap > 0) require(state, "state");
        *n_bytes = engine.state_size();
        if (*n_bytes > state_cap)
            fail(BMOE_E_TOO_SMALL, "the state takes %zu bytes, there is room for %zu", *n_bytes, state_cap);
        *n_bytes = engine.save_state(state, state_cap);
    });
}

int32_t bmoe_state_load(bmoe_engine *handle, const void *state, size_t n_bytes) {
    return with_engine(handle, [&](Engine &engine) {
        require(state, "state");
        engine.load_state(state, n_bytes);
    });
}

int32_t bmoe_state_keep(bmoe_engine *handle, int32_t n_tokens) {
    return with_engine(handle, [&](Engine &engine) { engine.keep_state(n_tokens); });
}

int32_t bmoe_state_drop(bmoe_engine *handle) {
    return with_engine(handle, [&](Engine &engine) { engine.drop_state(); });
}

}  // extern "C"
