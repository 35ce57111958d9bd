// bmoe.h for C++17: lifetimes are owned, errors are thrown, what comes back is a std::vector. A host takes it along.
#pragma once

#include <bmoe.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace bmoe {

struct Error : std::runtime_error {
    int32_t status;
    Error(int32_t status_, const std::string &text) : std::runtime_error(text), status(status_) {}
};

struct Prompt {
    std::string text;
    std::vector<bmoe_span> data;  // what came from the messages: no control token is made of it
};

inline bmoe_open_params open_params() {
    bmoe_open_params params;
    bmoe_open_params_init(&params);
    return params;
}

// One engine. It moves and does not copy; one thread at a time, but for cancel().
class Engine {
  public:
    explicit Engine(const std::string &path, const bmoe_open_params &params = open_params()) {
        if (bmoe_abi_version() != BMOE_ABI_VERSION)
            throw Error(BMOE_E_UNSUPPORTED, "libbmoe has ABI " + std::to_string(bmoe_abi_version()) +
                                                ", this program needs " + std::to_string(BMOE_ABI_VERSION));
        char error[512] = "";
        bmoe_engine *engine = nullptr;
        const int32_t status = bmoe_open(&engine, path.c_str(), &params, error, sizeof error);
        if (status != BMOE_OK) throw Error(status, error);
        engine_.reset(engine);
    }

    bmoe_engine *get() const { return engine_.get(); }

    bmoe_info info() const {
        bmoe_info info{};
        info.size_bytes = sizeof info;
        check(bmoe_get_info(get(), &info));
        return info;
    }

    // One user message through the model's template.
    Prompt render(std::string_view question) const {
        const bmoe_message message{"user", question.data(), question.size()};
        size_t n_bytes = 0, n_spans = 0;
        wanted(bmoe_render(get(), &message, 1, 0, 1, nullptr, 0, &n_bytes, nullptr, 0, &n_spans));
        Prompt prompt{std::string(n_bytes, '\0'), std::vector<bmoe_span>(n_spans)};
        check(bmoe_render(get(), &message, 1, 0, 1, prompt.text.data(), n_bytes, &n_bytes, prompt.data.data(), n_spans,
                          &n_spans));
        return prompt;
    }

    std::vector<int32_t> tokenize(std::string_view text, const std::vector<bmoe_span> &data, bool add_bos) const {
        size_t n_tokens = 0;
        wanted(
            bmoe_tokenize(get(), text.data(), text.size(), data.data(), data.size(), add_bos, nullptr, 0, &n_tokens));
        std::vector<int32_t> tokens(n_tokens);
        check(bmoe_tokenize(get(), text.data(), text.size(), data.data(), data.size(), add_bos, tokens.data(), n_tokens,
                            &n_tokens));
        return tokens;
    }

    bmoe_counters prefill(const std::vector<int32_t> &tokens) {
        bmoe_counters spent{};
        spent.size_bytes = sizeof spent;
        check(bmoe_prefill(get(), tokens.data(), tokens.size(), &spent));
        return spent;
    }

    std::vector<float> logits() const {
        size_t n = 0;
        wanted(bmoe_logits(get(), nullptr, 0, &n));
        std::vector<float> row(n);
        check(bmoe_logits(get(), row.data(), n, &n));
        return row;
    }

    std::vector<std::byte> save() const {
        size_t n = 0;
        check(bmoe_state_size(get(), &n));
        std::vector<std::byte> state(n);
        check(bmoe_state_save(get(), state.data(), n, &n));
        state.resize(n);
        return state;
    }
    void load(const std::vector<std::byte> &state) { check(bmoe_state_load(get(), state.data(), state.size())); }
    void drop() { check(bmoe_state_drop(get())); }
    void cancel() const { bmoe_cancel(get()); }

  private:
    struct Close {
        void operator()(bmoe_engine *engine) const { bmoe_close(engine); }
    };

    void check(int32_t status) const {
        if (status < 0) throw Error(status, bmoe_last_error(get()));
    }
    // Of a call that only asks for a size.
    void wanted(int32_t status) const {
        if (status != BMOE_E_TOO_SMALL) check(status);
    }

    std::unique_ptr<bmoe_engine, Close> engine_;
};

// Log-probabilities of some tokens over the whole vocabulary, by the arithmetic that bmoe itself uses: docs/c-api.md.
inline std::vector<double> log_probabilities(const std::vector<float> &logits, const std::vector<int32_t> &tokens) {
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0, lost = 0.0;  // Kahan's sum
    for (const float logit : logits) {
        const double term = std::exp(logit - top) - lost, next = sum + term;
        lost = (next - sum) - term;
        sum = next;
    }
    const double grid = 4294967296.0, norm = std::rint(std::log(sum) * grid) / grid;
    std::vector<double> out;
    for (const int32_t token : tokens) out.push_back(logits.at(static_cast<size_t>(token)) - top - norm);
    return out;
}

}  // namespace bmoe
