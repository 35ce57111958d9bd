// A call on a thread of its own, where the caller's stack may be too small for it.
#pragma once

#include <cstddef>
#include <functional>

namespace bmoe::os {

// Run the body on a stack of at least stack_bytes and wait for it; what it throws is thrown here. Only pages that are
// touched take memory. Throws Error (BMOE_E_MEMORY) where no such stack is to be had.
void run_with_stack(size_t stack_bytes, const std::function<void()> &body);

}  // namespace bmoe::os
