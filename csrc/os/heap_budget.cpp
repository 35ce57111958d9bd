#include "os/heap_budget.h"

namespace bmoe::os {

static thread_local HeapBudget *current = nullptr;

HeapBudget::HeapBudget(const Limits &limits)
    : left_(limits), base_(static_cast<const char *>(__builtin_frame_address(0))) {
    current = this;
}

HeapBudget::~HeapBudget() { current = nullptr; }

void HeapBudget::spend(size_t bytes) {
    const char *here = static_cast<const char *>(__builtin_frame_address(0));
    if (static_cast<size_t>(here < base_ ? base_ - here : here - base_) > left_.stack_bytes)
        throw Exceeded{"it recurses without end"};
    if (left_.calls == 0) throw Exceeded{"it does not come to an end"};
    if (bytes > left_.largest || bytes > left_.bytes) throw Exceeded{"it takes too much memory"};
    --left_.calls;
    left_.bytes -= bytes;
}

}  // namespace bmoe::os

extern "C" {

void *__real__Znwm(size_t bytes);

// The linker's --wrap gives every operator new(size_t) of the library here, those inside libstdc++ included.
void *__wrap__Znwm(size_t bytes) {
    if (bmoe::os::current) bmoe::os::current->spend(bytes);
    return __real__Znwm(bytes);
}
}
