// Wide graphs on a device that holds two layers: what is bound, loaded and waited for while one is computed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "device/arena.h"
#include "device/loaders.h"
#include "device/plan.h"
#include "experts/store.h"
#include "model_file.h"

namespace bmoe {

struct DeviceOptions {
    int32_t min_tokens = 32;  // of a graph that is to run on the device
    int32_t n_loaders = 2;
    bool direct = true;  // experts are read past the page cache
};

// Totals since it was opened; they never fall.
struct DeviceCounters {
    int64_t n_tokens = 0;
    int64_t bytes_read = 0;  // asked of the kernel for experts
    double stall_s = 0.0;    // in which computing waited for weights
    int64_t n_routed = 0;    // experts that graphs asked for, each layer's of each graph once
    int64_t n_demand = 0;    // of those, not foreseen
    int64_t n_nodes = 0;     // computed by the device
};

class PrefillDevice {
  public:
    using IsUnwanted = std::function<bool()>;

    // Of a context that was created with the device and has all its weights on the host. store is null where nothing
    // streams. Throws Error where its graphs cannot run there.
    PrefillDevice(const FoundDevice &device, llama_context *context, const llama_model *model, const ModelFile &file,
                  const ExpertStore *store, const DeviceOptions &options);

    // By the width alone: llama.cpp reuses a graph, and where it runs, for another of the same shape.
    bool takes(int32_t n_tokens) const { return n_tokens >= options_.min_tokens; }

    // A graph is about to be computed: bind, and begin to load.
    void begin();
    // A node is about to be computed. Waits for the weights it reads, and returns whether computing is to pause after it;
    // nothing where is_unwanted said so.
    std::optional<bool> before(const ggml_tensor *node, const IsUnwanted &is_unwanted);
    // Computing paused after such a node.
    void after();
    // Whether an expert was foreseen, until its router's choice is told.
    bool is_foreseen(int32_t layer, int32_t expert) const;
    // A layer's router has chosen: wait for these experts. False where is_unwanted said so.
    bool routed(int32_t layer, const std::vector<int32_t> &experts, const IsUnwanted &is_unwanted);
    // The graph has been computed. Throws Error where a layer went by unseen.
    void finish(int32_t n_tokens);
    // Weights are back on the host. Whatever happened; more than once does nothing.
    void release();

    DeviceCounters counters();
    int64_t n_bytes() const { return arena_->n_bytes(); }  // of device memory

  private:
    struct Progress {
        int32_t n_seen = 0;  // of the nodes that read the layer's weights
        bool is_computed = false;
        bool is_routed = false;
        std::set<int32_t> experts;  // that were submitted
    };
    void enter(size_t index);
    void load(size_t index);
    std::vector<LoadJob> jobs_for(size_t index, const std::vector<int32_t> &experts) const;
    LoadJob job_for(const PlannedLayer &layer, const Weight &weight, int32_t expert) const;
    bool wait(size_t group, const IsUnwanted &is_unwanted);
    size_t index_of(int32_t layer) const;  // layers_.size() where the plan has none of this number

    static size_t dense_group(size_t index) { return 2 * index; }
    static size_t experts_group(size_t index) { return 2 * index + 1; }

    FoundDevice device_;
    llama_context *context_;
    const ModelFile &file_;
    const ExpertStore *store_;
    DeviceOptions options_;
    Plan plan_;
    std::unique_ptr<Arena> arena_;
    std::unique_ptr<Reader> reader_;  // for its files; null where nothing streams
    std::unique_ptr<Loaders> loaders_;
    std::optional<Bound> bound_;
    std::vector<Progress> progress_;            // of each layer in this graph
    std::vector<std::vector<int32_t>> likely_;  // of each layer, what the last graph asked for
    std::optional<size_t> leaving_;             // the layer whose last reader is being computed
    DeviceCounters counters_;
};

}  // namespace bmoe
