#include "engines.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace fuzz {

namespace {

std::vector<std::string> parts_of(const std::string &text) {
    std::vector<std::string> parts;
    for (size_t begin = 0; begin <= text.size() && parts.size() < 8;) {
        const size_t end = std::min(text.find('\x1e', begin), text.size());
        parts.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

std::string text_of(bmoe_engine *engine, const std::vector<int32_t> &tokens, int32_t special) {
    size_t n_bytes = 0;
    int32_t status = bmoe_detokenize(engine, tokens.data(), tokens.size(), special, nullptr, 0, &n_bytes);
    check(status == BMOE_OK || status == BMOE_E_TOO_SMALL, "tokens of its own that it does not take back");
    std::string text(n_bytes, '\0');
    status = bmoe_detokenize(engine, tokens.data(), tokens.size(), special, text.data(), text.size(), &n_bytes);
    check(status == BMOE_OK && n_bytes == text.size(), "a size that was not the size");
    return text;
}

std::vector<int32_t> tokens_of(bmoe_engine *engine, const std::string &text, const std::vector<bmoe_span> &spans,
                               bool add_bos) {
    size_t n_tokens = 0;
    int32_t status =
        bmoe_tokenize(engine, text.data(), text.size(), spans.data(), spans.size(), add_bos, nullptr, 0, &n_tokens);
    check(status == BMOE_OK || status == BMOE_E_TOO_SMALL, "a text that cannot be tokenized");
    std::vector<int32_t> tokens(n_tokens);
    status = bmoe_tokenize(engine, text.data(), text.size(), spans.data(), spans.size(), add_bos, tokens.data(),
                           tokens.size(), &n_tokens);
    check(status == BMOE_OK && n_tokens == tokens.size(), "a number of tokens that was not the number");
    return tokens;
}

bool is_control(bmoe_engine *engine, int32_t token) {
    return (bmoe_token_attr(engine, token) & BMOE_TOKEN_CONTROL) != 0;
}

// Where tokens give the text back, none that is control lies in, or reaches into, what is data.
void check_control(bmoe_engine *engine, const std::string &text, const std::vector<bmoe_span> &spans,
                   const std::vector<int32_t> &tokens) {
    if (text_of(engine, tokens, 1) != text) return;
    size_t at = 0;
    for (const int32_t token : tokens) {
        const size_t end = at + text_of(engine, {token}, 1).size();
        for (const bmoe_span &span : spans) {
            const bool touches = span.begin < end && at < span.end;
            check(!touches || !is_control(engine, token), "a control token out of data");
        }
        at = end;
    }
}

}  // namespace

bmoe_open_params small() {
    bmoe_open_params params;
    bmoe_open_params_init(&params);
    params.n_ctx = 64;
    params.n_ubatch = 16;
    params.n_threads = 1;
    return params;
}

std::vector<bmoe_engine *> open_all() {
    const char *folder = getenv("BMOE_FUZZ_MODELS");
    std::vector<std::string> paths;
    for (const auto &entry : std::filesystem::directory_iterator(folder ? folder : ".")) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<bmoe_engine *> engines;
    const bmoe_open_params params = small();
    for (const std::string &path : paths) {
        char error[256];
        engines.push_back(nullptr);
        if (bmoe_open(&engines.back(), path.c_str(), &params, error, sizeof error) == BMOE_OK) continue;
        fprintf(stderr, "%s\n", error);
        exit(2);
    }
    if (engines.empty()) exit(2);
    return engines;
}

void check(bool is_right, const char *what) {
    if (is_right) return;
    fprintf(stderr, "bmoe::fuzz: %s\n", what);
    abort();
}

int32_t render_and_tokenize(bmoe_engine *engine, const std::string &text, uint8_t flags, bool is_mutated) {
    std::vector<bmoe_span> all;
    if (!text.empty()) all.push_back({0, text.size()});
    for (const int32_t token : tokens_of(engine, text, all, false))
        check(is_mutated || !is_control(engine, token), "a control token out of data");

    const std::vector<std::string> parts = parts_of(text);
    const bool system = (flags & 4) != 0;
    std::vector<bmoe_message> messages;
    for (size_t i = 0; i < parts.size(); ++i) {
        const char *role = system && i == 0 ? "system" : (i + system) % 2 == 0 ? "user" : "assistant";
        messages.push_back({role, parts[i].data(), parts[i].size()});
    }
    size_t n_bytes = 0, n_spans = 0;
    int32_t status = bmoe_render(engine, messages.data(), messages.size(), flags & 1, flags >> 1 & 1, nullptr, 0,
                                 &n_bytes, nullptr, 0, &n_spans);
    if (status != BMOE_OK && status != BMOE_E_TOO_SMALL) {
        check(status == BMOE_E_TEMPLATE, "messages refused for another reason than their template");
        return status;
    }
    std::string prompt(n_bytes, '\0');
    std::vector<bmoe_span> spans(n_spans);
    status = bmoe_render(engine, messages.data(), messages.size(), flags & 1, flags >> 1 & 1, prompt.data(),
                         prompt.size(), &n_bytes, spans.data(), spans.size(), &n_spans);
    check(status == BMOE_OK && n_bytes == prompt.size() && n_spans == spans.size(), "a size that was not the size");
    size_t last = 0;
    for (const bmoe_span &span : spans) {
        check(last <= span.begin && span.begin <= span.end && span.end <= prompt.size(), "spans that do not rise");
        last = span.end;
    }
    const std::vector<int32_t> tokens = tokens_of(engine, prompt, spans, false);
    if (!is_mutated) check_control(engine, prompt, spans, tokens);
    tokens_of(engine, prompt, spans, (flags & 8) != 0);
    return BMOE_OK;
}

}  // namespace fuzz
