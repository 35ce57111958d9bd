// For tests only: a server of ggml's RPC on this machine in place of a device, and faults on demand.
#pragma once

#include "device/device.h"

namespace bmoe {

// "RPC:127.0.0.1:PORT", with faults behind it: "?slow=20&no_fill_wait".
bool is_test_rpc(const std::string &name);
FoundDevice find_test_rpc(const std::string &name);

}  // namespace bmoe
