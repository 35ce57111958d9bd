// Saved states. A byte that chooses the model, a byte of which the lowest bit says whether header and checksum are put
// right, so that llama.cpp gets to see what is behind them; then the state.
#include <cstring>

#include "checksum.h"
#include "engines.h"

namespace {

constexpr size_t HEADER = 48, POSITION_AT = 24, SIZE_AT = 32, SUM_AT = 40;
constexpr int32_t NEXT[] = {7}, FIRST[] = {1, 2};

using Row = std::vector<float>;
using Bytes = std::vector<uint8_t>;

// Logits of the next token, bit for bit; empty where there is no room for it.
Row next(bmoe_engine *engine) {
    const int32_t status = bmoe_prefill(engine, NEXT, 1, nullptr);
    if (status == BMOE_E_TOO_LONG) return {};
    fuzz::check(status == BMOE_OK, "an engine that computes no more");
    size_t n = 0;
    bmoe_logits(engine, nullptr, 0, &n);
    Row row(n);
    fuzz::check(bmoe_logits(engine, row.data(), n, &n) == BMOE_OK, "no logits");
    return row;
}

bool equal(const Row &a, const Row &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

Bytes saved(bmoe_engine *engine) {
    size_t n = 0;
    fuzz::check(bmoe_state_size(engine, &n) == BMOE_OK, "a state without a size");
    Bytes state(n);
    fuzz::check(bmoe_state_save(engine, state.data(), n, &n) == BMOE_OK, "a state that is not saved");
    state.resize(n);
    return state;
}

void begin(bmoe_engine *engine) {
    fuzz::check(bmoe_state_drop(engine) == BMOE_OK, "a state that is not dropped");
    fuzz::check(bmoe_prefill(engine, FIRST, 2, nullptr) == BMOE_OK, "a prefill that failed");
}

struct Subject {
    bmoe_engine *engine;
    Bytes header;
    Row after_none, after_first;
    explicit Subject(bmoe_engine *opened) : engine(opened) {
        after_none = next(engine);
        begin(engine);
        header = saved(engine);
        header.resize(HEADER);
        after_first = next(engine);
    }
};

void put_right(Bytes &state, const Bytes &header) {
    int32_t position = 0;
    memcpy(&position, state.data() + POSITION_AT, sizeof position);
    memcpy(state.data(), header.data(), HEADER);
    position %= 65;
    memcpy(state.data() + POSITION_AT, &position, sizeof position);
    const uint64_t n = state.size() - HEADER, sum = bmoe::checksum(state.data() + HEADER, n);
    memcpy(state.data() + SIZE_AT, &n, sizeof n);
    memcpy(state.data() + SUM_AT, &sum, sizeof sum);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const std::vector<Subject> subjects = [] {
        const std::vector<bmoe_engine *> engines = fuzz::open_all();
        return std::vector<Subject>(engines.begin(), engines.end());
    }();
    if (size < 2) return -1;
    const Subject &subject = subjects[data[0] % subjects.size()];
    Bytes state(data + 2, data + size);
    if (data[1] % 2 && state.size() >= HEADER) put_right(state, subject.header);
    begin(subject.engine);
    const int32_t status = bmoe_state_load(subject.engine, state.data(), state.size());
    const int32_t position = bmoe_position(subject.engine);
    if (status != BMOE_OK) {
        fuzz::check(status == BMOE_E_STATE || (status == BMOE_E_ARGUMENT && state.empty()), "another code than STATE");
        fuzz::check(position == 0 || position == 2, "a refused state that moved the position");
        fuzz::check(equal(next(subject.engine), position ? subject.after_first : subject.after_none),
                    "a refused state that left something behind");
        return 0;
    }
    int32_t said = 0;
    memcpy(&said, state.data() + POSITION_AT, sizeof said);
    fuzz::check(position == said, "a position that is not the state's");
    const Bytes again = saved(subject.engine);
    const Row row = next(subject.engine);
    fuzz::check(bmoe_state_load(subject.engine, again.data(), again.size()) == BMOE_OK, "its own state is refused");
    fuzz::check(equal(next(subject.engine), row), "a state that is another one after a save and a load");
    fuzz::check(bmoe_state_drop(subject.engine) == BMOE_OK, "a state that is not dropped");
    fuzz::check(equal(next(subject.engine), subject.after_none), "a state that stays behind when it is dropped");
    return 0;
}
