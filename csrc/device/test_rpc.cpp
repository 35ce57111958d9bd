#ifdef BMOE_TEST_RPC

#include "device/test_rpc.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "error.h"
#include "ggml-backend-impl.h"
#include "ggml-rpc.h"

namespace bmoe {

namespace {

const std::string PREFIX = "RPC:127.0.0.1:";

// ggml's client ends the process where nobody listens.
bool listens(int port) {
    const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool open = to >= 0 && connect(to, reinterpret_cast<sockaddr *>(&address), sizeof address) == 0;
    if (to >= 0) close(to);
    return open;
}

// The CPU's own memory under another name.
ggml_backend_buffer_type_t named_host_memory() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type copy = *ggml_backend_cpu_buffer_type();
        copy.iface.get_name = [](ggml_backend_buffer_type_t) { return "bmoe_state"; };
        return copy;
    }();
    return &type;
}

void parse_fault(const std::string &text, DeviceFaults &faults) {
    const size_t equals = text.find('=');
    const std::string key = text.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : text.substr(equals + 1);
    if (key == "slow") faults.slow_ms = atoi(value.c_str());
    if (key == "no_fill_wait") faults.no_fill_wait = true;
    if (key == "early_refill") faults.early_refill = true;
    if (key == "skipped_point") faults.skipped_point = true;
    if (key == "no_open") faults.no_open = true;
    if (key == "throwing_load") faults.throwing_load = true;
    if (key == "throwing_router") faults.throwing_router = true;
    if (key == "no_memory") faults.no_memory = true;
    if (key == "state_memory") faults.state_memory = named_host_memory();
    for (int type = 0; key == "refuse" && type < GGML_TYPE_COUNT; ++type)
        if (ggml_type_name(static_cast<ggml_type>(type)) == value) faults.refuse = static_cast<ggml_type>(type);
}

}  // namespace

bool is_test_rpc(const std::string &name) { return name.compare(0, PREFIX.size(), PREFIX) == 0; }

FoundDevice find_test_rpc(const std::string &name) {
    FoundDevice found;
    const size_t question = name.find('?');
    const std::string endpoint = name.substr(4, question == std::string::npos ? question : question - 4);
    for (size_t at = question; at != std::string::npos;) {
        const size_t end = name.find('&', at + 1);
        parse_fault(name.substr(at + 1, end == std::string::npos ? end : end - at - 1), found.faults);
        at = end;
    }
    ggml_backend_reg_t registry =
        listens(atoi(name.c_str() + PREFIX.size())) ? ggml_backend_rpc_add_server(endpoint.c_str()) : nullptr;
    if (registry && ggml_backend_reg_dev_count(registry) > 0)
        found.device = ggml_backend_reg_dev_get(registry, 0);
    else
        found.why = "the device " + legible(endpoint) + " does not open";
    return found;
}

}  // namespace bmoe

#endif
