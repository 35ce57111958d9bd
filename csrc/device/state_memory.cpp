#include "device/state_memory.h"

extern "C" {
// The linker sends what calls the one to the other (--wrap, CMakeLists.txt).
ggml_backend_buffer_type_t __real_ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
ggml_backend_buffer_type_t __wrap_ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
}

namespace bmoe {

static thread_local ggml_backend_buffer_type_t current = nullptr;

StateMemory::StateMemory(const FoundDevice &found) {
    if (!found.device) return;
    ggml_backend_buffer_type_t type =
        found.faults.state_memory ? found.faults.state_memory : ggml_backend_dev_host_buffer_type(found.device);
    // What a device computes on in place llama.cpp hands to it, and with it the narrow graphs that are the CPU's.
    if (type && !ggml_backend_dev_supports_buft(found.device, type)) current = type;
}

StateMemory::~StateMemory() { current = nullptr; }

}  // namespace bmoe

extern "C" ggml_backend_buffer_type_t __wrap_ggml_backend_dev_buffer_type(ggml_backend_dev_t device) {
    const bool is_cpu = device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    return is_cpu && bmoe::current ? bmoe::current : __real_ggml_backend_dev_buffer_type(device);
}
