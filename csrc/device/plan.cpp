#include "device/plan.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "error.h"
#include "ggml-impl.h"
#include "graph_names.h"
#include "llama-context.h"
#include "llama-memory.h"
#include "llama-model.h"
#include "model_file.h"

namespace bmoe {

namespace {

// What a refused type may be carried in, the nearest first.
constexpr ggml_type CARRIERS[] = {GGML_TYPE_Q8_0, GGML_TYPE_F16, GGML_TYPE_F32};

struct FreeBuffer {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};

bool is_matrix_of(const ggml_tensor *node, const ggml_tensor *weight) {
    return (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) && node->src[0] == weight;
}

void set_type(ggml_tensor &tensor, ggml_type type) {
    tensor.type = type;
    tensor.nb[0] = ggml_type_size(type);
    tensor.nb[1] = ggml_row_size(type, tensor.ne[0]);
    for (int i = 2; i < GGML_MAX_DIMS; ++i) tensor.nb[i] = tensor.nb[i - 1] * static_cast<size_t>(tensor.ne[i - 1]);
}

// Whether the device computes all that reads a weight when the weight is of this type. The answer may depend on the buffer.
bool is_taken(const ggml_cgraph *graph, const Weight &weight, ggml_type type, ggml_backend_buffer_t buffer,
              const FoundDevice &found) {
    if (type == found.faults.refuse || weight.tensor->ne[0] % ggml_blck_size(type) != 0) return false;
    ggml_tensor there = *weight.tensor;
    set_type(there, type);
    there.buffer = buffer;
    return std::all_of(weight.readers.begin(), weight.readers.end(), [&](int32_t index) {
        ggml_tensor node = *graph->nodes[index];
        if (type != weight.tensor->type && !is_matrix_of(&node, weight.tensor)) return false;
        for (ggml_tensor *&source : node.src)
            if (source == weight.tensor) source = &there;
        return ggml_backend_dev_supports_op(found.device, &node);
    });
}

// Losing range is worse than losing digits.
bool may_carry(ggml_type carrier, ggml_type type) {
    if (carrier == type) return false;
    if (type == GGML_TYPE_F32) return false;
    if (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) return carrier == GGML_TYPE_F32;
    return ggml_get_type_traits(type)->to_float != nullptr;
}

// False: it stays on the host.
bool choose_type(const ggml_cgraph *graph, Weight &weight, ggml_backend_buffer_t buffer, const FoundDevice &found) {
    weight.host = Placement::of(*weight.tensor);
    weight.device = *weight.tensor;
    weight.device.buffer = nullptr;
    weight.device.data = weight.device.extra = nullptr;
    if (!ggml_backend_buffer_is_host(weight.tensor->buffer)) return false;
    ggml_type chosen = weight.tensor->type;
    bool taken = is_taken(graph, weight, chosen, buffer, found);
    for (const ggml_type carrier : CARRIERS) {
        if (taken) break;
        if (!may_carry(carrier, weight.tensor->type)) continue;
        chosen = carrier;
        taken = is_taken(graph, weight, chosen, buffer, found);
    }
    if (taken && chosen != weight.tensor->type) set_type(weight.device, chosen);
    return taken;
}

// What is left of a layer once some of its weights stay on the host.
void count_reads(Plan &plan) {
    plan.layer_of.clear();
    plan.layers.erase(
        std::remove_if(plan.layers.begin(), plan.layers.end(), [](const PlannedLayer &l) { return l.weights.empty(); }),
        plan.layers.end());
    for (size_t i = 0; i < plan.layers.size(); ++i) {
        PlannedLayer &layer = plan.layers[i];
        std::vector<int32_t> readers;
        layer.n_expert = 0;
        for (const Weight &weight : layer.weights) {
            plan.layer_of[weight.tensor] = i;
            readers.insert(readers.end(), weight.readers.begin(), weight.readers.end());
            if (weight.is_routed) layer.n_expert = static_cast<int32_t>(weight.tensor->ne[2]);
        }
        std::sort(readers.begin(), readers.end());
        layer.n_reads = static_cast<int32_t>(std::unique(readers.begin(), readers.end()) - readers.begin());
    }
}

}  // namespace

Placement Placement::of(const ggml_tensor &tensor) {
    Placement placement{tensor.buffer, tensor.data, tensor.extra, tensor.type, {}};
    std::copy(std::begin(tensor.nb), std::end(tensor.nb), placement.nb);
    return placement;
}

void Placement::put(ggml_tensor &tensor) const {
    tensor.buffer = buffer;
    tensor.data = data;
    tensor.extra = extra;
    tensor.type = type;
    std::copy(std::begin(nb), std::end(nb), tensor.nb);
}

bool is_view(const ggml_tensor *node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

const ggml_cgraph *build_graph(llama_context *context, bool reserve) {
    const llama_memory_context_ptr memory = context->get_memory()->init_full();
    const uint32_t n_tokens = context->n_ubatch();
    const uint32_t n_outputs = std::min(n_tokens, context->get_cparams().n_outputs_max);
    const ggml_cgraph *graph = context->graph_reserve(n_tokens, 1, n_outputs, memory.get(), !reserve);
    if (!graph) fail(BMOE_E_MEMORY, "it has no room for what is computed between the layers");
    return graph;
}

Plan make_plan(const ggml_cgraph *graph, const llama_model *model, const FoundDevice &found) {
    std::unordered_map<const ggml_tensor *, std::string> names;
    for (const auto &[name, tensor] : llama_internal_get_tensor_map(model))
        if (layer_of(name.c_str()) >= 0) names[tensor] = name;
    Plan plan;
    int32_t routed_layer = -1;                              // whose router the graph has come to
    std::unordered_map<const ggml_tensor *, size_t> place;  // in its layer
    for (int32_t i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor *node = graph->nodes[i];
        if (const int32_t layer = number_after(ROUTED, node); layer >= 0) routed_layer = layer;
        if (is_view(node)) continue;
        for (const ggml_tensor *source : node->src) {
            const ggml_tensor *tensor = source ? weight_behind(source) : nullptr;
            const auto name = tensor ? names.find(tensor) : names.end();
            if (name == names.end()) continue;
            const int32_t number = layer_of(name->second.c_str());
            if (plan.layers.empty() || plan.layers.back().number < number) {
                plan.layers.emplace_back();
                plan.layers.back().number = number;
            }
            PlannedLayer &layer = plan.layers.back();
            if (layer.number != number)
                fail(BMOE_E_UNSUPPORTED, "its layers are not computed one after the other: %s reads %s in layer %d",
                     node->name, tensor->name, layer.number);
            const auto [at, is_new] = place.try_emplace(tensor, layer.weights.size());
            if (is_new) {
                layer.weights.emplace_back();
                layer.weights.back().tensor = const_cast<ggml_tensor *>(tensor);
                layer.weights.back().is_routed = is_expert_weight(name->second);
            }
            Weight &weight = layer.weights[at->second];
            weight.readers.push_back(i);
            if (node->op != GGML_OP_MUL_MAT_ID || node->src[0] != tensor || routed_layer != number)
                weight.is_routed = false;
        }
    }
    const std::unique_ptr<ggml_backend_buffer, FreeBuffer> buffer(
        ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(found.device), 0));
    for (PlannedLayer &layer : plan.layers) {
        auto &weights = layer.weights;
        const auto stays = [&](Weight &weight) { return !choose_type(graph, weight, buffer.get(), found); };
        weights.erase(std::remove_if(weights.begin(), weights.end(), stays), weights.end());
    }
    count_reads(plan);
    if (plan.layers.empty()) fail(BMOE_E_UNSUPPORTED, "it computes with none of this model's weights");
    return plan;
}

bool leave_on_host(Plan &plan, const ggml_cgraph *graph, llama_context *context, ggml_backend_dev_t device) {
    // By what is read: a device puts its nodes into another order, so that an index is of its graph alone. What is not read
    // there is read elsewhere, as a copy that the scheduler makes.
    std::unordered_map<const ggml_tensor *, size_t> n_reads;
    for (int32_t i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor *node = graph->nodes[i];
        ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(context->get_sched(), node);
        if (is_view(node) || !backend || ggml_backend_get_device(backend) != device) continue;
        for (const ggml_tensor *source : node->src)
            if (source) ++n_reads[weight_behind(source)];
    }
    bool any = false;
    for (PlannedLayer &layer : plan.layers) {
        auto &weights = layer.weights;
        const auto stays = std::remove_if(weights.begin(), weights.end(), [&](const Weight &weight) {
            return n_reads[weight.tensor] != weight.readers.size();
        });
        any = any || stays != weights.end();
        weights.erase(stays, weights.end());
    }
    count_reads(plan);
    if (plan.layers.empty()) fail(BMOE_E_UNSUPPORTED, "it computes with none of this model's weights");
    return any;
}

}  // namespace bmoe
