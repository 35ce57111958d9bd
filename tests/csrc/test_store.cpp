// ExpertStore as a program: routing patterns in, what it did out. Compared with a model of it in plain Python.
//   usage: test_store FILE N_LAYERS N_EXPERTS SLICE_BYTES BUDGET_BYTES
//   stdin: "graph" begins one; then a line for each layer, "LAYER ID ID ..."
//   stdout: after each graph, hits, misses and bytes routed so far, bytes resident now
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "experts/store.h"
#include "ggml.h"

namespace {

void report(bmoe::ExpertStore &store) {
    store.end_graph();
    const bmoe::StoreCounters now = store.counters();
    printf("%lld %lld %lld %lld\n", static_cast<long long>(now.n_hits), static_cast<long long>(now.n_misses),
           static_cast<long long>(now.bytes_routed), static_cast<long long>(store.resident_bytes()));
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    const int n_layers = atoi(argv[2]), n_experts = atoi(argv[3]);
    const int64_t slice = atoll(argv[4]), budget = atoll(argv[5]);
    ggml_context *context = ggml_init({static_cast<size_t>(n_layers + 1) * ggml_tensor_overhead(), nullptr, true});
    bmoe::ExpertStore store({argv[1]}, {budget, 2, false, false, false});
    for (int layer = 0; layer < n_layers; ++layer) {
        ggml_tensor *tensor = ggml_new_tensor_3d(context, GGML_TYPE_I8, slice, 1, n_experts);
        store.add(tensor, layer, 0, static_cast<uint64_t>(layer) * static_cast<uint64_t>(slice * n_experts));
    }
    store.finish();
    bool running = false;
    for (std::string line; std::getline(std::cin, line);) {
        if (line == "graph") {
            if (running) report(store);
            store.begin_graph();
            running = true;
            continue;
        }
        std::istringstream words(line);
        int layer = 0;
        words >> layer;
        std::vector<int32_t> ids;
        for (int32_t id = 0; words >> id;) ids.push_back(id);
        store.ask(layer, ids);
        store.wait([] { return false; });
    }
    report(store);
    ggml_free(context);
    return 0;
}
