// A device for tests: ggml's RPC server in front of the CPU, with the same kernels.   rpc_server PORT N_THREADS
#include <sys/prctl.h>
#include <sys/socket.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "ggml-backend.h"
#include "ggml-rpc.h"

// Engines of one process share a connection, but each asks first whether somebody listens: ggml's queue has room for one.
extern "C" int __real_listen(int socket, int n_waiting);
extern "C" int __wrap_listen(int socket, int) { return __real_listen(socket, SOMAXCONN); }

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // it does not outlive the test that started it
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const std::string endpoint = std::string("127.0.0.1:") + argv[1];
    ggml_backend_rpc_start_server(endpoint.c_str(), nullptr, static_cast<size_t>(atoi(argv[2])), 1, &cpu);
    return 1;
}
