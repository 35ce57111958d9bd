// Logits to a token, through llama.cpp's sampler chain.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace bmoe {

// Below, a logit divided by it can be infinite, and the draw is from NaN; the likeliest token has all of the mass there.
static constexpr float LEAST_TEMPERATURE = 1e-4f;

void Engine::start_sampling(const bmoe_sampling &sampling) {
    std::unique_ptr<llama_sampler, FreeSampler> chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    if (!chain) throw std::bad_alloc();
    const auto add = [&](llama_sampler *link) { llama_sampler_chain_add(chain.get(), link); };
    if (sampling.temperature >= LEAST_TEMPERATURE) {
        if (sampling.top_k > 0) add(llama_sampler_init_top_k(sampling.top_k));
        if (sampling.top_p < 1.0f) add(llama_sampler_init_top_p(sampling.top_p, 1));
        if (sampling.min_p > 0.0f) add(llama_sampler_init_min_p(sampling.min_p, 1));
        add(llama_sampler_init_temp(sampling.temperature));
        // llama.cpp takes this one seed for "any".
        add(llama_sampler_init_dist(sampling.seed == LLAMA_DEFAULT_SEED ? sampling.seed - 1 : sampling.seed));
    } else {
        add(llama_sampler_init_greedy());
    }
    sampler_ = std::move(chain);
}

llama_token Engine::sample() {
    const float *row = logits();
    // A draw from NaN is any token: the samplers do not look.
    float top = -INFINITY;
    for (int32_t i = 0; i < info_.n_vocab; ++i) {
        if (std::isnan(row[i])) fail(BMOE_E_LOGITS, "the model's logits are broken: that of token %d is NaN", i);
        top = std::max(top, row[i]);
    }
    if (!std::isfinite(top)) fail(BMOE_E_LOGITS, "the model's logits are broken: their maximum is %g", double{top});
    if (!sampler_) {
        bmoe_sampling greedy{};
        start_sampling(greedy);
    }
    return llama_sampler_sample(sampler_.get(), context_.get(), -1);
}

}  // namespace bmoe
