#include "experts/buffer.h"

#include <sys/mman.h>

#include <cstring>

#include "error.h"
#include "ggml-backend-impl.h"

namespace bmoe {

struct ExpertBufferType::Impl {
    ExpertStore &store;
    const std::map<std::string, TensorPlace> &places;
    ggml_backend_buffer_type type{};
    std::string failure;
};

namespace {

constexpr size_t ALIGNMENT = 64;

// Addresses for llama.cpp to lay tensors out in; each is moved to a range of its own when its place is known.
struct Addresses {
    void *base;
    size_t size;
};

const char *type_name(ggml_backend_buffer_type_t) { return "bmoe_experts"; }
size_t alignment(ggml_backend_buffer_type_t) { return ALIGNMENT; }
bool is_host(ggml_backend_buffer_type_t) { return true; }

void free_buffer(ggml_backend_buffer_t buffer) {
    const auto *addresses = static_cast<Addresses *>(buffer->context);
    munmap(addresses->base, addresses->size);
    delete addresses;
}

void *base_of(ggml_backend_buffer_t buffer) { return static_cast<Addresses *>(buffer->context)->base; }

void memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void clear(ggml_backend_buffer_t, uint8_t) {}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    memcpy(data, static_cast<const uint8_t *>(tensor->data) + offset, size);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *, size_t, size_t) {
    auto *impl = static_cast<ExpertBufferType::Impl *>(buffer->buft->context);
    try {
        const auto place = impl->places.find(tensor->name);
        if (place == impl->places.end()) fail(BMOE_E_MODEL, "%s lies in no file of the model", tensor->name);
        if (place->second.n_bytes != ggml_nbytes(tensor))
            fail(BMOE_E_MODEL, "%s has %zu bytes here and %llu in its file", tensor->name, ggml_nbytes(tensor),
                 static_cast<unsigned long long>(place->second.n_bytes));
        impl->store.add(tensor, layer_of(tensor->name), place->second.shard, place->second.offset);
    } catch (const std::exception &error) {
        impl->failure = error.what();
        throw;
    }
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    const size_t n_bytes = size > 0 ? size : ALIGNMENT;
    void *base = mmap(nullptr, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    ggml_backend_buffer_i calls{};
    calls.free_buffer = free_buffer;
    calls.get_base = base_of;
    calls.memset_tensor = memset_tensor;
    calls.set_tensor = set_tensor;
    calls.get_tensor = get_tensor;
    calls.clear = clear;
    return ggml_backend_buffer_init(type, calls, new Addresses{base, n_bytes}, size);
}

}  // namespace

ExpertBufferType::ExpertBufferType(ExpertStore &store, const std::map<std::string, TensorPlace> &places)
    : impl_(new Impl{store, places, {}, {}}) {
    impl_->type.iface.get_name = type_name;
    impl_->type.iface.alloc_buffer = alloc_buffer;
    impl_->type.iface.get_alignment = alignment;
    impl_->type.iface.is_host = is_host;
    impl_->type.context = impl_.get();
}

ExpertBufferType::~ExpertBufferType() = default;

ggml_backend_buffer_type_t ExpertBufferType::get() const { return &impl_->type; }

const std::string &ExpertBufferType::failure() const { return impl_->failure; }

}  // namespace bmoe
