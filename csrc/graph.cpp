// What a graph is asked while it is computed, and what it tells: the one callback that streaming and hooks share.
#include <cstring>
#include <utility>

#include "engine.h"
#include "error.h"
#include "graph_names.h"

namespace bmoe {

namespace {

// The bytes of a node, on the host.
class Bytes {
  public:
    explicit Bytes(const ggml_tensor *node) : at_(static_cast<const char *>(node->data)) {
        if (!node->buffer || ggml_backend_buffer_is_host(node->buffer)) return;
        copy_.resize(ggml_nbytes(node));
        ggml_backend_tensor_get(node, copy_.data(), 0, copy_.size());
        at_ = copy_.data();
    }
    template <class T>
    const T *row(int64_t index, size_t stride) const {
        return reinterpret_cast<const T *>(at_ + static_cast<size_t>(index) * stride);
    }

  private:
    std::vector<char> copy_;
    const char *at_;
};

}  // namespace

// Asked of each node of a graph before it is computed, and told of those it was asked for when they have been. Computing
// pauses meanwhile, on the thread that called prefill.
bool Engine::on_node(ggml_tensor *node, bool ask, void *self) {
    auto *engine = static_cast<Engine *>(self);
    engine->take_back();
    bool answer = ask;  // a node asked for ends this part of the graph, and false ends what follows
    try {
        if (!engine->is_of_no_use()) answer = ask ? engine->wants(node) : engine->computed(node);
    } catch (const Error &error) {
        engine->graph_failure_ = error;
    } catch (const std::exception &error) {
        engine->graph_failure_ = Error(BMOE_E_INTERNAL, error.what());
        if (engine->on_device_) lose_device(error);
    }
    // Each other part of the graph still comes to its first node, of sources that were not computed: of experts or rows chosen
    // by such, there is no telling what is read.
    if (ask && engine->is_of_no_use()) {
        engine->passed_over_ = node;
        engine->passed_op_ = std::exchange(node->op, GGML_OP_NONE);
    }
    return answer;
}

void Engine::take_back() {
    if (ggml_tensor *node = std::exchange(passed_over_, nullptr)) node->op = passed_op_;
}

bool Engine::wants(const ggml_tensor *node) {
    if (!on_device_) return (experts_ && meets_experts(node)) || listens(node);
    const std::optional<bool> pauses = device_->before(node, [this] { return should_stop(this); });
    given_up_ = !pauses;
    return given_up_ || *pauses || listens(node);
}

bool Engine::listens(const ggml_tensor *node) {
    if (number_after(ROUTED, node) >= 0) return experts_ || router_hook_ || on_device_;
    if (experts_ && !on_device_ && experts_->is_short_of_room() && number_after(EXPERTS_END, node) >= 0) return true;
    if (router_hook_ && number_after(WEIGHTED, node) >= 0) return true;
    if (!layer_hook_ || n_outputs_ == 0) return false;
    if (!head_.is_found() && strcmp(node->name, LOGITS) == 0) head_.find(node);
    return number_after(LAYER_END, node) >= 0;
}

// Streamed weights are there only when their layer's router was seen. What reads them otherwise would read zeros.
// Returns true for what follows the first products with them, where what those can give back is needed.
bool Engine::meets_experts(const ggml_tensor *node) {
    if (is_view(node)) return false;
    bool uses = false;
    for (const ggml_tensor *source : node->src) {
        if (!source) continue;
        const ggml_tensor *weights = source->view_src ? source->view_src : source;
        if (!is_streamed(weights)) continue;
        uses = true;
        if (node->op == GGML_OP_MUL_MAT_ID && experts_->is_readable(layer_of(weights->name), weights->name))
            experts_->use(weights->name);
        else
            fail(BMOE_E_UNSUPPORTED,
                 "the experts of this model (%s) cannot be streamed: %s reads %s before it is known which are needed",
                 info_.arch, node->name, weights->name);
    }
    return !uses && experts_->is_short_of_room() && after_product(node);
}

bool Engine::is_streamed(const ggml_tensor *weights) const {
    return weights->buffer && ggml_backend_buffer_get_type(weights->buffer) == expert_buffers_->get();
}

// An activation: it takes a product with experts, as it is or with a bias added.
bool Engine::after_product(const ggml_tensor *node) const {
    if (node->op != GGML_OP_UNARY && node->op != GGML_OP_GLU) return false;
    const ggml_tensor *source = node->src[0];
    for (int depth = 0; source && depth < 6; ++depth) {
        if (source->op == GGML_OP_MUL_MAT_ID) return is_streamed(source->src[0]);
        source = source->src[0];
    }
    return false;
}

// Returns false where the graph need not go on.
bool Engine::computed(const ggml_tensor *node) {
    if (on_device_) {
        device_->after();
        // Unlike the CPU, a device does not ask by itself.
        given_up_ = should_stop(this);
        if (given_up_) return false;
    }
    int32_t layer = number_after(ROUTED, node);
    if (layer >= 0) return routed(layer, node);
    layer = number_after(WEIGHTED, node);
    if (layer >= 0) {
        weighted(layer, node);
        return true;
    }
    if (experts_ && !on_device_) {
        if (after_product(node)) experts_->release_used();
        if (number_after(EXPERTS_END, node) >= 0) experts_->release_layer();
    }
    layer = number_after(LAYER_END, node);
    if (layer >= 0 && node->type == GGML_TYPE_F32 && node->ne[1] > 0) {
        const Bytes bytes(node);  // on this thread: a device that is lost keeps whoever asks it
        on_caller([&] {
            layer_hook_(layer, bytes.row<float>(node->ne[1] - 1, node->nb[1]), static_cast<int32_t>(node->ne[0]),
                        layer_user_);
        });
    }
    return true;
}

bool Engine::routed(int32_t layer, const ggml_tensor *topk) {
    std::vector<int32_t> ids;
    ids.reserve(static_cast<size_t>(topk->ne[0] * topk->ne[1]));
    const Bytes bytes(topk);
    for (int64_t token = 0; token < topk->ne[1]; ++token) {
        const auto *row = bytes.row<int32_t>(token, topk->nb[1]);
        ids.insert(ids.end(), row, row + topk->ne[0]);
    }
    if (router_hook_) {
        routed_ = {layer, topk->ne[0], topk->ne[1], ids, {}};
        if (experts_)
            for (const int32_t id : ids)
                routed_.residency.push_back(!on_device_                       ? experts_->residency(layer, id)
                                            : device_->is_foreseen(layer, id) ? BMOE_AHEAD
                                                                              : BMOE_ABSENT);
    }
    if (on_device_) {
        given_up_ = !device_->routed(layer, ids, [this] { return should_stop(this); });
        return !given_up_;
    }
    if (!experts_) return true;
    experts_->ask(layer, ids);
    // While the lanes read, this thread would only wait.
    look_ahead(layer, topk);
    given_up_ = !experts_->wait([this] { return should_stop(this); });
    return !given_up_;
}

// The weights are what the outputs were multiplied by: float32 [1, n_used, n_tokens].
void Engine::weighted(int32_t layer, const ggml_tensor *node) {
    const ggml_tensor *weights = node->src[1];
    if (routed_.layer != layer || !weights || weights->type != GGML_TYPE_F32 || !weights->data ||
        weights->ne[1] != routed_.n_used || weights->ne[2] != routed_.n_tokens)
        return;
    const size_t stride = weights->nb[1] / sizeof(float);
    const Bytes bytes(weights);
    std::vector<float> values;
    values.reserve(routed_.experts.size());
    for (int64_t token = 0; token < routed_.n_tokens; ++token)
        for (int64_t slot = 0; slot < routed_.n_used; ++slot)
            values.push_back(bytes.row<float>(token, weights->nb[2])[static_cast<size_t>(slot) * stride]);
    bmoe_routing routing{};
    routing.size_bytes = sizeof routing;
    routing.layer = layer;
    routing.n_tokens = static_cast<int32_t>(routed_.n_tokens);
    routing.n_used = static_cast<int32_t>(routed_.n_used);
    routing.n_expert = info_.n_expert;
    routing.experts = routed_.experts.data();
    routing.weights = values.data();
    routing.residency = experts_ ? routed_.residency.data() : nullptr;
    routing.expert_bytes = file_.expert_bytes(layer);
    on_caller([&] { router_hook_(&routing, router_user_); });
    routed_.layer = -1;
}

}  // namespace bmoe
