// Two slots of device memory, which the layers of a plan use in turn.
#pragma once

#include <memory>
#include <vector>

#include "device/plan.h"
#include "ggml-backend.h"

namespace bmoe {

struct FreeBackendBuffer {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};

class Arena {
  public:
    static constexpr size_t N_SLOTS = 2;

    // Gives each weight of the plan its place. Throws Error (BMOE_E_MEMORY) where the device has no room.
    Arena(Plan &plan, const FoundDevice &device);

    int64_t n_bytes() const { return n_bytes_; }

  private:
    // A slot is several buffers where the device limits the size of one.
    using Slot = std::vector<std::unique_ptr<ggml_backend_buffer, FreeBackendBuffer>>;
    Slot slots_[N_SLOTS];
    int64_t n_bytes_ = 0;
};

// While it lives, graphs read the weights of a plan on the device.
class Bound {
  public:
    explicit Bound(Plan &plan);
    ~Bound();
    Bound(const Bound &) = delete;
    Bound &operator=(const Bound &) = delete;

  private:
    Plan &plan_;
};

}  // namespace bmoe
