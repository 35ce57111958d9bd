#include "device/device.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

#include "error.h"
#include "os/memory.h"
#ifdef BMOE_TEST_RPC
#include "device/test_rpc.h"
#endif

namespace bmoe {

namespace {

bmoe_device_type type_of(ggml_backend_dev_t device) {
    switch (ggml_backend_dev_type(device)) {
        case GGML_BACKEND_DEVICE_TYPE_CPU:
            return BMOE_DEVICE_CPU;
        case GGML_BACKEND_DEVICE_TYPE_GPU:
            return BMOE_DEVICE_GPU;
        case GGML_BACKEND_DEVICE_TYPE_IGPU:
            return BMOE_DEVICE_IGPU;
        default:
            return BMOE_DEVICE_ACCEL;
    }
}

std::string known_names() {
    std::string names;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (type_of(device) != BMOE_DEVICE_CPU)
            names += (names.empty() ? "" : ", ") + legible(ggml_backend_dev_name(device));
    }
    return names.empty() ? "none" : names;
}

// What threw when it was opened is left half made in its backend, which would take it for whole the next time.
struct Thrown {
    std::mutex mutex;
    std::map<ggml_backend_dev_t, std::string> why;
};
Thrown &thrown() {
    static Thrown *const them = new Thrown;
    return *them;
}

// Why it does not open; empty where it does.
std::string try_to_open(const FoundDevice &found) {
    {
        const std::lock_guard<std::mutex> lock(thrown().mutex);
        const auto before = thrown().why.find(found.device);
        if (before != thrown().why.end()) return before->second;
    }
    try {
        if (found.faults.no_open) throw std::runtime_error("Unsupported device");
        ggml_backend_t backend = ggml_backend_dev_init(found.device, nullptr);
        if (!backend) return "no reason given";
        ggml_backend_free(backend);
    } catch (const std::exception &error) {  // of a backend in C++
        const std::lock_guard<std::mutex> lock(thrown().mutex);
        return thrown().why[found.device] = legible(error.what());
    }
    return "";
}

}  // namespace

FoundDevice find_device(const std::string &name) {
    FoundDevice found;
#ifdef BMOE_TEST_RPC
    if (is_test_rpc(name))
        found = find_test_rpc(name);
    else
#endif
        found.device = ggml_backend_dev_by_name(name.c_str());
    if (!found.why.empty()) return found;
    if (!found.device) {
        found.why = "there is no device " + legible(name) + " here (devices: " + known_names() + ")";
        return found;
    }
    const bmoe_device_type type = type_of(found.device);
    if (type != BMOE_DEVICE_GPU && type != BMOE_DEVICE_IGPU) {
        found.why = legible(name) + " is of another type than gpu and igpu";
        found.device = nullptr;
        return found;
    }
    const std::string why = try_to_open(found);
    if (why.empty()) return found;
    found.why = "the device " + legible(name) + " does not open: " + why;
    found.device = nullptr;
    return found;
}

int32_t device_count() { return static_cast<int32_t>(ggml_backend_dev_count()); }

void describe_device(int32_t index, bmoe_device &out) {
    if (index < 0 || index >= device_count())
        fail(BMOE_E_ARGUMENT, "device %d is asked for, and there are %d", index, device_count());
    ggml_backend_dev_t device = ggml_backend_dev_get(static_cast<size_t>(index));
    put_legible(out.name, ggml_backend_dev_name(device));
    put_legible(out.description, ggml_backend_dev_description(device));
    size_t free_bytes = 0, total_bytes = 0;
    ggml_backend_dev_memory(device, &free_bytes, &total_bytes);
    out.type = type_of(device);
    // ggml calls all of a machine's memory free.
    if (const int64_t available = os::available_bytes(); out.type == BMOE_DEVICE_CPU && available > 0)
        free_bytes = std::min(total_bytes, static_cast<size_t>(available));
    out.free_bytes = static_cast<int64_t>(free_bytes);
    out.total_bytes = static_cast<int64_t>(total_bytes);
}

}  // namespace bmoe
