// An engine whose routed experts stay in the file: how it is loaded, and when a graph waits for them.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "engine.h"
#include "error.h"
#include "llama-model.h"
#include "os/mapping.h"
#include "os/memory.h"

namespace bmoe {

namespace {

constexpr int32_t DEFAULT_LANES = 4;
constexpr const char *ROUTED = "ffn_moe_topk-";  // the ids of the experts of a layer, [n_used, n_tokens]

// What of each file is to be read at load: all but the experts' weights.
std::vector<os::SparseMapping::Ranges> dense_ranges(const ModelFile &file) {
    std::vector<os::SparseMapping::Ranges> ranges(file.shards.size());
    for (const auto &[name, place] : file.tensors) {
        if (!is_expert_weight(name))
            ranges[static_cast<size_t>(place.shard)].push_back({place.offset, place.offset + place.n_bytes});
    }
    for (auto &list : ranges) std::sort(list.begin(), list.end());
    return ranges;
}

}  // namespace

void Engine::stream_experts(llama_model_params &model, const bmoe_open_params &params) {
    StoreOptions options;
    options.n_lanes = params.io_threads > 0 ? params.io_threads : DEFAULT_LANES;
    options.direct = !params.no_direct;
    options.look_ahead = !params.no_look_ahead;
    options.remember = params.guess != BMOE_GUESS_ROUTER;
    options.budget_bytes = std::max<int64_t>(params.cache_bytes, 0);
    experts_ = std::make_unique<ExpertStore>(file_.shards, options);
    expert_buffers_ = std::make_unique<ExpertBufferType>(*experts_, file_.tensors);
    overrides_[0] = {"\\.ffn_(gate|up|down|gate_up)_exps\\.weight$", expert_buffers_->get()};
    overrides_[1] = {nullptr, nullptr};
    model.tensor_buft_overrides = overrides_;
    model.load_mode = LLAMA_LOAD_MODE_MMAP;
}

llama_model *Engine::load_streamed(const std::vector<const char *> &shards, const llama_model_params &model) {
    const os::SparseMapping sparse(dense_ranges(file_));
    llama_model *loaded = llama_model_load_from_splits(const_cast<const char **>(shards.data()), shards.size(), model);
    if (!loaded && !expert_buffers_->failure().empty()) fail(BMOE_E_MODEL, "%s", expert_buffers_->failure().c_str());
    if (loaded) experts_->finish();
    return loaded;
}

// A budget of what is available now that everything else has been allocated, less one layer's experts twice: the one that
// is computed and the one that is read meanwhile.
void Engine::choose_budget(const bmoe_open_params &params) {
    if (!experts_) return;
    if (params.cache_bytes < 0) {
        // The dense weights are mapped: the kernel counts their pages as available, and each graph wants all of them.
        const int64_t dense = file_.weights_bytes - experts_->total_bytes();
        const int64_t left = os::available_bytes() - dense - 2 * experts_->layer_bytes();
        experts_->set_budget(std::clamp<int64_t>(left * 8 / 10, 0, experts_->total_bytes()));
    }
    if (!params.no_look_ahead && params.guess != BMOE_GUESS_PREVIOUS)
        early_router_.find(llama_internal_get_tensor_map(model_.get()));
    info_.is_streamed = 1;
    info_.reads_direct = experts_->is_direct();
    info_.streamed_bytes = experts_->total_bytes();
    info_.cache_bytes = experts_->budget_bytes();
}

void Engine::set_cache_budget(int64_t bytes) {
    require_context();
    if (!experts_) fail(BMOE_E_UNSUPPORTED, "nothing streams in this engine, so that there is no cache");
    experts_->set_budget(bytes);
    info_.cache_bytes = bytes;
    update_counters();
}

// Asked of each node of a graph before it is computed, and told of those it was asked for when they have been. Computing
// pauses meanwhile, on the thread that called prefill.
bool Engine::on_node(ggml_tensor *node, bool ask, void *self) {
    const bool is_routing = strncmp(node->name, ROUTED, strlen(ROUTED)) == 0;
    if (ask || !is_routing) return is_routing;
    auto *engine = static_cast<Engine *>(self);
    try {
        std::vector<int32_t> ids;
        ids.reserve(static_cast<size_t>(node->ne[0] * node->ne[1]));
        for (int64_t token = 0; token < node->ne[1]; ++token) {
            const auto *row = reinterpret_cast<const int32_t *>(static_cast<const char *>(node->data) +
                                                                static_cast<size_t>(token) * node->nb[1]);
            ids.insert(ids.end(), row, row + node->ne[0]);
        }
        const int32_t layer = atoi(node->name + strlen(ROUTED));
        engine->experts_->ask(layer, ids);
        // While the lanes read, this thread would only wait.
        engine->look_ahead(layer, node);
        engine->given_up_ = !engine->experts_->wait([engine] { return should_stop(engine); });
        return !engine->given_up_;
    } catch (const std::exception &error) {
        engine->read_failure_ = error.what();
        return false;  // ends this part of the graph; should_stop() ends what would follow
    }
}

// The last layer computes only the tokens whose logits are wanted.
void Engine::look_ahead(int32_t layer, const ggml_tensor *topk) {
    if (!experts_->may_look_ahead(layer)) return;
    if (!experts_->may_look_ahead(layer)) return;
    const ggml_tensor *input = EarlyRouter::input_of(topk);
    const int64_t n_last = layer + 2 == info_.n_layer ? n_outputs_ : topk->ne[1];
    if (n_last > 0) experts_->look_ahead(layer, early_router_.guess(layer, input, topk->ne[0], n_last));
}

void Engine::update_counters() {
    if (!experts_) return;
    const StoreCounters now = experts_->counters();
    counters_.read_bytes = now.bytes_read;
    counters_.routed_bytes = now.bytes_routed;
    counters_.ahead_bytes = now.bytes_ahead;
    counters_.wasted_bytes = now.bytes_wasted;
    counters_.n_hits = now.n_hits;
    counters_.n_misses = now.n_misses;
    counters_.io_s = now.io_s;
    counters_.stall_s = now.stall_s;
    counters_.mgmt_s = now.mgmt_s;
    counters_.resident_bytes = experts_->resident_bytes();
}

}  // namespace bmoe
