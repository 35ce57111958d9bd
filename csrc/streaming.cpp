// An engine whose routed experts stay in the file: how it is loaded, and what is read before it is asked for.
#include <sys/mman.h>

#include <algorithm>
#include <cinttypes>

#include "engine.h"
#include "error.h"
#include "llama-model.h"
#include "os/mapping.h"
#include "os/memory.h"

namespace bmoe {

namespace {

constexpr int32_t DEFAULT_LANES = 4;

int32_t lanes(const bmoe_open_params &params) { return params.io_threads > 0 ? params.io_threads : DEFAULT_LANES; }

// What of each file is to be read at load: all but the experts' weights.
std::vector<os::SparseMapping::File> dense_files(const ModelFile &file) {
    std::vector<os::SparseMapping::File> files(file.shards.size());
    for (size_t i = 0; i < files.size(); ++i) files[i].identity = file.identities[i];
    for (const auto &[name, place] : file.tensors) {
        if (!is_expert_weight(name))
            files[static_cast<size_t>(place.shard)].ranges.push_back({place.offset, place.offset + place.n_bytes});
    }
    for (auto &one : files) {
        std::sort(one.ranges.begin(), one.ranges.end());
        os::SparseMapping::Ranges joined;
        for (const auto &range : one.ranges) {
            // Tensors are aligned: what lies between two of them is less than a block.
            if (!joined.empty() && range.first < joined.back().second + Reader::BLOCK)
                joined.back().second = std::max(joined.back().second, range.second);
            else
                joined.push_back(range);
        }
        one.ranges = std::move(joined);
    }
    return files;
}

// The ranges of one file into memory, by the lanes of a reader. Empty, or what went wrong.
std::string read_ranges(Reader &reader, size_t file, const os::SparseMapping::Ranges &ranges, uint8_t *base,
                        const std::function<bool()> &is_unwanted) {
    std::vector<ReadJob> jobs;
    for (const auto &[begin, end] : ranges)
        for (uint64_t at = begin; at < end; at += Reader::MAX_REQUEST)
            jobs.push_back(
                {static_cast<int32_t>(file), at, base + at, std::min<size_t>(Reader::MAX_REQUEST, end - at)});
    reader.submit(jobs, true);
    std::string failure;
    for (size_t n_left = jobs.size(); n_left > 0;) {
        for (const Reader::Done &done : reader.collect(true)) {
            --n_left;
            if (failure.empty()) failure = done.error;
        }
        if (failure.empty() && is_unwanted()) failure = "it was cancelled";
        if (!failure.empty()) n_left -= reader.drop_waiting().size();
    }
    return failure;
}

}  // namespace

void Engine::stream_experts(llama_model_params &model, const bmoe_open_params &params) {
    StoreOptions options;
    options.n_lanes = lanes(params);
    options.direct = !params.no_direct;
    options.look_ahead = params.prefetch != BMOE_PREFETCH_OFF;
    options.remember = params.prefetch != BMOE_PREFETCH_ROUTER;
    options.budget_bytes = std::max<int64_t>(params.cache_bytes, 0);
    experts_ = std::make_unique<ExpertStore>(file_.shards, options);
    const std::string other = experts_->other_than(file_.identities);
    if (!other.empty()) fail(BMOE_E_MODEL, "the model file changed while it was being opened: %s", other.c_str());
    expert_buffers_ = std::make_unique<ExpertBufferType>(*experts_, file_.tensors);
    overrides_[0] = {"\\.ffn_(gate|up|down|gate_up)_exps\\.weight$", expert_buffers_->get()};
    overrides_[1] = {nullptr, nullptr};
    model.tensor_buft_overrides = overrides_;
    model.load_mode = LLAMA_LOAD_MODE_MMAP;
}

llama_model *Engine::load_streamed(const std::vector<const char *> &shards, const llama_model_params &model,
                                   const bmoe_open_params &params) {
    const std::vector<os::SparseMapping::File> files = dense_files(file_);
    std::unique_ptr<Reader> reader;
    os::SparseMapping::Fill fill;
    if (params.dense == BMOE_DENSE_ANON) {
        reader = std::make_unique<Reader>(file_.shards, lanes(params), !params.no_direct);
        fill = [&](size_t file, uint8_t *base) {
            const auto is_unwanted = [&] { return !model.progress_callback(0.0f, model.progress_callback_user_data); };
            return read_ranges(*reader, file, files[file].ranges, base, is_unwanted);
        };
    }
    const os::SparseMapping sparse(files, fill);
    std::unique_ptr<llama_model, FreeModel> loaded(
        llama_model_load_from_splits(const_cast<const char **>(shards.data()), shards.size(), model));
    if (!loaded && !expert_buffers_->failure().empty()) fail(BMOE_E_MODEL, "%s", expert_buffers_->failure().c_str());
    if (!loaded && !sparse.failure().empty())
        log_.first_error = "the weights of file " + std::to_string(sparse.bases().size() + 1) + " of " +
                           std::to_string(files.size()) + ": " + sparse.failure();
    if (!loaded) return nullptr;
    experts_->finish();
    model_ = std::move(loaded);
    if (fill) release_copied(sparse.bases());
    return model_.release();
}

// Weights that llama.cpp has put into another layout are copies: what they were read into is given back.
void Engine::release_copied(const std::vector<uint8_t *> &bases) {
    std::map<std::string, bool> is_copied;
    std::vector<std::pair<uint64_t, uint64_t>> used(bases.size(), {UINT64_MAX, 0});  // beyond it llama.cpp has unmapped
    for (const auto &[name, tensor] : llama_internal_get_tensor_map(model_.get())) {
        const auto place = file_.tensors.find(name);
        if (place == file_.tensors.end() || is_expert_weight(name)) continue;
        const auto shard = static_cast<size_t>(place->second.shard);
        const bool in_place = tensor->data == bases[shard] + place->second.offset;
        is_copied[name] = (is_copied.count(name) == 0 || is_copied[name]) && !in_place;
        if (!in_place) continue;
        used[shard].first = std::min(used[shard].first, place->second.offset);
        used[shard].second = std::max(used[shard].second, place->second.offset + place->second.n_bytes);
    }
    constexpr uint64_t PAGE = Reader::BLOCK;
    for (const auto &[name, copied] : is_copied) {
        const TensorPlace &place = file_.tensors[name];
        const auto &[first, last] = used[static_cast<size_t>(place.shard)];
        const uint64_t begin = (std::max(place.offset, first) + PAGE - 1) / PAGE * PAGE;
        const uint64_t end = std::min(place.offset + place.n_bytes, last) / PAGE * PAGE;
        if (copied && begin < end) madvise(bases[static_cast<size_t>(place.shard)] + begin, end - begin, MADV_DONTNEED);
    }
}

// A budget of what is available now that everything else has been allocated, less one layer's experts twice: the one that
// is computed and the one that is read meanwhile.
void Engine::choose_budget(const bmoe_open_params &params) {
    if (!experts_) return;
    // Where the dense weights are mapped, the kernel counts their pages as available, and each graph wants all of them.
    const int64_t mapped = params.dense == BMOE_DENSE_ANON ? 0 : file_.weights_bytes - experts_->total_bytes();
    const int64_t left = os::available_bytes() - mapped - 2 * experts_->layer_bytes();
    if (params.cache_bytes < 0) {
        experts_->set_budget(std::clamp<int64_t>(left * 8 / 10, 0, experts_->total_bytes()));
    } else if (std::min(params.cache_bytes, experts_->total_bytes()) > std::max<int64_t>(left, 0)) {
        log_line(log_, BMOE_LOG_WARN,
                 "a cache of " + std::to_string(params.cache_bytes >> 20) +
                     " MiB is asked for, and there is room for " + std::to_string(std::max<int64_t>(left, 0) >> 20) +
                     " MiB beside the model's other weights");
    }
    if (params.prefetch == BMOE_PREFETCH_BOTH || params.prefetch == BMOE_PREFETCH_ROUTER)
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

// The last layer computes only the tokens whose logits are wanted.
void Engine::look_ahead(int32_t layer, const ggml_tensor *topk) {
    if (!experts_->may_look_ahead(layer)) return;
    const int64_t n_last = layer + 2 == info_.n_layer ? n_outputs_ : topk->ne[1];
    if (n_last <= 0) return;
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<int32_t> guess = early_router_.guess(layer, EarlyRouter::input_of(topk), topk->ne[0], n_last);
    early_router_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    experts_->look_ahead(layer, guess);
}

void Engine::update_counters() {
    if (device_) {
        const DeviceCounters now = device_->counters();
        counters_.dev_tokens = now.n_tokens;
        counters_.dev_read_bytes = now.bytes_read;
        counters_.dev_stall_s = now.stall_s;
        counters_.dev_routed = now.n_routed;
        counters_.dev_demand = now.n_demand;
        counters_.dev_nodes = now.n_nodes;
    }
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
    counters_.mgmt_s = now.mgmt_s + early_router_s_;
    counters_.resident_bytes = experts_->resident_bytes();
}

}  // namespace bmoe
