// One model, one context, one chat template.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bmoe.h"
#include "device/device_thread.h"
#include "device/prefill_device.h"
#include "error.h"
#include "experts/buffer.h"
#include "experts/router.h"
#include "experts/store.h"
#include "ggml-cpu.h"
#include "head.h"
#include "llama.h"
#include "log.h"
#include "model_file.h"
#include "render.h"
#include "special_tokens.h"

namespace bmoe {

struct FreeModel {
    void operator()(llama_model *model) const { llama_model_free(model); }
};
struct FreeContext {
    void operator()(llama_context *context) const { llama_free(context); }
};
struct FreeThreads {
    void operator()(ggml_threadpool *threads) const { ggml_threadpool_free(threads); }
};

struct FreeSampler {
    void operator()(llama_sampler *sampler) const { llama_sampler_free(sampler); }
};

// A cancelled prefill: what it had added to the counters comes with it.
struct Cancelled : Error {
    bmoe_counters spent;
    explicit Cancelled(const bmoe_counters &spent_)
        : Error(BMOE_E_CANCELLED, "the prefill was cancelled"), spent(spent_) {}
};

class Engine {
  public:
    // Throws Error. params is complete (defaults filled in by the caller).
    static std::shared_ptr<Engine> open(const std::string &path, const bmoe_open_params &params);
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    const bmoe_info &info() const { return info_; }
    const bmoe_counters &counters() const { return counters_; }
    const llama_vocab *vocab() const { return llama_model_get_vocab(model_.get()); }
    const SpecialTokens &specials() const { return *specials_; }
    const ChatTemplate &chat_template() const;  // throws when the model has none
    LogSink *log() { return &log_; }

    // prefill.cpp
    bmoe_counters prefill(const std::vector<llama_token> &tokens);  // what it added to the counters
    bmoe_counters prefill_rows(const std::vector<llama_token> &tokens, float *rows);
    void set_cache_budget(int64_t bytes);
    int32_t position() const { return position_; }
    const float *logits() const;  // [n_vocab], valid until the next call that moves the state
    void request_cancel() { cancel_ = true; }
    void clear_cancel() { cancel_ = false; }

    const Head &head() const { return head_; }
    const ModelFile &file() const { return file_; }

    // sample.cpp
    void start_sampling(const bmoe_sampling &sampling);
    llama_token sample();

    // state.cpp
    size_t state_size() const;
    size_t save_state(void *bytes, size_t capacity);
    void load_state(const void *bytes, size_t n_bytes);
    void drop_state();
    void keep_state(int32_t n_tokens);

    // Throws when the engine was opened for inspection only, or failed in a way that leaves nothing to rely on.
    void require_context() const;

    std::atomic<bool> busy{false};  // while a call runs; a closed engine stays so
    std::atomic<bool> closing{false};

  private:
    explicit Engine(const bmoe_open_params &params);
    ~Engine() = default;
    void load(const std::string &path, const bmoe_open_params &params);
    void unload();
    static void dispose(Engine *engine);
    // With a prefill device on a thread of its own. Throws Error where that is lost: see DeviceThread::run().
    void run(const std::function<void()> &body) const;
    bool is_device_lost() const { return thread_ && !thread_->lost().empty(); }
    void load_model(const std::string &path, const bmoe_open_params &params);
    void override_experts_used(llama_model_kv_override &to, int32_t n_used);
    void load_template(const bmoe_open_params &params);
    void create_context(const bmoe_open_params &params);
    void fill_info();

    bool trim(int32_t n_tokens);
    void replace_memory(const uint8_t *payload, size_t n_bytes, int32_t position);
    enum class Rows { none, last, all };
    void check_tokens(const std::vector<llama_token> &tokens) const;
    bmoe_counters compute(const std::vector<llama_token> &tokens, Rows rows);
    bmoe_counters compute_here(const std::vector<llama_token> &tokens, Rows rows);
    void decode(llama_token *tokens, int32_t n_tokens, Rows rows);
    void undo_prefill(int32_t position);
    static bool should_stop(void *engine);
    // graph.cpp
    static bool on_node(ggml_tensor *node, bool ask, void *engine);
    bool is_of_no_use() const { return graph_failure_ || given_up_; }  // what comes of the graph that is running
    void take_back();
    struct TakenBack {  // whatever ends the graph: it may be computed again
        Engine &engine;
        ~TakenBack() { engine.take_back(); }
    };
    bool wants(const ggml_tensor *node);
    bool listens(const ggml_tensor *node);
    bool computed(const ggml_tensor *node);
    bool meets_experts(const ggml_tensor *node);
    bool is_streamed(const ggml_tensor *weights) const;
    bool after_product(const ggml_tensor *node) const;
    bool routed(int32_t layer, const ggml_tensor *topk);
    void weighted(int32_t layer, const ggml_tensor *node);
    // streaming.cpp
    void stream_experts(llama_model_params &model, const bmoe_open_params &params);
    llama_model *load_streamed(const std::vector<const char *> &shards, const llama_model_params &model,
                               const bmoe_open_params &params);
    void release_copied(const std::vector<uint8_t *> &bases);
    void choose_budget(const bmoe_open_params &params);
    void look_ahead(int32_t layer, const ggml_tensor *topk);
    void update_counters();
    // offload.cpp
    void choose_device(llama_model_params &model, const bmoe_open_params &params);
    void attach_device(const bmoe_open_params &params);
    void leave_device(const std::string &why);
    void find_head();
    int32_t compute_on_device(const llama_batch &batch);

    std::unique_ptr<DeviceThread> thread_;  // null without a prefill device
    mutable LogSink log_;
    ModelFile file_;
    bmoe_info info_{};
    bmoe_counters counters_{};
    std::unique_ptr<ExpertStore> experts_;  // outlives the model, whose tensors lie in it; null where nothing streams
    std::unique_ptr<ExpertBufferType> expert_buffers_;
    llama_model_tensor_buft_override overrides_[2]{};
    EarlyRouter early_router_;
    std::unique_ptr<ggml_threadpool, FreeThreads> threads_;  // outlives the context that computes on it
    std::unique_ptr<llama_model, FreeModel> model_;
    std::unique_ptr<llama_context, FreeContext> context_;
    FoundDevice found_device_;
    ggml_backend_dev_t devices_[2]{};  // of the model, null-terminated
    std::unique_ptr<PrefillDevice> device_;
    std::unique_ptr<SpecialTokens> specials_;
    std::unique_ptr<ChatTemplate> template_;
    std::unique_ptr<llama_sampler, FreeSampler> sampler_;

    bmoe_poll_fn poll_ = nullptr;
    void *poll_user_ = nullptr;
    bmoe_router_fn router_hook_ = nullptr;
    void *router_user_ = nullptr;
    bmoe_layer_fn layer_hook_ = nullptr;
    void *layer_user_ = nullptr;
    // What a router chose whose experts are being computed.
    struct Routed {
        int32_t layer = -1;
        int64_t n_used = 0, n_tokens = 0;
        std::vector<int32_t> experts;
        std::vector<uint8_t> residency;
    } routed_;
    std::chrono::steady_clock::time_point last_poll_{};
    std::atomic<bool> cancel_{false};
    int32_t position_ = 0;
    bool has_logits_ = false;
    bool has_nan_ = false;  // the memory holds NaN, or may: emptied as usual it would spread into what is computed next
    bool was_loaded_ = false;  // from bytes that may hold anything
    std::string broken_;       // why only close() is left
    bool given_up_ = false;    // the graph that is running was cancelled while it waited for weights
    bool on_device_ = false;   // it runs on the prefill device
    int64_t n_outputs_ = 0;    // tokens of the graph that is running whose logits are wanted
    double early_router_s_ = 0.0;
    Head head_;
    std::optional<Error> graph_failure_;  // of the graph that is running: what it needs cannot be had
    ggml_tensor *passed_over_ = nullptr;  // a node of it that is made to compute nothing, until take_back()
    ggml_op passed_op_ = GGML_OP_NONE;    // its own
};

}  // namespace bmoe
