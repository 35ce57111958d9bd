#include "device/prefill_device.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "error.h"
#include "llama-context.h"
#include "llama-model.h"

namespace bmoe {

namespace {

constexpr int MOST_PLANS = 8;  // each leaves more weights on the host than the one before; two are the rule

}  // namespace

PrefillDevice::PrefillDevice(const FoundDevice &device, llama_context *context, const llama_model *model,
                             const ModelFile &file, const ExpertStore *store, const DeviceOptions &options)
    : device_(device), context_(context), file_(file), store_(store), options_(options) {
    plan_ = make_plan(build_graph(context, false), model, device);
    for (int i = 0;; ++i) {
        arena_ = std::make_unique<Arena>(plan_, device_);
        bound_.emplace(plan_);
        const ggml_cgraph *graph = build_graph(context, false);
        bound_.reset();
        if (!leave_on_host(plan_, graph, context, device.device)) break;
        arena_.reset();
        for (PlannedLayer &layer : plan_.layers)
            for (Weight &weight : layer.weights) weight.device.buffer = nullptr, weight.device.data = nullptr;
        if (i == MOST_PLANS) fail(BMOE_E_UNSUPPORTED, "it computes with other weights each time it is asked");
    }
    // The model's, not the file's: of a layer that llama.cpp leaves out there is nothing to compute.
    for (const auto &named : llama_internal_get_tensor_map(model)) {
        const std::string &name = named.first;
        if (!store || !is_expert_weight(name)) continue;
        const bool planned = std::any_of(plan_.layers.begin(), plan_.layers.end(), [&](const PlannedLayer &layer) {
            return std::any_of(layer.weights.begin(), layer.weights.end(),
                               [&](const Weight &w) { return w.is_routed && w.tensor == named.second; });
        });
        if (!planned) fail(BMOE_E_UNSUPPORTED, "it does not compute with the experts of %s", name.c_str());
    }
    bound_.emplace(plan_);
    build_graph(context, true);
    bound_.reset();
    if (store) reader_ = std::make_unique<Reader>(file.shards, 0, options.direct);
    if (reader_) {
        const std::string other = reader_->other_than(file.identities);
        if (!other.empty()) fail(BMOE_E_READ, "the model file changed while it was being opened: %s", other.c_str());
    }
    loaders_ = std::make_unique<Loaders>(options.n_loaders, 2 * plan_.layers.size(), reader_.get(), device.faults);
    likely_.resize(plan_.layers.size());
}

void PrefillDevice::begin() {
    const std::string changed = reader_ ? reader_->changed() : "";
    if (!changed.empty()) fail(BMOE_E_READ, "the model file changed while it was open: %s", changed.c_str());
    progress_.assign(plan_.layers.size(), {});
    leaving_.reset();
    bound_.emplace(plan_);
    for (size_t i = 0; i < std::min(Arena::N_SLOTS, plan_.layers.size()); ++i) load(i);
}

// The slot of a layer is free: fill it with what the layer needs for certain, then with what it is likely to need.
void PrefillDevice::load(size_t index) {
    const PlannedLayer &layer = plan_.layers[index];
    std::vector<LoadJob> jobs;
    for (const Weight &weight : layer.weights) {
        if (weight.is_routed) continue;
        jobs.push_back(job_for(layer, weight, LoadJob::ALL));
        jobs.back().group = dense_group(index);
    }
    loaders_->submit(jobs, false);
    jobs = jobs_for(index, likely_[index]);
    for (LoadJob &job : jobs) job.is_guess = true;
    loaders_->submit(jobs, false);
    progress_[index].experts.insert(likely_[index].begin(), likely_[index].end());
}

std::vector<LoadJob> PrefillDevice::jobs_for(size_t index, const std::vector<int32_t> &experts) const {
    std::vector<LoadJob> jobs;
    const PlannedLayer &layer = plan_.layers[index];
    for (const int32_t expert : experts) {
        for (const Weight &weight : layer.weights) {
            if (!weight.is_routed) continue;
            jobs.push_back(job_for(layer, weight, expert));
            jobs.back().group = experts_group(index);
        }
    }
    return jobs;
}

LoadJob PrefillDevice::job_for(const PlannedLayer &layer, const Weight &weight, int32_t expert) const {
    LoadJob job;
    job.weight = &weight;
    job.expert = expert;
    // Beside an expert that is in memory another may not be.
    const bool is_cached =
        store_ && weight.is_routed && !is_padded(weight) && store_->residency(layer.number, expert) == BMOE_RESIDENT;
    if (!store_ || !weight.is_routed || is_cached) {
        job.from = static_cast<const uint8_t *>(weight.host.data);
    } else {
        const TensorPlace &place = file_.tensors.at(weight.tensor->name);
        job.file = place.shard;
        job.offset = place.offset;
    }
    return job;
}

std::optional<bool> PrefillDevice::before(const ggml_tensor *node, const IsUnwanted &is_unwanted) {
    if (is_view(node)) return false;
    ggml_backend_t backend =
        ggml_backend_sched_get_tensor_backend(context_->get_sched(), const_cast<ggml_tensor *>(node));
    if (backend && ggml_backend_get_device(backend) == device_.device) ++counters_.n_nodes;
    for (const ggml_tensor *source : node->src) {
        const auto found = source ? plan_.layer_of.find(weight_behind(source)) : plan_.layer_of.end();
        if (found == plan_.layer_of.end()) continue;
        const size_t index = found->second;
        if (device_.faults.skipped_point && index == 0) {
            device_.faults.skipped_point = false;
            return false;
        }
        Progress &progress = progress_[index];
        if (progress.n_seen == 0) {
            enter(index);
            if (!device_.faults.no_fill_wait && !wait(dense_group(index), is_unwanted)) return std::nullopt;
        }
        if (plan_.layers[index].n_expert > 0 && !progress.is_routed && node->op == GGML_OP_MUL_MAT_ID)
            fail(BMOE_E_INTERNAL, "%s reads experts before it is known which", node->name);
        if (++progress.n_seen > plan_.layers[index].n_reads)
            fail(BMOE_E_INTERNAL, "%s reads weights of layer %d, which were thought to be no longer needed", node->name,
                 plan_.layers[index].number);
        if (progress.n_seen < plan_.layers[index].n_reads) return false;
        leaving_ = index;
        return true;
    }
    return false;
}

// The first node that reads a layer's weights. Its slot was given to it when the layer that had it was computed.
void PrefillDevice::enter(size_t index) {
    if (index >= Arena::N_SLOTS && !progress_[index - Arena::N_SLOTS].is_computed)
        fail(BMOE_E_INTERNAL, "layer %d was to be computed while the end of layer %d had not been seen",
             plan_.layers[index].number, plan_.layers[index - Arena::N_SLOTS].number);
    if (device_.faults.early_refill && index + Arena::N_SLOTS < plan_.layers.size()) {
        load(index + Arena::N_SLOTS);
        loaders_->wait(dense_group(index + Arena::N_SLOTS), [] { return false; });
    }
}

void PrefillDevice::after() {
    if (!leaving_) return;
    const size_t index = *leaving_, next = index + Arena::N_SLOTS;
    leaving_.reset();
    progress_[index].is_computed = true;
    if (next < plan_.layers.size() && !device_.faults.early_refill) load(next);
}

size_t PrefillDevice::index_of(int32_t number) const {
    const auto &layers = plan_.layers;
    const auto at = std::lower_bound(layers.begin(), layers.end(), number,
                                     [](const PlannedLayer &layer, int32_t n) { return layer.number < n; });
    return at == layers.end() || at->number != number ? layers.size() : static_cast<size_t>(at - layers.begin());
}

bool PrefillDevice::is_foreseen(int32_t layer, int32_t expert) const {
    const size_t index = index_of(layer);
    return index < progress_.size() && progress_[index].experts.count(expert) > 0;
}

bool PrefillDevice::routed(int32_t layer, const std::vector<int32_t> &given, const IsUnwanted &is_unwanted) {
    const size_t index = index_of(layer);
    if (index == plan_.layers.size() || plan_.layers[index].n_expert == 0) return true;
    if (device_.faults.throwing_router) throw std::runtime_error("ErrorDeviceLost");
    std::vector<int32_t> experts = given, missing;
    std::sort(experts.begin(), experts.end());
    experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
    Progress &progress = progress_[index];
    if (index >= Arena::N_SLOTS && !progress_[index - Arena::N_SLOTS].is_computed)
        fail(BMOE_E_INTERNAL, "layer %d was routed while its slot was in use", layer);
    for (const int32_t expert : experts) {
        if (expert < 0 || expert >= plan_.layers[index].n_expert)
            fail(BMOE_E_INTERNAL, "layer %d routes to expert %d of %d", layer, expert, plan_.layers[index].n_expert);
        if (progress.experts.insert(expert).second) missing.push_back(expert);
    }
    counters_.n_routed += static_cast<int64_t>(experts.size());
    counters_.n_demand += static_cast<int64_t>(missing.size());
    progress.is_routed = true;
    loaders_->choose(experts_group(index), experts);
    loaders_->submit(jobs_for(index, missing), true);
    likely_[index] = std::move(experts);
    if (device_.faults.no_fill_wait) return true;
    if (!wait(experts_group(index), is_unwanted)) return false;
    std::vector<LoadJob> again;
    for (LoadJob &job : loaders_->take_missed(experts_group(index))) {
        if (!std::binary_search(likely_[index].begin(), likely_[index].end(), job.expert)) continue;
        job.is_guess = false;
        again.push_back(job);
    }
    if (again.empty()) return true;
    loaders_->submit(again, true);
    return wait(experts_group(index), is_unwanted);
}

bool PrefillDevice::wait(size_t group, const IsUnwanted &is_unwanted) {
    const auto begin = std::chrono::steady_clock::now();
    const auto count = [&] {
        counters_.stall_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    try {
        const bool there = loaders_->wait(group, is_unwanted);
        count();
        return there;
    } catch (const Error &) {
        count();
        throw;
    }
}

void PrefillDevice::finish(int32_t n_tokens) {
    release();
    for (size_t i = 0; i < plan_.layers.size(); ++i)
        if (!progress_[i].is_computed)
            fail(BMOE_E_INTERNAL, "a graph ended before the end of layer %d was seen", plan_.layers[i].number);
    counters_.n_tokens += n_tokens;
}

void PrefillDevice::release() {
    if (!bound_) return;
    loaders_->settle();
    bound_.reset();
}

DeviceCounters PrefillDevice::counters() {
    DeviceCounters now = counters_;
    now.bytes_read = static_cast<int64_t>(loaders_->bytes_read());
    return now;
}

}  // namespace bmoe
