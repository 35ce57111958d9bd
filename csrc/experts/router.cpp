#include "experts/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace bmoe {

namespace {

bool is_plain(const ggml_tensor *tensor) {
    return tensor->type == GGML_TYPE_F32 && tensor->data && ggml_is_contiguous(tensor) && tensor->buffer &&
           ggml_backend_buffer_is_host(tensor->buffer);
}

const float *floats(const ggml_tensor *tensor) { return static_cast<const float *>(tensor->data); }

// The score by which a router chooses: where it has a bias, that is added to the expert's probability by itself.
float choice_score(float logit, const ggml_tensor *bias, size_t expert) {
    return bias ? 1.0f / (1.0f + std::exp(-logit)) + floats(bias)[expert] : logit;
}

}  // namespace

void EarlyRouter::find(const std::vector<std::pair<std::string, ggml_tensor *>> &tensors) {
    for (const auto &[name, tensor] : tensors) {
        if (name.compare(0, 4, "blk.") != 0 || !is_plain(tensor)) continue;
        const int32_t layer = atoi(name.c_str() + 4);
        const std::string part = name.substr(name.find('.', 4) + 1);
        if (part == "ffn_gate_inp.weight" && ggml_n_dims(tensor) == 2) routers_[layer].gate = tensor;
        if (part == "ffn_norm.weight" || part == "post_attention_norm.weight") routers_[layer].norm = tensor;
        if (part == "exp_probs_b.bias") routers_[layer].bias = tensor;
    }
}

const ggml_tensor *EarlyRouter::input_of(const ggml_tensor *topk) {
    const ggml_tensor *node = topk;
    for (int depth = 0; node && depth < 24; ++depth) {
        if (node->op == GGML_OP_MUL_MAT && node->src[0] && strstr(node->src[0]->name, "ffn_gate_inp.weight")) {
            const ggml_tensor *input = node->src[1];
            return input && input->type == GGML_TYPE_F32 && ggml_is_contiguous(input) && input->data ? input : nullptr;
        }
        node = node->src[0];
    }
    return nullptr;
}

std::vector<int32_t> EarlyRouter::guess(int32_t layer, const ggml_tensor *input, int64_t n_used, int64_t n_last) const {
    const auto here = routers_.find(layer), next = routers_.find(layer + 1);
    if (!input || next == routers_.end() || !next->second.gate || next->second.gate->ne[0] != input->ne[0]) return {};
    const Router &router = next->second;
    const auto n_embd = static_cast<size_t>(input->ne[0]), n_expert = static_cast<size_t>(router.gate->ne[1]);
    const auto n_tokens = static_cast<size_t>(input->ne[1]);
    const size_t k = std::min(static_cast<size_t>(n_used), n_expert);
    // What this layer's norm has scaled, scaled as the next one's will.
    std::vector<float> scale(n_embd, 1.0f);
    if (here != routers_.end() && here->second.norm && router.norm) {
        for (size_t i = 0; i < n_embd; ++i) {
            const float mine = floats(here->second.norm)[i];
            scale[i] = std::fabs(mine) > 1e-6f ? floats(router.norm)[i] / mine : 1.0f;
        }
    }
    const auto dot = ggml_get_type_traits_cpu(GGML_TYPE_F32)->vec_dot;
    std::vector<float> state(n_embd), scores(n_expert);
    std::vector<int32_t> order(n_expert), n_wanted(n_expert, 0);
    for (size_t token = n_tokens - std::min(n_tokens, static_cast<size_t>(n_last)); token < n_tokens; ++token) {
        const float *row = floats(input) + token * n_embd;
        for (size_t i = 0; i < n_embd; ++i) state[i] = row[i] * scale[i];
        for (size_t expert = 0; expert < n_expert; ++expert) {
            float logit = 0.0f;
            dot(static_cast<int>(n_embd), &logit, 0, floats(router.gate) + expert * n_embd, 0, state.data(), 0, 1);
            scores[expert] = choice_score(logit, router.bias, expert);
        }
        std::iota(order.begin(), order.end(), 0);
        std::nth_element(
            order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k - 1), order.end(),
            [&](int32_t a, int32_t b) { return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)]; });
        for (size_t i = 0; i < k; ++i) ++n_wanted[static_cast<size_t>(order[i])];
    }
    std::vector<int32_t> ids;
    for (size_t expert = 0; expert < n_expert; ++expert)
        if (n_wanted[expert] > 0) ids.push_back(static_cast<int32_t>(expert));
    return ids;
}

}  // namespace bmoe
