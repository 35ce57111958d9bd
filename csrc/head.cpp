#include "head.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "error.h"
#include "ggml-cpu.h"

namespace bmoe {

namespace {

float parameter(const ggml_tensor *node, size_t index) {
    float value = 0.0f;
    memcpy(&value, reinterpret_cast<const char *>(node->op_params) + index * sizeof(float), sizeof value);
    return value;
}

// What only changes how a tensor is looked at, or copies it.
bool passes(const ggml_tensor *node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_CONT ||
           node->op == GGML_OP_GET_ROWS;
}

bool is_weight(const ggml_tensor *tensor) { return tensor && tensor->op == GGML_OP_NONE && tensor->name[0] != '\0'; }

struct OpenFile {
    int fd;
    // Throws where it is not the file that was inspected.
    OpenFile(const std::string &path, const os::FileIdentity &inspected)
        : fd(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        os::FileIdentity identity;
        if (fd < 0 || !os::identify(fd, identity)) {
            const int why = errno;
            if (fd >= 0) close(fd);
            fail(BMOE_E_READ, "cannot open %s: %s", legible(path).c_str(), strerror(why));
        }
        const std::string changed = os::difference(inspected, identity);
        if (changed.empty()) return;
        close(fd);
        fail(BMOE_E_READ, "the model file changed while it was open: %s %s", legible(path).c_str(), changed.c_str());
    }
    ~OpenFile() { close(fd); }
    OpenFile(const OpenFile &) = delete;
    OpenFile &operator=(const OpenFile &) = delete;
};

}  // namespace

void Head::find(const ggml_tensor *logits) {
    *this = Head();
    found_ = true;
    head_.size_bytes = sizeof head_;
    head_.logit_scale = 1.0f;
    find_outer(logits);
}

// From the logits inwards, to the matrix: factors, a soft-cap, a bias.
void Head::find_outer(const ggml_tensor *node) {
    float outside = 1.0f, inside = 1.0f;  // factors around a tanh, where there is one
    bool capped = false;
    for (; node; node = node->src[0]) {
        // A factor between bias and matrix would act on one and not on the other.
        if (node->op == GGML_OP_SCALE && parameter(node, 1) == 0.0f && bias_.name.empty()) {
            (capped ? inside : outside) *= parameter(node, 0);
        } else if (node->op == GGML_OP_UNARY && ggml_get_unary_op(node) == GGML_UNARY_OP_TANH && !capped) {
            capped = true;
        } else if (node->op == GGML_OP_ADD && is_weight(node->src[1]) && bias_.name.empty()) {
            bias_ = {node->src[1]->name, node->src[1]->type};
        } else if (node->op == GGML_OP_MUL_MAT && is_weight(node->src[0])) {
            weight_ = {node->src[0]->name, node->src[0]->type};
            head_.n_embd = static_cast<int32_t>(node->src[0]->ne[0]);
            head_.softcap = capped ? outside : 0.0f;
            head_.logit_scale = capped ? inside * outside : outside;
            find_norm(node->src[1]);
            return;
        } else if (!passes(node)) {
            break;
        }
    }
    unknown_ = node ? std::string("logits come of ") + ggml_op_name(node->op) : "logits come of no matrix";
}

// From the matrix inwards, to what the last layer hands on.
void Head::find_norm(const ggml_tensor *node) {
    for (; node; node = node->src[0]) {
        if (node->op == GGML_OP_SCALE && parameter(node, 1) == 0.0f && bias_.name.empty() && norm_bias_.name.empty() &&
            norm_weight_.name.empty()) {
            head_.logit_scale *= parameter(node, 0);
        } else if (node->op == GGML_OP_ADD && is_weight(node->src[1]) && norm_bias_.name.empty()) {
            norm_bias_ = {node->src[1]->name, node->src[1]->type};
        } else if (node->op == GGML_OP_MUL && is_weight(node->src[1]) && norm_weight_.name.empty()) {
            norm_weight_ = {node->src[1]->name, node->src[1]->type};
        } else if (node->op == GGML_OP_RMS_NORM || node->op == GGML_OP_NORM) {
            head_.norm = node->op == GGML_OP_NORM ? BMOE_NORM_LAYER : BMOE_NORM_RMS;
            head_.epsilon = parameter(node, 0);
            return;
        } else if (!passes(node)) {
            break;
        }
    }
    unknown_ =
        node ? std::string("the head's input comes of ") + ggml_op_name(node->op) : "the head's input has no norm";
}

void Head::require() const {
    if (!found_) fail(BMOE_E_STATE, "the head is known once logits were computed, with a layer hook");
    if (!unknown_.empty())
        fail(BMOE_E_UNSUPPORTED, "this model's head is none that can be applied to a layer: %s", unknown_.c_str());
}

bmoe_head Head::describe() const {
    require();
    return head_;
}

// Rows of a tensor of n_columns as they lie in the file.
std::vector<char> Head::raw(const ModelFile &file, const Part &part, const std::vector<int32_t> &rows,
                            int64_t n_columns) const {
    const auto place = file.tensors.find(part.name);
    if (place == file.tensors.end()) fail(BMOE_E_UNSUPPORTED, "%s lies in no file of the model", part.name.c_str());
    const size_t row_bytes = ggml_row_size(part.type, n_columns);
    const auto shard = static_cast<size_t>(place->second.shard);
    const std::string &path = file.shards[shard];
    const OpenFile open_file(path, file.identities[shard]);
    std::vector<char> out(rows.size() * row_bytes);
    for (size_t i = 0; i < rows.size(); ++i) {
        const uint64_t at = static_cast<uint64_t>(rows[i]) * row_bytes;
        if (at + row_bytes > place->second.n_bytes)
            fail(BMOE_E_ARGUMENT, "%s has no row %d", part.name.c_str(), rows[i]);
        const ssize_t n =
            pread(open_file.fd, out.data() + i * row_bytes, row_bytes, static_cast<off_t>(place->second.offset + at));
        if (n != static_cast<ssize_t>(row_bytes))
            fail(BMOE_E_READ, "cannot read %s of %s: %s", part.name.c_str(), legible(path).c_str(),
                 n < 0 ? strerror(errno) : "the file ends before that");
    }
    return out;
}

// The same, dequantized by ggml's own conversion of their type.
std::vector<float> Head::read(const ModelFile &file, const Part &part, const std::vector<int32_t> &rows,
                              int64_t n_columns) const {
    const std::vector<char> bytes = raw(file, part, rows, n_columns);
    std::vector<float> out(rows.size() * static_cast<size_t>(n_columns));
    const ggml_to_float_t to_float = ggml_get_type_traits(part.type)->to_float;
    if (part.type == GGML_TYPE_F32)
        memcpy(out.data(), bytes.data(), bytes.size());
    else if (to_float)
        to_float(bytes.data(), out.data(), static_cast<int64_t>(out.size()));
    else
        fail(BMOE_E_UNSUPPORTED, "%s is of a type that has no conversion to floats", part.name.c_str());
    return out;
}

std::vector<float> Head::norm_weight(const ModelFile &file) const {
    require();
    if (norm_weight_.name.empty()) return std::vector<float>(static_cast<size_t>(head_.n_embd), 1.0f);
    return read(file, norm_weight_, {0}, head_.n_embd);
}

std::vector<float> Head::norm_bias(const ModelFile &file) const {
    require();
    if (norm_bias_.name.empty()) return std::vector<float>(static_cast<size_t>(head_.n_embd), 0.0f);
    return read(file, norm_bias_, {0}, head_.n_embd);
}

std::vector<float> Head::rows(const ModelFile &file, const std::vector<int32_t> &tokens) const {
    require();
    return read(file, weight_, tokens, head_.n_embd);
}

std::vector<float> Head::biases(const ModelFile &file, const std::vector<int32_t> &tokens) const {
    require();
    if (bias_.name.empty()) return std::vector<float>(tokens.size(), 0.0f);
    return read(file, bias_, tokens, 1);
}

std::vector<float> Head::normed(const float *state, const std::vector<float> &weight,
                                const std::vector<float> &bias) const {
    const auto n = static_cast<size_t>(head_.n_embd);
    double mean = 0.0, squares = 0.0;
    if (head_.norm == BMOE_NORM_LAYER) {
        for (size_t i = 0; i < n; ++i) mean += static_cast<double>(state[i]);
        mean /= static_cast<double>(n);
    }
    for (size_t i = 0; i < n; ++i) {
        const double off = static_cast<double>(state[i]) - mean;
        squares += off * off;
    }
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + static_cast<double>(head_.epsilon));
    std::vector<float> out(n);
    for (size_t i = 0; i < n; ++i)
        out[i] = static_cast<float>((static_cast<double>(state[i]) - mean) * scale) * weight[i] + bias[i];
    return out;
}

// A quantized matrix is multiplied with a vector that was quantized too, in the type that its kernel wants.
std::vector<float> Head::logits(const ModelFile &file, const std::vector<float> &states,
                                const std::vector<int32_t> &tokens) const {
    const std::vector<float> weight = norm_weight(file), bias = norm_bias(file), added = biases(file, tokens);
    const std::vector<char> matrix = raw(file, weight_, tokens, head_.n_embd);
    const auto n_embd = static_cast<size_t>(head_.n_embd);
    const size_t row_bytes = ggml_row_size(weight_.type, head_.n_embd);
    const ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(weight_.type);
    const ggml_type wanted = traits->vec_dot_type;
    const ggml_from_float_t convert = ggml_get_type_traits_cpu(wanted)->from_float;
    if (!traits->vec_dot || (wanted != GGML_TYPE_F32 && !convert))
        fail(BMOE_E_UNSUPPORTED, "%s is of a type that has no kernel here", weight_.name.c_str());
    std::vector<char> packed(ggml_row_size(wanted, head_.n_embd));
    std::vector<float> out;
    out.reserve(states.size() / n_embd * tokens.size());
    for (size_t at = 0; at + n_embd <= states.size(); at += n_embd) {
        const std::vector<float> x = normed(states.data() + at, weight, bias);
        if (wanted == GGML_TYPE_F32)
            memcpy(packed.data(), x.data(), packed.size());
        else
            convert(x.data(), packed.data(), head_.n_embd);
        for (size_t i = 0; i < tokens.size(); ++i) {
            float dot = 0.0f;
            traits->vec_dot(head_.n_embd, &dot, 0, matrix.data() + i * row_bytes, 0, packed.data(), 0, 1);
            const float logit = head_.logit_scale * (dot + added[i]);
            out.push_back(head_.softcap > 0.0f ? head_.softcap * std::tanh(logit / head_.softcap) : logit);
        }
    }
    return out;
}

}  // namespace bmoe
