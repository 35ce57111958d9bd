// An engine whose wide pieces are computed on a device: how it comes to one, and how such a piece is computed.
#include <cstring>

#include "engine.h"
#include "error.h"
#include "ggml-impl.h"
#include "graph_names.h"

namespace bmoe {

namespace {

constexpr int32_t DEFAULT_MIN_TOKENS = 32;
constexpr int32_t DEFAULT_LOADERS = 2;

// Weights are on the host when this ends, whatever ended it.
struct Released {
    PrefillDevice &device;
    ~Released() { device.release(); }
};

}  // namespace

// The model is told of no device but this one, or llama.cpp would take any that it finds. No layer is assigned to it.
void Engine::choose_device(llama_model_params &model, const bmoe_open_params &params) {
    model.devices = devices_;
    if (!params.prefill_device || !*params.prefill_device || params.inspect) return;
    found_device_ = find_device(params.prefill_device);
    if (!found_device_.device) return leave_device(found_device_.why);
    devices_[0] = found_device_.device;
    model.use_extra_bufts = false;  // the device is handed what lies on the host, in the file's layout
    model.no_host = true;           // weights lie where they lie without it
}

void Engine::leave_device(const std::string &why) {
    log_line(log_, BMOE_LOG_WARN, "no prefill device, everything is computed on the CPU: " + why);
    put_legible(info_.prefill_device_why, why);
}

void Engine::attach_device(const bmoe_open_params &params) {
    DeviceOptions options;
    options.min_tokens = params.prefill_min_tokens > 0 ? params.prefill_min_tokens : DEFAULT_MIN_TOKENS;
    options.n_loaders = params.prefill_loaders > 0 ? params.prefill_loaders : DEFAULT_LOADERS;
    options.direct = !params.no_direct;
    const std::string name = legible(params.prefill_device);
    if (info_.n_ubatch < options.min_tokens)
        return leave_device("the device " + name + " is to compute pieces of " + std::to_string(options.min_tokens) +
                            " tokens and more, and none is wider than " + std::to_string(info_.n_ubatch));
    // On the device the head is cut off from what it reads: here it is still whole.
    if (layer_hook_) find_head();
    try {
        device_ = std::make_unique<PrefillDevice>(found_device_, context_.get(), model_.get(), file_, experts_.get(),
                                                  options);
    } catch (const std::exception &error) {
        leave_device("the device " + name + " cannot be used for this model: " + legible(error.what()));
        // llama.cpp may have lost its buffers in the attempt.
        build_graph(context_.get(), true);
        return;
    }
    put_legible(info_.prefill_device, name);
    info_.prefill_device_bytes = device_->n_bytes();
}

void Engine::find_head() {
    const ggml_cgraph *graph = build_graph(context_.get(), false);
    for (int32_t i = 0; i < graph->n_nodes; ++i)
        if (strcmp(graph->nodes[i]->name, LOGITS) == 0) head_.find(graph->nodes[i]);
}

int32_t Engine::compute_on_device(const llama_batch &batch) {
    const Released released{*device_};
    device_->begin();
    const int32_t status = llama_decode(context_.get(), batch);
    if (status == 0 && !graph_failure_ && !given_up_) device_->finish(batch.n_tokens);
    return status;
}

}  // namespace bmoe
