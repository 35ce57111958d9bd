// ExpertStore as a program: routing patterns in, what it did out. Compared with a model of it in plain Python.
//   usage: test_store FILE N_LAYERS N_EXPERTS SLICE_BYTES BUDGET_BYTES
//   stdin: "graph" begins one; then a line for each layer, "LAYER ID ID ..."
//   stdout: after each graph, hits, misses and bytes routed so far, bytes resident now
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// Whether the slices of these experts are what lies in the file.
bool is_true(const std::vector<ggml_tensor *> &tensors, const std::vector<int64_t> &offsets, FILE *file,
             const std::vector<int32_t> &ids) {
    for (size_t i = 0; i < tensors.size(); ++i) {
        std::vector<char> wanted(tensors[i]->nb[2]);
        for (const int32_t id : ids) {
            const auto at = static_cast<int64_t>(wanted.size()) * id;
            if (fseek(file, static_cast<long>(offsets[i] + at), SEEK_SET) != 0) return false;
            if (fread(wanted.data(), 1, wanted.size(), file) != wanted.size()) return false;
            if (memcmp(wanted.data(), static_cast<char *>(tensors[i]->data) + at, wanted.size()) != 0) return false;
        }
    }
    return true;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    const int n_layers = atoi(argv[2]), n_experts = atoi(argv[3]);
    const int64_t slice = atoll(argv[4]), budget = atoll(argv[5]);
    ggml_context *context = ggml_init({static_cast<size_t>(2 * n_layers + 1) * ggml_tensor_overhead(), nullptr, true});
    bmoe::ExpertStore store({argv[1]}, {budget, 2, false, false, false});
    std::vector<std::vector<ggml_tensor *>> tensors(static_cast<size_t>(n_layers));
    std::vector<std::vector<int64_t>> offsets(static_cast<size_t>(n_layers));
    FILE *file = fopen(argv[1], "rb");
    for (int layer = 0; layer < n_layers; ++layer) {
        // An expert's bytes are in two tensors, as gate and down are.
        const int64_t first = slice / 3, at = layer * slice * n_experts;
        for (const auto &[name, bytes, offset] :
             {std::tuple{"first", first, at}, {"second", slice - first, at + first * n_experts}}) {
            ggml_tensor *tensor = ggml_new_tensor_3d(context, GGML_TYPE_I8, bytes, 1, n_experts);
            ggml_set_name(tensor, name);
            store.add(tensor, layer, 0, static_cast<uint64_t>(offset));
            tensors[static_cast<size_t>(layer)].push_back(tensor);
            offsets[static_cast<size_t>(layer)].push_back(offset);
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
        if (!is_true(tensors[static_cast<size_t>(layer)], offsets[static_cast<size_t>(layer)], file, ids)) return 4;
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
    // What was given back in a graph and is asked for again in it.
    std::vector<int32_t> all;
    for (int32_t id = 0; id < n_experts; ++id) all.push_back(id);
    store.begin_graph();
    for (int32_t turn = 0; turn < 4 * n_layers; ++turn) {
        const auto layer = static_cast<size_t>(turn / 4);
        store.ask(static_cast<int32_t>(layer), all);
        store.wait([] { return false; });
        if (!is_true(tensors[layer], offsets[layer], file, all)) return 5;
        turn % 2 == 0 ? store.release_layer() : (store.use("second"), store.release_used());
        all.resize(all.size() > 2 ? all.size() - 1 : all.size());
    }
    store.end_graph();
    ggml_free(context);
    fclose(file);
    return 0;
}
