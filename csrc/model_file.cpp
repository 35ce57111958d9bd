#include "model_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string_view>
#include <unordered_set>

#include "error.h"
#include "ggml-cpu.h"
#include "gguf.h"
#include "llama.h"

namespace bmoe {

namespace {

// Source: LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS of llama.cpp's llama-hparams.h.
constexpr int64_t MAX_LAYERS = 512;
constexpr int64_t MAX_EXPERTS = 1024;

using Gguf = std::unique_ptr<gguf_context, decltype(&gguf_free)>;

struct File {
    int fd = -1;
    int64_t size = 0;
    os::FileIdentity identity;
    explicit File(const std::string &path) {
        fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) fail(BMOE_E_MODEL, "cannot open the model %s: %s", legible(path).c_str(), strerror(errno));
        struct stat status{};
        if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || !os::identify(fd, identity)) {
            close(fd);
            fail(BMOE_E_MODEL, "%s is not a regular file", legible(path).c_str());
        }
        size = status.st_size;
    }
    ~File() { close(fd); }
    File(const File &) = delete;
    File &operator=(const File &) = delete;
};

// FNV-1a over eight bytes at a time: fast enough for the tens of MB a vocabulary takes.
// Source: the FNV constants of http://www.isthe.com/chongo/tech/comp/fnv/
void mix(uint64_t &hash, const void *data, size_t n_bytes) {
    const auto *bytes = static_cast<const unsigned char *>(data);
    for (size_t at = 0; at < n_bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + at, std::min<size_t>(8, n_bytes - at));
        hash = (hash ^ word) * 0x100000001b3ull;
        hash ^= hash >> 29;
    }
}

void mix_range(uint64_t &hash, const File &file, int64_t begin, int64_t end) {
    std::vector<char> buffer(1 << 20);
    while (begin < end) {
        const ssize_t n =
            pread(file.fd, buffer.data(), std::min<int64_t>(end - begin, static_cast<int64_t>(buffer.size())), begin);
        if (n <= 0) return;
        mix(hash, buffer.data(), static_cast<size_t>(n));
        begin += n;
    }
}

bool has(const gguf_context *gguf, const std::string &key, gguf_type type) {
    const int64_t id = gguf_find_key(gguf, key.c_str());
    return id >= 0 && gguf_get_kv_type(gguf, id) == type;
}

std::string text_of(const gguf_context *gguf, const std::string &key) {
    return has(gguf, key, GGUF_TYPE_STRING) ? gguf_get_val_str(gguf, gguf_find_key(gguf, key.c_str())) : "";
}

// An unsigned number of 16 or 32 bits, or the fallback where the key is missing or of another type.
int64_t number_of(const gguf_context *gguf, const std::string &key, int64_t fallback) {
    if (has(gguf, key, GGUF_TYPE_UINT32)) return gguf_get_val_u32(gguf, gguf_find_key(gguf, key.c_str()));
    if (has(gguf, key, GGUF_TYPE_UINT16)) return gguf_get_val_u16(gguf, gguf_find_key(gguf, key.c_str()));
    return fallback;
}

bool is_expert(const std::string &tensor) {
    return tensor.find("_exps.") != std::string::npos && tensor.find(".ffn_") != std::string::npos;
}

void add_tensors(ModelFile &model, std::set<std::string> &moe_layers, const gguf_context *gguf, int32_t shard) {
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        const std::string name = gguf_get_tensor_name(gguf, i);
        const auto bytes = static_cast<int64_t>(gguf_get_tensor_size(gguf, i));
        model.weights_bytes += bytes;
        model.tensors[name] = {shard, gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i),
                               static_cast<uint64_t>(bytes)};
        if (!is_expert(name)) continue;
        model.experts_bytes += bytes;
        moe_layers.insert(name.substr(0, name.find(".ffn_")));
        model.layer_bytes[layer_of(name.c_str())] += bytes;
    }
}

// Throws when the file ends before its last tensor does.
void check_whole(const gguf_context *gguf, const File &file, const std::string &path) {
    uint64_t end = gguf_get_data_offset(gguf);
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        end = std::max<uint64_t>(
            end, gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i));
    }
    if (gguf_get_n_tensors(gguf) > 0 && end > static_cast<uint64_t>(file.size)) {
        fail(BMOE_E_MODEL,
             "%s is cut short: its tensors need %" PRIu64 " bytes, the file has %" PRId64 "; fetch it again",
             legible(path).c_str(), end, file.size);
    }
}

bool ends_with(const std::string &text, const char *end) {
    const size_t n = strlen(end);
    return text.size() >= n && text.compare(text.size() - n, n, end) == 0;
}

// Refuse tensors of a type that no kernel of ggml's takes where it would get them.
void check_types(const gguf_context *gguf, const std::string &path) {
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        const std::string name = gguf_get_tensor_name(gguf, i);
        const ggml_type type = gguf_get_tensor_type(gguf, i);
        const bool table = name.find("tid2eid") != std::string::npos || name == "d2t";  // of whole numbers
        const bool added = ends_with(name, ".bias") || ends_with(name, "norm.weight") || ends_with(name, ".ssm_a") ||
                           ends_with(name, ".ssm_d");
        if (!table && (added ? type != GGML_TYPE_F32 : !ggml_get_type_traits_cpu(type)->vec_dot)) {
            fail(BMOE_E_MODEL, "%s is damaged: its tensor %s cannot be of type %s", legible(path).c_str(),
                 legible(name).c_str(), ggml_type_name(type));
        }
    }
}

Gguf read_gguf(const std::string &path, const File &file) {
    char magic[4] = {0};
    const ssize_t n = pread(file.fd, magic, sizeof magic, 0);
    if (n != 4 || memcmp(magic, "GGUF", 4) != 0) {
        if (n >= 0 && n < 4) {
            fail(BMOE_E_MODEL, "%s is cut short: a GGUF begins with 4 bytes of magic, the file has %" PRId64,
                 legible(path).c_str(), file.size);
        }
        fail(BMOE_E_MODEL, "%s is not a GGUF file", legible(path).c_str());
    }
    Gguf gguf(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}), gguf_free);
    if (!gguf) {
        const File again(path);  // out of file descriptors it is not damaged
        fail(BMOE_E_MODEL, "%s is damaged or cut short: its metadata cannot be read within its %" PRId64 " bytes",
             legible(path).c_str(), file.size);
    }
    check_whole(gguf.get(), file, path);
    check_types(gguf.get(), path);
    return gguf;
}

std::string real_path(const std::string &path) {
    std::unique_ptr<char, decltype(&free)> real(realpath(path.c_str(), nullptr), free);
    return real ? std::string(real.get()) : path;
}

// The paths of all shards, the given file being shard number `no` of `count`.
std::vector<std::string> shard_paths(const std::string &given, int no, int count) {
    char prefix[4096];
    // A link may hide the number in the name; what it points at has it.
    for (const std::string &path : {given, real_path(given)}) {
        if (llama_split_prefix(prefix, sizeof prefix, path.c_str(), no, count) <= 0) continue;
        std::vector<std::string> paths;
        for (int i = 0; i < count; ++i) {
            char shard[4200];
            llama_split_path(shard, sizeof shard, prefix, i, count);
            paths.emplace_back(shard);
        }
        if (no != 0) {
            fail(BMOE_E_MODEL, "%s is shard %d of %d: open the first one, %s", legible(given).c_str(), no + 1, count,
                 legible(paths[0]).c_str());
        }
        for (const std::string &shard : paths) {
            if (access(shard.c_str(), R_OK) != 0) {
                fail(BMOE_E_MODEL, "%s is shard 1 of %d, and %s: %s", legible(given).c_str(), count,
                     legible(shard).c_str(), strerror(errno));
            }
        }
        return paths;
    }
    fail(BMOE_E_MODEL,
         "%s is shard %d of %d, but its name does not end in -%05d-of-%05d.gguf, so the others cannot be found",
         legible(given).c_str(), no + 1, count, no + 1, count);
}

// Refuse what is a GGUF but no model that answers with a next token.
void check_language_model(const gguf_context *gguf, const std::string &path, const std::string &arch) {
    const char *what = nullptr;
    const std::string type = text_of(gguf, "general.type");
    const bool pooled = number_of(gguf, arch + ".pooling_type", 0) > 0;
    const int64_t causal = gguf_find_key(gguf, (arch + ".attention.causal").c_str());
    if (arch.empty())
        what = "names no architecture (general.architecture)";
    else if (type == "adapter")
        what = "is an adapter (LoRA), not a model";
    else if (type == "mmproj" || arch == "clip")
        what = "is a multimodal projector, not a language model";
    else if (!type.empty() && type != "model")
        what = "is not a model by its own word (general.type)";
    else if (gguf_get_n_tensors(gguf) == 0)
        what = "holds only a vocabulary, no weights";
    else if (pooled)
        what = "is an embedding model: it has no next token to ask for";
    else if (causal >= 0 && gguf_get_kv_type(gguf, causal) == GGUF_TYPE_BOOL && !gguf_get_val_bool(gguf, causal)) {
        what = "is an encoder: it has no next token to ask for";
    }
    if (what) fail(BMOE_E_MODEL, "%s %s", legible(path).c_str(), what);
}

int64_t kv_bytes_per_token(const gguf_context *gguf, const std::string &arch) {
    const bool other = number_of(gguf, arch + ".attention.sliding_window", 0) > 0 ||
                       number_of(gguf, arch + ".attention.kv_lora_rank", 0) > 0 ||
                       number_of(gguf, arch + ".ssm.state_size", 0) > 0;
    const int64_t n_head = number_of(gguf, arch + ".attention.head_count", 0);
    const int64_t n_head_kv = number_of(gguf, arch + ".attention.head_count_kv", n_head);
    const int64_t n_embd = number_of(gguf, arch + ".embedding_length", 0);
    if (other || n_head <= 0) return 0;
    const int64_t key = number_of(gguf, arch + ".attention.key_length", n_embd / n_head);
    const int64_t value = number_of(gguf, arch + ".attention.value_length", n_embd / n_head);
    return number_of(gguf, arch + ".block_count", 0) * n_head_kv * (key + value) * 2;
}

// Refuse what llama.cpp would meet with an assertion, which ends the process.
void check_consistent(const gguf_context *gguf, const std::string &path, const std::string &arch) {
    const int64_t n_layer = number_of(gguf, arch + ".block_count", 1);
    const int64_t n_expert = number_of(gguf, arch + ".expert_count", 0);
    const bool says_used = gguf_find_key(gguf, (arch + ".expert_used_count").c_str()) >= 0;
    // It may be a list, one for each layer.
    const int64_t n_used = number_of(gguf, arch + ".expert_used_count", n_expert > 0 && says_used ? 1 : 0);
    if (n_layer < 1 || n_layer > MAX_LAYERS) {
        fail(BMOE_E_MODEL, "%s is damaged: it says it has %" PRId64 " layers, possible are 1 to %" PRId64,
             legible(path).c_str(), n_layer, MAX_LAYERS);
    }
    if (n_expert < 0 || n_expert > MAX_EXPERTS || n_used > n_expert || (n_expert > 0 && n_used < 1)) {
        fail(BMOE_E_MODEL, "%s is damaged: it says it uses %" PRId64 " of %" PRId64 " experts", legible(path).c_str(),
             n_used, n_expert);
    }
    const int64_t list = gguf_find_key(gguf, "tokenizer.ggml.tokens");
    if (list < 0 || gguf_get_kv_type(gguf, list) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(gguf, list) != GGUF_TYPE_STRING)
        return;
    std::unordered_set<std::string_view> seen;
    const size_t n_tokens = gguf_get_arr_n(gguf, list);
    seen.reserve(n_tokens);
    for (size_t i = 0; i < n_tokens; ++i) {
        const std::string_view token = gguf_get_arr_str(gguf, list, i);
        if (!token.empty() && !seen.insert(token).second) {
            fail(BMOE_E_MODEL, "%s is damaged: its vocabulary holds \"%s\" twice", legible(path).c_str(),
                 legible(std::string(token)).c_str());
        }
    }
}

double real_of(const gguf_context *gguf, const std::string &key, double fallback) {
    return has(gguf, key, GGUF_TYPE_FLOAT32)
               ? static_cast<double>(gguf_get_val_f32(gguf, gguf_find_key(gguf, key.c_str())))
               : fallback;
}

// The sum of a list of 32-bit numbers; -1 where one of them is negative, the fallback where there is no such list.
int64_t sum_of(const gguf_context *gguf, const std::string &key, int64_t fallback) {
    const int64_t id = gguf_find_key(gguf, key.c_str());
    if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_ARRAY) return fallback;
    const gguf_type type = gguf_get_arr_type(gguf, id);
    if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) return fallback;
    const auto *numbers = static_cast<const int32_t *>(gguf_get_arr_data(gguf, id));
    int64_t sum = 0;
    for (size_t i = 0; i < gguf_get_arr_n(gguf, id); ++i) {
        if (numbers[i] < 0) return -1;
        sum += numbers[i];
    }
    return sum;
}

// Refuse what ggml would meet where it computes, on any of its threads: with an assertion, a division by zero or a loop
// without end.
void check_computable(const gguf_context *gguf, const std::string &path, const std::string &arch) {
    for (const char *name : {"layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon"}) {
        const double epsilon = real_of(gguf, arch + ".attention." + name, 0);
        if (!(epsilon >= 0)) fail(BMOE_E_MODEL, "%s is damaged: its %s is %g", legible(path).c_str(), name, epsilon);
    }
    const int64_t n_head = number_of(gguf, arch + ".attention.head_count", 0);
    const int64_t n_embd = number_of(gguf, arch + ".embedding_length", 0);
    const int64_t head = number_of(gguf, arch + ".attention.key_length", n_head > 0 ? n_embd / n_head : 0);
    for (const char *layers : {"", "_swa"}) {
        const int64_t most = number_of(gguf, arch + ".attention.key_length" + layers, head);
        // Layers with heads of their own are turned as the others where nothing else is said.
        const int64_t other = *layers && most != head ? number_of(gguf, arch + ".rope.dimension_count", head) : -1;
        const int64_t n_rot = number_of(gguf, arch + ".rope.dimension_count" + layers, other);
        if (n_rot <= 0) continue;
        if (n_rot % 2 != 0 || (most > 0 && n_rot > most)) {
            fail(BMOE_E_MODEL,
                 "%s is damaged: it says that positions turn %" PRId64 " of a head's %" PRId64 " dimensions",
                 legible(path).c_str(), n_rot, most);
        }
    }
    const int64_t sections = sum_of(gguf, arch + ".rope.dimension_sections", 1);
    if (sections < 1 || (head > 0 && sections > head)) {
        fail(BMOE_E_MODEL,
             "%s is damaged: the sections of its rope.dimension_sections do not fit a head's %" PRId64 " dimensions",
             legible(path).c_str(), head);
    }
    if (number_of(gguf, arch + ".full_attention_interval", 1) < 1)
        fail(BMOE_E_MODEL, "%s is damaged: its full_attention_interval is 0", legible(path).c_str());
}

bool has_no_rotation(const gguf_context *gguf, const std::string &arch) {
    return number_of(gguf, arch + ".rope.dimension_count", -1) == 0 ||
           number_of(gguf, arch + ".rope.dimension_count_swa", -1) == 0;
}

// Mix the metadata and 16 pages spread over the weights.
void mix_file(uint64_t &hash, const gguf_context *gguf, const File &file) {
    const auto data = static_cast<int64_t>(gguf_get_data_offset(gguf));
    mix(hash, &file.size, sizeof file.size);
    mix_range(hash, file, 0, std::min(data, file.size));
    posix_fadvise(file.fd, 0, 0, POSIX_FADV_RANDOM);  // a page, not the read-ahead window around it
    for (int64_t i = 0; i < 16; ++i) {
        const int64_t begin = data + (file.size - data) / 16 * i;
        mix_range(hash, file, begin, std::min(begin + 4096, file.size));
    }
}

}  // namespace

int32_t layer_of(const char *tensor) { return strncmp(tensor, "blk.", 4) == 0 ? atoi(tensor + 4) : -1; }

int64_t ModelFile::expert_bytes(int32_t layer) const {
    const auto found = layer_bytes.find(layer);
    return found == layer_bytes.end() || n_expert <= 0 ? 0 : found->second / n_expert;
}

bool is_expert_weight(const std::string &tensor) {
    static const std::string END = "_exps.weight";
    return is_expert(tensor) && tensor.size() > END.size() &&
           tensor.compare(tensor.size() - END.size(), END.size(), END) == 0;
}

ModelFile inspect_model(const std::string &path) {
    ModelFile model;
    const File first(path);
    const Gguf gguf = read_gguf(path, first);
    model.arch = text_of(gguf.get(), "general.architecture");
    model.name = text_of(gguf.get(), "general.name");
    const int no = static_cast<int>(number_of(gguf.get(), "split.no", 0));
    const int count = static_cast<int>(number_of(gguf.get(), "split.count", 1));
    model.shards = count > 1 ? shard_paths(path, no, count) : std::vector<std::string>{path};
    check_language_model(gguf.get(), path, model.arch);
    check_consistent(gguf.get(), path, model.arch);
    check_computable(gguf.get(), path, model.arch);
    model.has_no_rotation = has_no_rotation(gguf.get(), model.arch);
    model.n_expert = static_cast<int32_t>(number_of(gguf.get(), model.arch + ".expert_count", 0));
    model.n_expert_used = static_cast<int32_t>(number_of(gguf.get(), model.arch + ".expert_used_count", 0));
    model.kv_bytes_per_token = kv_bytes_per_token(gguf.get(), model.arch);

    std::set<std::string> moe_layers;
    model.fingerprint = 0xcbf29ce484222325ull;
    add_tensors(model, moe_layers, gguf.get(), 0);
    model.identities.push_back(first.identity);
    mix_file(model.fingerprint, gguf.get(), first);
    for (size_t i = 1; i < model.shards.size(); ++i) {
        const File file(model.shards[i]);
        const Gguf shard = read_gguf(model.shards[i], file);
        add_tensors(model, moe_layers, shard.get(), static_cast<int32_t>(i));
        model.identities.push_back(file.identity);
        mix_file(model.fingerprint, shard.get(), file);
    }
    model.n_moe_layer = static_cast<int32_t>(moe_layers.size());
    return model;
}

}  // namespace bmoe
