// Models opened and used. A byte of flags, then a GGUF up to its weights, which are zeros in a hole behind it: so inputs
// stay small, and what is mutated is what is parsed. Flags: stream, inspect, KV in f32, no hole, fewer experts, anonymous.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>

#include "engines.h"

namespace {

constexpr off_t HOLE = 4 << 20;
constexpr char PATH[] = "model.gguf";

void write_model(const uint8_t *data, size_t size, bool hole) {
    const int fd = open(PATH, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    fuzz::check(fd >= 0 && write(fd, data, size) == static_cast<ssize_t>(size), "no file can be written");
    fuzz::check(!hole || ftruncate(fd, static_cast<off_t>(size) + HOLE) == 0, "no file can be made longer");
    close(fd);
}

void use(bmoe_engine *engine) {
    fuzz::render_and_tokenize(engine, "hi<|e\x1eyes", 3, true);
    const std::vector<int32_t> tokens(20, 0);
    if (bmoe_prefill(engine, tokens.data(), tokens.size(), nullptr) != BMOE_OK) return;
    size_t n = 0;
    if (bmoe_state_size(engine, &n) != BMOE_OK) return;
    std::vector<uint8_t> state(n);
    if (bmoe_state_save(engine, state.data(), n, &n) != BMOE_OK) return;
    bmoe_state_load(engine, state.data(), n);
    bmoe_prefill(engine, tokens.data(), 1, nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return -1;
    const uint8_t flags = data[0];
    write_model(data + 1, size - 1, (flags & 8) == 0);
    bmoe_open_params params = fuzz::small();
    params.stream = flags & 1;
    params.inspect = flags >> 1 & 1;
    params.kv_type = flags >> 2 & 1;
    params.n_expert_used = flags >> 4 & 1;
    params.dense = flags >> 5 & 1;
    char error[512] = "";
    bmoe_engine *engine = nullptr;
    const int32_t status = bmoe_open(&engine, PATH, &params, error, sizeof error);
    fuzz::check((status == BMOE_OK) == (engine != nullptr), "a handle with an error, or none without");
    fuzz::check(status == BMOE_OK || error[0] != '\0', "an error without a text");
    if (engine) use(engine);
    bmoe_close(engine);
    return 0;
}
