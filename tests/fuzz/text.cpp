// Messages rendered and tokenized. A byte that chooses the model, a byte of flags, the text: engines.h.
#include "engines.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const std::vector<bmoe_engine *> engines = fuzz::open_all();
    if (size < 2) return -1;
    const std::string text(reinterpret_cast<const char *>(data) + 2, size - 2);
    fuzz::render_and_tokenize(engines[data[0] % engines.size()], text, data[1]);
    return 0;
}
