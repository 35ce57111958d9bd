#include "device/arena.h"

#include <algorithm>
#include <cinttypes>

#include "error.h"

namespace bmoe {

namespace {

struct Place {
    size_t buffer;
    size_t offset;
};

// Where the weights of a layer go in a slot, and how large its buffers have to be for that.
std::vector<Place> lay_out(const PlannedLayer &layer, ggml_backend_buffer_type_t type, std::vector<size_t> &sizes) {
    const size_t alignment = ggml_backend_buft_get_alignment(type), limit = ggml_backend_buft_get_max_size(type);
    std::vector<Place> places;
    size_t buffer = 0, offset = 0;
    for (const Weight &weight : layer.weights) {
        const size_t n_bytes = ggml_backend_buft_get_alloc_size(type, &weight.device);
        offset = (offset + alignment - 1) / alignment * alignment;
        // The limit is of what is put together: Vulkan's is 1 GiB, and it takes a larger weight in a buffer of its own.
        if (offset > 0 && offset + n_bytes > limit) {
            ++buffer;
            offset = 0;
        }
        places.push_back({buffer, offset});
        offset += n_bytes;
        sizes.resize(std::max(sizes.size(), buffer + 1), 0);
        sizes[buffer] = std::max(sizes[buffer], offset);
    }
    return places;
}

}  // namespace

Arena::Arena(Plan &plan, const FoundDevice &found) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(found.device);
    std::vector<size_t> sizes;
    std::vector<std::vector<Place>> places;
    for (const PlannedLayer &layer : plan.layers) places.push_back(lay_out(layer, type, sizes));
    for (Slot &slot : slots_)
        for (const size_t size : sizes) n_bytes_ += static_cast<int64_t>(size), slot.emplace_back();
    for (Slot &slot : slots_) {
        for (size_t i = 0; i < sizes.size(); ++i) {
            if (!found.faults.no_memory) slot[i].reset(ggml_backend_buft_alloc_buffer(type, sizes[i]));
            if (!slot[i])
                fail(BMOE_E_MEMORY, "it has no room for two layers, which take %" PRId64 " MiB", n_bytes_ >> 20);
            ggml_backend_buffer_set_usage(slot[i].get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            // What is read beyond the end of a row has to be finite.
            ggml_backend_buffer_clear(slot[i].get(), 0);
        }
    }
    for (size_t i = 0; i < plan.layers.size(); ++i) {
        for (size_t k = 0; k < plan.layers[i].weights.size(); ++k) {
            ggml_backend_buffer_t buffer = slots_[i % N_SLOTS][places[i][k].buffer].get();
            auto *base = static_cast<char *>(ggml_backend_buffer_get_base(buffer));
            ggml_tensor &tensor = plan.layers[i].weights[k].device;
            if (ggml_backend_tensor_alloc(buffer, &tensor, base + places[i][k].offset) != GGML_STATUS_SUCCESS)
                fail(BMOE_E_MEMORY, "it does not take %s", tensor.name);
        }
    }
}

Bound::Bound(Plan &plan) : plan_(plan) {
    for (PlannedLayer &layer : plan_.layers)
        for (Weight &weight : layer.weights) Placement::of(weight.device).put(*weight.tensor);
}

Bound::~Bound() {
    for (PlannedLayer &layer : plan_.layers)
        for (Weight &weight : layer.weights) weight.host.put(*weight.tensor);
}

}  // namespace bmoe
