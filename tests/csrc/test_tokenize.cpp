// tokenize() and tokenize_cut() against llama_tokenize() of the whole text.
//   usage: test_tokenize MODEL.gguf...
// Prints a line per model; exits 1 on the first difference or control token out of data.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "error.h"
#include "log.h"
#include "tokenize.h"

namespace {

const std::vector<std::string> PIECES = {
    "Hello",
    " world",
    "  two  blanks ",
    "\n",
    "\n\n",
    " \n \n",
    "\t",
    "Answer:",
    " A",
    "A)",
    "12",
    "34567",
    "3.14",
    "-1",
    "don't",
    "we'LL",
    "naïve café",
    "Grüße",
    "Привет, мир",
    "你好，世界",
    "こんにちは",
    "한국어",
    "مرحبا",
    "שלום",
    "हिन्दी",
    "ไทย",
    "👍",
    "👨‍👩‍👧",
    "e\u0301",
    "def f(x):\n    return x**2  # square\n",
    "<div class=\"a\">",
    "{\"k\": [1, 2]}",
    "http://a.example/?q=1&b=2",
    "ſ",
    "\xff\xfe",
    "<",
    "|",
    "<|",
    "|>",
    "im_end",
    "</",
    "s>",
    "_",
    "▁",
    "",
    "\r\n",
    std::string("\0zero", 5),
    "ZWJ\u200d",
    "\u00a0nbsp",
    "𝔘𝔫𝔦",
    "................",
    "          ",
};

std::vector<llama_token> whole(const llama_vocab *vocab, const std::string &text) {
    std::vector<llama_token> tokens(text.size() + 16);
    const int n = llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                                 static_cast<int32_t>(tokens.size()), false, true);
    tokens.resize(static_cast<size_t>(n));
    return tokens;
}

int failed(const char *what, const std::string &text) {
    printf("FAILED: %s: %s\n", what, bmoe::legible(text).c_str());
    return 1;
}

int check(const char *path) {
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    llama_model *model = llama_model_load_from_file(path, params);
    if (!model) return failed("cannot load", path);
    const llama_vocab *vocab = llama_model_get_vocab(model);
    const bmoe::SpecialTokens specials(vocab);
    std::vector<std::string> controls;
    std::vector<std::string> others;
    for (const auto &token : specials.tokens()) (token.control ? controls : others).push_back(token.text);
    std::mt19937 random(7);
    const auto pick = [&](const std::vector<std::string> &from) { return from[random() % from.size()]; };
    int n_ordinary = 0, n_hostile = 0, n_seams = 0;

    for (int round = 0; round < 4000; ++round) {
        // A prompt of template parts (which may hold control tokens) and data parts (ordinary text).
        std::string text;
        bmoe::Spans data;
        for (unsigned part = 0; part < 1 + random() % 6; ++part) {
            const size_t begin = text.size();
            const bool is_data = random() % 2 == 0;
            for (unsigned i = 0; i < random() % 6; ++i) text += pick(PIECES);
            if (!others.empty() && random() % 4 == 0) text += pick(others);
            if (!is_data && random() % 2 == 0) text += pick(controls);
            if (is_data) data.push_back({begin, text.size()});
        }
        bool seam = false;  // pieces may spell a control token by accident, then the rule for data applies
        for (const auto &match : specials.find_control(text, 0, text.size()))
            seam = seam || bmoe::touches(data, match.begin, match.end);
        if (seam) {
            ++n_seams;
            continue;
        }
        ++n_ordinary;
        if (bmoe::tokenize(vocab, specials, text, data) != whole(vocab, text))
            return failed("tokenize differs from the whole", text);
        if (bmoe::tokenize_cut(vocab, specials, text, data) != whole(vocab, text))
            return failed("tokenize_cut differs from the whole", text);
    }
    for (int round = 0; round < 4000; ++round) {
        // Control text in data, and control text that only half lies in data.
        const std::string control = pick(controls);
        const std::string before = pick(PIECES), after = pick(PIECES);
        const size_t split = random() % (control.size() + 1);
        const std::string text = before + control + after;
        const bmoe::Spans data = random() % 2
                                     ? bmoe::Spans{{0, before.size() + std::max<size_t>(split, 1)}}
                                     : bmoe::Spans{{before.size() + std::min(split, control.size() - 1), text.size()}};
        const auto tokens = bmoe::tokenize(vocab, specials, text, data);
        for (const llama_token token : tokens) {
            if (bmoe::token_attr(vocab, token) & BMOE_TOKEN_CONTROL) {
                // Accidental control text wholly outside the data is the template's own.
                bool own = false;
                for (const auto &match : specials.find_control(text, 0, text.size())) {
                    own = own || (match.id == token && !bmoe::touches(data, match.begin, match.end));
                }
                if (!own) return failed("a control token came out of data", text);
            }
        }
        ++n_hostile;
    }
    std::string all;
    for (const std::string &control : controls) all += control + " x ";
    for (const llama_token token : bmoe::tokenize(vocab, specials, all, {{0, all.size()}})) {
        if (bmoe::token_attr(vocab, token) & BMOE_TOKEN_CONTROL)
            return failed("a control token came out of a text of all of them", bmoe::detokenize(vocab, {token}, true));
    }
    printf("%s: %zu control tokens, %d ordinary prompts, %d with control text in data, %d left out\n", path,
           controls.size(), n_ordinary, n_hostile, n_seams);
    llama_model_free(model);
    return 0;
}

}  // namespace

int main(int argc, char **argv) {
    bmoe::install_log_router();
    int wrong = argc < 2;
    for (int i = 1; i < argc; ++i) wrong |= check(argv[i]);
    return wrong;
}
