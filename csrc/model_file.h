// What a GGUF says of itself before llama.cpp loads it: is it whole, is it a language model, what are its experts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "os/identity.h"

namespace bmoe {

// Where a tensor lies.
struct TensorPlace {
    int32_t shard;
    uint64_t offset;  // in the file
    uint64_t n_bytes;
};

struct ModelFile {
    std::vector<std::string> shards;           // one path for a whole file
    std::vector<os::FileIdentity> identities;  // of the shards, as they were inspected
    std::string arch;
    std::string name;
    int64_t weights_bytes = 0;
    int64_t experts_bytes = 0;
    int32_t n_moe_layer = 0;
    int32_t n_expert = 0;
    int32_t n_expert_used = 0;
    std::map<int32_t, int64_t> layer_bytes;  // of the routed experts of each layer that has some
    int64_t kv_bytes_per_token = 0;          // f16 attention KV; 0 where the metadata does not tell it simply
    std::map<std::string, TensorPlace> tensors;
    bool has_no_rotation = false;  // it says that positions turn 0 dimensions of a head
    uint64_t fingerprint = 0;      // of the metadata, the sizes and samples of the weights of all shards

    int64_t expert_bytes(int32_t layer) const;  // of one routed expert of a layer; 0 where it has none
};

// "blk.17.ffn_up_exps.weight" → 17; -1 for what belongs to no layer.
int32_t layer_of(const char *tensor);

// Whether a tensor holds the weights of routed experts: what MUL_MAT_ID reads, one slice for each expert.
bool is_expert_weight(const std::string &tensor);

// Read and check the metadata of a model and of all its shards. No weight is read but for a few sampled pages.
// Throws Error (BMOE_E_MODEL) that names the file and, for a cut one, the size expected and found.
ModelFile inspect_model(const std::string &path);

}  // namespace bmoe
