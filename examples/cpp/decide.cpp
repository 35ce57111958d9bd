// A decision from C++, through bmoe.hpp:
//
//   ./decide model.gguf "Which is a fruit? A) apple B) table. Answer with the letter." A B
//
// Built by the CMakeLists.txt beside it, or: c++ -std=c++17 decide.cpp -o decide $(pkg-config --cflags --libs bmoe)
// Prints one line per choice: its log-probability over the whole vocabulary, and the choice.
#include <cstdio>
#include <set>

#include "bmoe.hpp"

namespace {

int decide(const std::string &model, const std::string &question, const std::vector<std::string> &choices) {
    bmoe::Engine engine(model);
    std::vector<int32_t> firsts;
    std::set<int32_t> seen;
    for (const std::string &choice : choices) {
        const std::vector<int32_t> tokens = engine.tokenize(choice, {{0, choice.size()}}, false);
        if (tokens.empty() || !seen.insert(tokens[0]).second) {
            std::fprintf(stderr, "decide: \"%s\" has no first token of its own\n", choice.c_str());
            return 2;
        }
        firsts.push_back(tokens[0]);
    }
    const bmoe::Prompt prompt = engine.render(question);
    engine.prefill(engine.tokenize(prompt.text, prompt.data, true));
    const std::vector<double> logp = bmoe::log_probabilities(engine.logits(), firsts);
    for (size_t i = 0; i < choices.size(); ++i) std::printf("%.17g %s\n", logp[i], choices[i].c_str());
    return 0;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: %s MODEL.gguf QUESTION CHOICE...\n", argv[0]);
        return 2;
    }
    try {
        return decide(argv[1], argv[2], {argv + 3, argv + argc});
    } catch (const bmoe::Error &error) {
        std::fprintf(stderr, "decide: %s\n", error.what());
        return 1;
    }
}
