// Mutated inputs to libbmoe. With clang it is a libFuzzer target; with another compiler it brings a driver of its own:
//
//   fuzz MODEL open|text|state CORPUS SECONDS SEED
//
// Each input is written to the file "input" in the working folder before it is tried, so that it is there when the process
// ends. Prints how many were tried and how many the library took.
#include <bmoe.h>
#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "checksum.h"

namespace {

using Bytes = std::vector<uint8_t>;

std::string model, target;
bmoe_engine *shared_engine = nullptr;
long n_taken = 0;

bmoe_open_params small() {
    bmoe_open_params params;
    bmoe_open_params_init(&params);
    params.n_ctx = 64;
    params.n_ubatch = 16;
    params.n_threads = 1;
    return params;
}

void check(bool is_right, const char *what) {
    if (is_right) return;
    fprintf(stderr, "bmoe::fuzz: %s\n", what);
    abort();
}

int32_t render_and_tokenize(bmoe_engine *engine, const Bytes &text, int32_t reasoning) {
    const char *bytes = reinterpret_cast<const char *>(text.data());
    const size_t half = text.size() / 2;
    const bmoe_message messages[] = {{"system", bytes, half}, {"user", bytes + half, text.size() - half}};
    std::vector<char> prompt(4096 + 4 * text.size());
    std::vector<bmoe_span> spans(64 + text.size());
    std::vector<int32_t> tokens(prompt.size() + 8);
    size_t n_bytes = 0, n_spans = 0, n_tokens = 0;
    int32_t status = bmoe_render(engine, messages, 2, reasoning, 1, prompt.data(), prompt.size(), &n_bytes,
                                 spans.data(), spans.size(), &n_spans);
    if (status != BMOE_OK) return status;
    check(n_bytes <= prompt.size() && n_spans <= spans.size(), "a size beyond the room there is");
    status = bmoe_tokenize(engine, prompt.data(), n_bytes, spans.data(), n_spans, 1, tokens.data(), tokens.size(),
                           &n_tokens);
    if (status != BMOE_OK) return status;
    const bmoe_span all = {0, text.size()};
    status = bmoe_tokenize(engine, bytes, text.size(), &all, text.empty() ? 0 : 1, 0, tokens.data(), tokens.size(),
                           &n_tokens);
    if (status != BMOE_OK) return status;
    for (size_t i = 0; i < n_tokens; ++i)
        check((bmoe_token_attr(engine, tokens[i]) & BMOE_TOKEN_CONTROL) == 0, "a control token out of data");
    return bmoe_detokenize(engine, tokens.data(), n_tokens, 0, prompt.data(), prompt.size(), &n_bytes);
}

int32_t open_one(const Bytes &file) {
    std::ofstream("model.gguf", std::ios::binary)
        .write(reinterpret_cast<const char *>(file.data()), static_cast<long>(file.size()));
    bmoe_open_params params = small();
    params.stream = file.size() % 2;
    params.inspect = file.size() % 3 == 0;
    char error[256] = "";
    bmoe_engine *engine = nullptr;
    const int32_t status = bmoe_open(&engine, "model.gguf", &params, error, sizeof error);
    check((status == BMOE_OK) == (engine != nullptr), "a handle with an error, or none without");
    check(status == BMOE_OK || error[0] != '\0', "an error without a text");
    if (engine) render_and_tokenize(engine, {'h', 'i', '<', '|', 'e'}, 0);
    bmoe_close(engine);
    return status;
}

int32_t load_one(Bytes state) {
    // Half of them with a checksum that is right, to get behind it.
    constexpr size_t HEADER = 48, SUM_AT = 40, SIZE_AT = 32;
    if (state.size() > HEADER && state.size() % 2 == 0) {
        const uint64_t n = state.size() - HEADER, sum = bmoe::checksum(state.data() + HEADER, n);
        memcpy(state.data() + SIZE_AT, &n, sizeof n);
        memcpy(state.data() + SUM_AT, &sum, sizeof sum);
    }
    const int32_t status = bmoe_state_load(shared_engine, state.data(), state.size());
    const int32_t token = 1;
    const int32_t after = bmoe_prefill(shared_engine, &token, 1, nullptr);
    check(after == BMOE_OK || after == BMOE_E_TOO_LONG, "an engine that computes no more after a refused state");
    return status;
}

void start() {
    if (target == "open") return;
    bmoe_open_params params = small();
    char error[256];
    if (bmoe_open(&shared_engine, model.c_str(), &params, error, sizeof error) == BMOE_OK) return;
    fprintf(stderr, "%s\n", error);
    exit(2);
}

void try_one(const Bytes &input) {
    int32_t status = BMOE_OK;
    if (target == "open") status = open_one(input);
    if (target == "text") status = render_and_tokenize(shared_engine, input, input.size() % 2);
    if (target == "state") status = load_one(input);
    n_taken += status == BMOE_OK;
}

}  // namespace

#ifdef BMOE_LIBFUZZER
extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    model = getenv("BMOE_FUZZ_MODEL");
    target = getenv("BMOE_FUZZ_TARGET");
    start();
    return 0;
}
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    try_one(Bytes(data, data + size));
    return 0;
}
#else
namespace {

std::vector<Bytes> read_corpus(const char *folder) {
    std::vector<Bytes> corpus;
    DIR *entries = opendir(folder);
    while (const dirent *entry = entries ? readdir(entries) : nullptr) {
        if (entry->d_name[0] == '.') continue;
        std::ifstream file(std::string(folder) + "/" + entry->d_name, std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    if (entries) closedir(entries);
    return corpus;
}

// One to eight changes, half of them near the beginning, where headers and metadata are.
void mutate(Bytes &bytes, const std::vector<Bytes> &corpus, std::mt19937_64 &random) {
    static const uint64_t NOTABLE[] = {0,          1,          0x7f,       0x80,       0xff, 0x7fffffff,
                                       0x80000000, 0xffffffff, 1ull << 40, 1ull << 63, ~0ull};
    for (uint64_t n = 1 + random() % 8; n > 0; --n) {
        if (bytes.empty()) bytes.push_back(static_cast<uint8_t>(random()));
        const size_t span = random() % 2 ? std::min<size_t>(bytes.size(), 4096) : bytes.size();
        const size_t at = random() % span;
        switch (random() % 7) {
            case 0:
                bytes[at] ^= static_cast<uint8_t>(1u << random() % 8);
                break;
            case 1:
                bytes[at] = static_cast<uint8_t>(random());
                break;
            case 2: {
                const uint64_t value = NOTABLE[random() % (sizeof NOTABLE / sizeof *NOTABLE)];
                memcpy(bytes.data() + at, &value, std::min<size_t>(bytes.size() - at, 1u << random() % 4));
                break;
            }
            case 3:
                bytes.resize(at);
                break;
            case 4:
                bytes.insert(bytes.begin() + static_cast<long>(at), 1 + random() % 16, static_cast<uint8_t>(random()));
                break;
            case 5:
                bytes.erase(bytes.begin() + static_cast<long>(at),
                            bytes.begin() + static_cast<long>(std::min(bytes.size(), at + 1 + random() % 16)));
                break;
            default: {
                const Bytes &other = corpus[random() % corpus.size()];
                if (other.empty()) break;
                const size_t from = random() % other.size(),
                             n_bytes = std::min<size_t>(other.size() - from, 1 + random() % 64);
                std::copy_n(other.begin() + static_cast<long>(from), std::min(n_bytes, bytes.size() - at),
                            bytes.begin() + static_cast<long>(at));
            }
        }
    }
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    model = argv[1];
    target = argv[2];
    const std::vector<Bytes> corpus = read_corpus(argv[3]);
    if (corpus.empty()) return 2;
    start();
    std::mt19937_64 random(strtoull(argv[5], nullptr, 10));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(atoi(argv[4]));
    long n_tried = 0;
    for (; std::chrono::steady_clock::now() < end; ++n_tried) {
        Bytes input = corpus[random() % corpus.size()];
        if (static_cast<size_t>(n_tried) >= corpus.size()) mutate(input, corpus, random);
        std::ofstream("input", std::ios::binary)
            .write(reinterpret_cast<const char *>(input.data()), static_cast<long>(input.size()));
        try_one(input);
    }
    bmoe_close(shared_engine);
    printf("%ld tried, %ld taken\n", n_tried, n_taken);
    return 0;
}
#endif
