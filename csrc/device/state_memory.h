// Where llama.cpp keeps the state of layers that are the CPU's: in memory that a device copies from quickly.
#pragma once

#include "device/device.h"
#include "ggml-backend.h"

namespace bmoe {

// While it lives, a context that is created on this thread has its KV cache and recurrent state there.
class StateMemory {
  public:
    explicit StateMemory(const FoundDevice &found);
    ~StateMemory();
    StateMemory(const StateMemory &) = delete;
    StateMemory &operator=(const StateMemory &) = delete;
};

}  // namespace bmoe
