// Which weights of which layer a wide graph reads, in what order, and in what type the device takes them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/device.h"
#include "ggml.h"
#include "llama.h"

namespace bmoe {

// The fields of a tensor that say where its bytes are and what they look like.
struct Placement {
    ggml_backend_buffer_t buffer = nullptr;
    void *data = nullptr;
    void *extra = nullptr;
    ggml_type type = GGML_TYPE_F32;
    size_t nb[GGML_MAX_DIMS]{};

    static Placement of(const ggml_tensor &tensor);
    void put(ggml_tensor &tensor) const;
};

struct Weight {
    ggml_tensor *tensor = nullptr;  // the model's own, which graphs read
    Placement host;
    ggml_tensor device{};          // as it is on the device: it is filled through this, whether bound or not
    bool is_routed = false;        // experts, of which only those that are routed to are needed
    std::vector<int32_t> readers;  // nodes of the graph, by index

    bool is_converted() const { return device.type != host.type; }
};

struct PlannedLayer {
    int32_t number = -1;
    std::vector<Weight> weights;
    int32_t n_reads = 0;  // of its weights by the nodes of a graph; after the last one they are no longer needed
    int32_t n_expert = 0;
};

struct Plan {
    std::vector<PlannedLayer> layers;                          // in the order in which a graph computes them
    std::unordered_map<const ggml_tensor *, size_t> layer_of;  // weight → index
};

// Nodes that compute nothing.
bool is_view(const ggml_tensor *node);
// The weight that a source of a node is, or is a view of.
inline const ggml_tensor *weight_behind(const ggml_tensor *source) {
    return source->view_src ? source->view_src : source;
}

// A graph as wide as pieces get, put together but not computed, with weights where they are now. Valid until the next one.
const ggml_cgraph *build_graph(llama_context *context, bool reserve);

// From such a graph while all weights are on the host. Throws Error (BMOE_E_UNSUPPORTED) where layers are not computed one
// after the other.
Plan make_plan(const ggml_cgraph *graph, const llama_model *model, const FoundDevice &device);

// Take weights out of the plan that this graph, which was built with all of them bound, reads elsewhere than on the device.
// Returns whether there were any.
bool leave_on_host(Plan &plan, const ggml_cgraph *graph, llama_context *context, ggml_backend_dev_t device);

}  // namespace bmoe
