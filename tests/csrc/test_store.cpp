// ExpertStore as a program: routing patterns in, what it did out. Compared with a model of it in plain Python.
//   usage: test_store FILE N_LAYERS N_EXPERTS SLICE_BYTES BUDGET_BYTES
//   stdin: "graph" begins one; then a line for each layer, "LAYER ID ID ..."
//   stdout: after each graph, hits, misses and bytes routed so far, bytes resident now
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <tuple>

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
    ggml_context *context = ggml_init({static_cast<size_t>(2 * n_layers + 1) * ggml_tensor_overhead(), nullptr, true});
    bmoe::ExpertStore store({argv[1]}, {budget, 2, false, false, false});
    for (int layer = 0; layer < n_layers; ++layer) {
        // An expert's bytes are in two tensors, as gate and down are.
        const int64_t first = slice / 3, at = layer * slice * n_experts;
        for (const auto &[name, bytes, offset] :
             {std::tuple{"first", first, at}, {"second", slice - first, at + first * n_experts}}) {
            ggml_tensor *tensor = ggml_new_tensor_3d(context, GGML_TYPE_I8, bytes, 1, n_experts);
            ggml_set_name(tensor, name);
            store.add(tensor, layer, 0, static_cast<uint64_t>(offset));
        }
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
        // Giving back a part early, or all of it, changes nothing of what is kept and counted.
        if (!store.is_readable(layer, "first")) return 3;
        if (ids.size() % 3 > 0) {
            store.use("first");
            store.release_used();
            if (store.is_readable(layer, "first") || !store.is_readable(layer, "second")) return 3;
        }
        if (ids.size() % 3 > 1) store.release_layer();
    }
    report(store);
    ggml_free(context);
    return 0;
}
