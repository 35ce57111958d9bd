// The next layer's router, applied before its time: residual streams change slowly from one layer to the next.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ggml.h"

namespace bmoe {

class EarlyRouter {
  public:
    // Finds the routers among the model's tensors by name. Those that are not plain float32 in memory are left out.
    void find(const std::vector<std::pair<std::string, ggml_tensor *>> &tensors);

    // What the layer's router was given in a graph, found from its "ffn_moe_topk" node: float32 [n_embd, n_tokens], or null.
    static const ggml_tensor *input_of(const ggml_tensor *topk);

    // Which experts the layer after this is likely to route to, rising; empty where that is not known.
    //   input   of this layer's router
    //   n_used  experts of a token
    //   n_last  tokens at the end that the next layer will still compute
    std::vector<int32_t> guess(int32_t layer, const ggml_tensor *input, int64_t n_used, int64_t n_last) const;

  private:
    struct Router {
        const ggml_tensor *gate = nullptr;  // [n_embd, n_expert]
        const ggml_tensor *norm = nullptr;  // [n_embd], of what the gate is given; may be null
        const ggml_tensor *bias = nullptr;  // [n_expert], of the choice; may be null
    };
    std::map<int32_t, Router> routers_;
};

}  // namespace bmoe
