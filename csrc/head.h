// The head: what makes logits of the state that the last layer hands on, as the graph computes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bmoe.h"
#include "ggml.h"
#include "model_file.h"

namespace bmoe {

class Head {
  public:
    // From the node of the logits, "result_output", of a graph that is being computed. What is none of a norm, a matrix, a
    // bias, factors and a soft-cap is not known how to apply: unknown() names it.
    void find(const ggml_tensor *logits);
    bool is_found() const { return found_; }

    // Throws Error (BMOE_E_STATE, BMOE_E_UNSUPPORTED) where there is none.
    bmoe_head describe() const;
    // float32 [n_embd] each: 1 and 0 where the model has none.
    std::vector<float> norm_weight(const ModelFile &file) const;
    std::vector<float> norm_bias(const ModelFile &file) const;
    // float32 [n_tokens, n_embd], and what is added to each logit [n_tokens], from the file.
    std::vector<float> rows(const ModelFile &file, const std::vector<int32_t> &tokens) const;
    std::vector<float> biases(const ModelFile &file, const std::vector<int32_t> &tokens) const;
    // What the head makes of states [n_states, n_embd], by the arithmetic of the graph: [n_states, n_tokens].
    std::vector<float> logits(const ModelFile &file, const std::vector<float> &states,
                              const std::vector<int32_t> &tokens) const;

  private:
    struct Part {
        std::string name;  // of the tensor in the file; empty: none
        ggml_type type = GGML_TYPE_F32;
    };
    void require() const;
    void find_outer(const ggml_tensor *node);
    void find_norm(const ggml_tensor *node);
    std::vector<char> raw(const ModelFile &file, const Part &part, const std::vector<int32_t> &rows,
                          int64_t n_columns) const;
    std::vector<float> read(const ModelFile &file, const Part &part, const std::vector<int32_t> &rows,
                            int64_t n_columns) const;
    std::vector<float> normed(const float *state, const std::vector<float> &weight,
                              const std::vector<float> &bias) const;

    bool found_ = false;
    std::string unknown_;
    bmoe_head head_{};
    Part weight_, bias_, norm_weight_, norm_bias_;
};

}  // namespace bmoe
