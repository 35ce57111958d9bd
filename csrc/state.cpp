// The sequence state as bytes: our header, then llama.cpp's own serialization of sequence 0.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "checksum.h"
#include "contain.h"
#include "engine.h"
#include "error.h"

namespace bmoe {

namespace {

struct Header {
    char magic[8];
    uint32_t abi;
    int32_t kv_type;
    uint64_t fingerprint;
    int32_t position;
    int32_t reserved;
    uint64_t payload_bytes;
    uint64_t checksum;  // of the payload
};
constexpr char MAGIC[8] = {'B', 'M', 'O', 'E', 'S', 'T', 'A', '2'};
constexpr llama_seq_id SEQUENCE = 0;

}  // namespace

size_t Engine::state_size() const {
    require_context();
    const size_t payload = llama_state_seq_get_size(context_.get(), SEQUENCE);
    if (payload == 0) fail(BMOE_E_MEMORY, "no memory to lay out the state at position %d", position_);
    return sizeof(Header) + payload;
}

size_t Engine::save_state(void *bytes, size_t capacity) {
    require_context();
    const size_t payload = capacity - sizeof(Header);
    auto *body = static_cast<uint8_t *>(bytes) + sizeof(Header);
    const size_t written = llama_state_seq_get_data(context_.get(), body, payload, SEQUENCE);
    // With room for all of it that is the only reason left.
    if (written == 0) fail(BMOE_E_MEMORY, "no memory to lay out the state at position %d", position_);
    Header header{};
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    header.abi = BMOE_ABI_VERSION;
    header.kv_type = info_.kv_type;
    header.fingerprint = file_.fingerprint;
    header.position = position_;
    header.payload_bytes = written;
    header.checksum = checksum(body, written);
    memcpy(bytes, &header, sizeof header);
    // A window is restored to other cells than it was computed in, and attention sums by cell: the same numbers in
    // another order. So this engine, too, goes on from the restored layout. The logits are not of the state and stay.
    if (info_.n_swa > 0 && position_ > 0) replace_memory(body, written, position_);
    return sizeof header + written;
}

void Engine::load_state(const void *bytes, size_t n_bytes) {
    require_context();
    Header header;
    if (n_bytes < sizeof header)
        fail(BMOE_E_STATE, "%zu bytes are no saved state: its header alone takes %zu", n_bytes, sizeof header);
    memcpy(&header, bytes, sizeof header);
    if (memcmp(header.magic, MAGIC, sizeof MAGIC) != 0) fail(BMOE_E_STATE, "these bytes are no state saved by bmoe");
    if (header.abi != BMOE_ABI_VERSION)
        fail(BMOE_E_STATE, "the state was saved by ABI %u, this is ABI %d", header.abi, BMOE_ABI_VERSION);
    if (header.fingerprint != file_.fingerprint) fail(BMOE_E_STATE, "the state was saved from another model file");
    if (header.kv_type != info_.kv_type)
        fail(BMOE_E_STATE, "the state was saved with another KV type (%d, not %d)", header.kv_type, info_.kv_type);
    if (header.payload_bytes != n_bytes - sizeof header) {
        fail(BMOE_E_STATE, "the state is cut short: %" PRIu64 " bytes expected after the header, %zu found",
             header.payload_bytes, n_bytes - sizeof header);
    }
    if (header.position < 0 || header.position > info_.n_ctx) {
        fail(BMOE_E_STATE, "the state holds %d tokens, the context has room for %d", header.position, info_.n_ctx);
    }
    const auto *body = static_cast<const uint8_t *>(bytes) + sizeof header;
    if (checksum(body, header.payload_bytes) != header.checksum)
        fail(BMOE_E_STATE, "the bytes of the state are damaged behind its header");
    has_logits_ = false;
    replace_memory(body, header.payload_bytes, header.position);
}

void Engine::replace_memory(const uint8_t *payload, size_t n_bytes, int32_t position) {
    if (position == 0) return drop_state();
    llama_memory_t memory = llama_get_memory(context_.get());
    llama_memory_clear(memory, /*data=*/has_nan_);
    was_loaded_ = true;
    position_ = 0;
    size_t read = 0;
    log_.first_error.clear();
    try {
        const Contained contained;
        read = llama_state_seq_set_data(context_.get(), payload, n_bytes, SEQUENCE);
    } catch (const std::exception &) {
        read = 0;
    }
    if (read != n_bytes || llama_memory_seq_pos_max(memory, SEQUENCE) != position - 1) {
        drop_state();
        if (log_.first_error.find("bad_alloc") != std::string::npos)
            fail(BMOE_E_MEMORY, "no memory to take the state back; the state is empty now");
        fail(BMOE_E_STATE, "llama.cpp does not take the state back; the state is empty now");
    }
    position_ = position;
}

void Engine::drop_state() {
    require_context();
    // Cells without a token are masked and a recurrent state begins as the old one times 0: of NaN that is NaN.
    llama_memory_clear(llama_get_memory(context_.get()), /*data=*/has_nan_ || was_loaded_);
    has_nan_ = was_loaded_ = false;
    position_ = 0;
    has_logits_ = false;
}

// Cut to n_tokens positions if this memory can, else change nothing.
bool Engine::trim(int32_t n_tokens) {
    llama_memory_t memory = llama_get_memory(context_.get());
    // A recurrent state has no positions, and a window that has wrapped around is another one when cut.
    if (info_.is_recurrent || info_.is_hybrid || info_.n_swa > 0) return false;
    if (!llama_memory_seq_rm(memory, SEQUENCE, n_tokens, -1)) return false;
    position_ = n_tokens;
    has_logits_ = false;
    return true;
}

void Engine::keep_state(int32_t n_tokens) {
    require_context();
    if (n_tokens < 0 || n_tokens > position_)
        fail(BMOE_E_ARGUMENT, "cannot keep %d tokens of a state that holds %d", n_tokens, position_);
    if (n_tokens == position_) return;
    if (n_tokens == 0) return drop_state();
    if (!trim(n_tokens)) fail(BMOE_E_UNSUPPORTED, "this model's memory cannot be cut back to %d tokens", n_tokens);
}

}  // namespace bmoe
