// The devices ggml knows, and the one that wide pieces of a prefill are to run on.
#pragma once

#include <cstdint>
#include <string>

#include "bmoe.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace bmoe {

// What tests do to a device: nothing, but where a build for tests was told to by the device's name.
struct DeviceFaults {
    int32_t slow_ms = 0;                                // each job of a loader takes this much longer
    bool no_fill_wait = false;                          // compute a layer whether or not its slot has been filled
    bool early_refill = false;                          // fill a slot again before its layer has been computed
    bool skipped_point = false;                         // lose sight of one node that reads weights
    bool no_open = false;                               // it throws when it is opened
    bool throwing_load = false;                         // it throws when a weight is brought there
    bool throwing_router = false;                       // it throws when it is asked which experts were chosen
    bool no_memory = false;                             // slots cannot be allocated
    ggml_backend_buffer_type_t state_memory = nullptr;  // of the host, said to be what the device copies from
    ggml_type refuse = GGML_TYPE_COUNT;                 // a type that the device is said not to compute with
};

struct FoundDevice {
    ggml_backend_dev_t device = nullptr;
    std::string why;  // there is none
    DeviceFaults faults;
};

// The device of this name, once it has been seen to open.
FoundDevice find_device(const std::string &name);

int32_t device_count();
// Throws Error (BMOE_E_ARGUMENT).
void describe_device(int32_t index, bmoe_device &device);

}  // namespace bmoe
