// What llama.cpp calls the nodes of a graph that are listened to; a number of the layer follows.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "ggml.h"

namespace bmoe {

constexpr const char *ROUTED = "ffn_moe_topk-";        // experts, int32 [n_used, n_tokens]
constexpr const char *WEIGHTED = "ffn_moe_weighted-";  // outputs (or inputs) of experts times the routers' weights
constexpr const char *EXPERTS_END = "ffn_moe_out-";    // the sum of what a token's experts made
constexpr const char *LAYER_END = "l_out-";            // float32 [n_embd, n_tokens]
constexpr const char *LOGITS = "result_output";        // float32 [n_vocab, n_outputs]; of no layer

// The layer of a node that has this name, or -1.
inline int32_t number_after(const char *name, const ggml_tensor *node) {
    const size_t n = strlen(name);
    return strncmp(node->name, name, n) == 0 ? atoi(node->name + n) : -1;
}

}  // namespace bmoe
