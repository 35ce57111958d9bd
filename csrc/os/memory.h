// How much memory this process can still take.
#pragma once

#include <cstdint>

namespace bmoe::os {

// Bytes available without swapping: the machine's, or what the tightest of its memory cgroups leaves. 0: unknown.
int64_t available_bytes();

}  // namespace bmoe::os
