// Which expert slices are in memory: reserved ranges, filled by reads, given back page by page.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bmoe.h"
#include "experts/reader.h"
#include "experts/spares.h"
#include "ggml.h"

namespace bmoe {

struct StoreOptions {
    int64_t budget_bytes = 0;  // of experts kept from one graph to the next
    int32_t n_lanes = 4;
    bool direct = true;
    bool remember = true;    // guess what earlier graphs asked for, where nothing better is known
    bool look_ahead = true;  // read what the last prompt routed to before this one's router has run
};

// Totals since the store was made; they never fall.
struct StoreCounters {
    int64_t bytes_read = 0;
    int64_t bytes_routed = 0;  // of the experts that graphs asked for, each graph's once
    int64_t bytes_ahead = 0;   // read before they were asked for
    int64_t bytes_wasted = 0;  // of those, never asked for
    int64_t n_hits = 0;        // experts asked for that were in memory
    int64_t n_misses = 0;
    double io_s = 0.0;     // in which at least one lane was reading
    double stall_s = 0.0;  // in which compute waited for reads
    double mgmt_s = 0.0;   // spent on deciding and giving back
};

class ExpertStore {
  public:
    ExpertStore(const std::vector<std::string> &paths, const StoreOptions &options);
    ~ExpertStore();
    ExpertStore(const ExpertStore &) = delete;
    ExpertStore &operator=(const ExpertStore &) = delete;

    // Reserve a tensor's range and point the tensor at it. n_expert is its third dimension.
    void add(ggml_tensor *tensor, int32_t layer, int32_t file, uint64_t offset);
    // All tensors are added.
    void finish();
    // As Reader::other_than().
    std::string other_than(const std::vector<os::FileIdentity> &inspected) const {
        return reader_.other_than(inspected);
    }

    void begin_graph();
    // Begin to have the experts of a layer in memory. ids may repeat.
    void ask(int32_t layer, const std::vector<int32_t> &ids);
    // Whether the weights of a layer's experts are there, those of all that were asked for: false where the layer is not the
    // one that was asked for last, or release_used() has given them back.
    bool is_readable(int32_t layer, const char *weights) const;
    // The graph comes to read these weights of the layer that was asked for last.
    void use(const char *weights);
    // What use() was called for has been computed with, and nothing of the graph reads it again: what of it does not stay
    // is given back, and makes room to read ahead.
    void release_used();
    // Nothing of the graph reads the experts that were asked for last.
    void release_layer();
    // Whether guesses wait for room.
    bool is_short_of_room() const { return !postponed_.empty(); }
    // Where an expert of a layer is now.
    bmoe_residency residency(int32_t layer, int32_t id) const;
    // Read ahead, behind what was asked for, what the layer after it is likely to ask for; where guess is empty, what it
    // asked for before.
    void look_ahead(int32_t layer, const std::vector<int32_t> &guess);
    // Whether guesses are made, have been right enough in this graph, and could find something missing after this layer.
    bool may_look_ahead(int32_t layer) const;
    // Wait until what was asked for is there; false where is_unwanted, asked every 20 ms, said so first. Throws Error
    // (BMOE_E_READ).
    bool wait(const std::function<bool()> &is_unwanted);
    // The graph has been computed, or given up.
    void end_graph();

    void set_budget(int64_t bytes);
    int64_t budget_bytes() const { return options_.budget_bytes; }
    int64_t resident_bytes() const { return resident_bytes_; }
    int64_t total_bytes() const { return total_bytes_; }
    int64_t layer_bytes() const;  // of the largest layer with all of its experts
    bool is_direct() const { return reader_.is_direct(); }
    StoreCounters counters();

  private:
    struct Tensor {
        std::string name;
        int32_t file;
        uint64_t offset;
        size_t slice_bytes;
        uint8_t *base;  // of expert 0
        void *range;
        size_t range_bytes;
        bool used = false;      // by the graph that is running, like what follows
        bool released = false;  // but for experts that stay
    };
    enum class Where : uint8_t { absent, reading, resident };
    struct Expert {
        Where where = Where::absent;
        bool ahead = false;     // read or being read before it was asked for
        bool whole = true;      // no read of it was dropped
        uint32_t released = 0;  // of its layer's tensors, one bit each, those it was given back of
        uint16_t n_jobs = 0;    // of its reads that are not done
        uint32_t score = 0;     // how much graphs asked for it, the last ones counting most
        uint64_t used_at = 0;   // graph that asked for it last
    };
    struct Layer {
        int32_t number = -1;
        std::vector<Tensor> tensors;
        std::vector<Expert> experts;
        int64_t expert_bytes = 0;
        std::vector<int32_t> likely;  // what the next graph is likely to ask for
        size_t quota = 0;             // experts that stay from one graph to the next
    };

    Layer *layer_of(int32_t number);
    const Layer *layer_of(int32_t number) const;
    void share_budget();
    bool guesses_well() const;
    void read(Layer &layer, std::vector<int32_t> ids, bool urgent);
    void take(const std::vector<Reader::Done> &done);
    void ahead_of(size_t index, const std::vector<int32_t> &guess);
    void read_postponed();
    void use_room();
    static std::pair<uintptr_t, uintptr_t> own_pages(const Tensor &tensor, size_t index);
    void count_uses(Layer &layer, const std::vector<int32_t> &ids, const std::vector<int32_t> &given);
    void judge_guesses(Layer &layer, const std::vector<int32_t> &ids);
    void drop(const std::vector<ReadJob> &jobs);
    std::vector<int32_t> superfluous(const Layer &layer) const;
    void trim(Layer &layer);
    void give_back(Layer &layer, int32_t id);
    void give_back(Layer &layer, size_t tensor_index, size_t index);

    StoreOptions options_;
    Reader reader_;
    SparePages spares_;
    std::vector<Layer> layers_;
    std::vector<int32_t> index_of_;  // layer number → index, -1
    int64_t total_bytes_ = 0;
    int64_t resident_bytes_ = 0;
    int64_t reading_bytes_ = 0;       // of experts that are being read
    size_t n_reading_ = 0;            // jobs
    int32_t current_ = -1;            // index of the layer that is being computed
    std::vector<int32_t> asked_;      // of it
    std::vector<int32_t> postponed_;  // guesses that there is no room for yet
    size_t ahead_index_ = 0;          // of their layer
    bool has_router_ = false;         // this graph's guesses come from routers
    size_t n_guessed_ = 0;            // experts of this graph that were read ahead and whose router has run by now
    size_t n_right_ = 0;              // of them, those it asked for
    uint64_t graph_ = 0;
    std::string failure_;
    StoreCounters counters_;
};

}  // namespace bmoe
