#include "engine.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "contain.h"
#include "device/state_memory.h"
#include "error.h"
#include "ggml-backend.h"
#include "os/cpu.h"
#include "os/memory.h"

namespace bmoe {

namespace {

constexpr int32_t DEFAULT_CTX = 4096;
constexpr int32_t DEFAULT_UBATCH = 512;

// Progress is reported to a hook that knows no llama.cpp type, and remembers that it said stop.
struct Progress {
    bmoe_progress_fn hook;
    void *user;
    bool stopped;
    static bool step(float fraction, void *self) {
        auto *progress = static_cast<Progress *>(self);
        on_caller([&] {
            if (progress->hook && progress->hook(fraction, progress->user) != 0) progress->stopped = true;
        });
        return !progress->stopped;
    }
};

std::string why(const LogSink &log) { return log.first_error.empty() ? "llama.cpp gave no reason" : log.first_error; }

// What of the host's is needed while the model is loaded: a thread that is left behind may come to it late.
struct OwnParams {
    bmoe_open_params params;
    std::string path, chat_template, prefill_device;

    OwnParams(const std::string &path_, const bmoe_open_params &given) : params(given), path(path_) {
        if (given.chat_template) chat_template.assign(given.chat_template, given.chat_template_bytes);
        if (given.prefill_device) prefill_device = given.prefill_device;
        if (given.chat_template) params.chat_template = chat_template.data();
        if (given.prefill_device) params.prefill_device = prefill_device.c_str();
    }
    OwnParams(const OwnParams &) = delete;
    OwnParams &operator=(const OwnParams &) = delete;
};

}  // namespace

std::shared_ptr<Engine> Engine::open(const std::string &path, const bmoe_open_params &params) {
    std::shared_ptr<Engine> engine(new Engine(params), dispose);
    const auto own = std::make_shared<OwnParams>(path, params);
    engine->run([e = engine.get(), own] { e->load(own->path, own->params); });
    return engine;
}

Engine::Engine(const bmoe_open_params &params)
    : poll_(params.poll),
      poll_user_(params.poll_user),
      router_hook_(params.router),
      router_user_(params.router_user),
      layer_hook_(params.layer),
      layer_user_(params.layer_user) {
    log_.hook = params.log;
    log_.user = params.log_user;
    log_.level = params.log_level;
    if (params.prefill_device && *params.prefill_device && !params.inspect) thread_ = std::make_unique<DeviceThread>();
}

void Engine::run(const std::function<void()> &body) const {
    if (!thread_) {
        const LogScope scope(&log_);
        return body();
    }
    thread_->run([this, body] {
        const LogScope scope(&log_);
        body();
    });
}

void Engine::load(const std::string &path, const bmoe_open_params &params) {
    const Contained contained;
    file_ = inspect_model(path);
    load_model(path, params);
    specials_ = std::make_unique<SpecialTokens>(vocab());
    load_template(params);
    info_.n_threads = params.n_threads > 0 ? params.n_threads : os::usable_cpus();
    if (!params.inspect) create_context(params);
    if (found_device_.device) attach_device(params);
    choose_budget(params);
    fill_info();
    counters_.size_bytes = sizeof counters_;
}

void Engine::unload() {
    // llama.cpp warns when its buffers have become other than for graphs on one side, and here they run on two.
    if (device_) log_.level = BMOE_LOG_ERROR;
    device_.reset();
    context_.reset();
    threads_.reset();
    model_.reset();
}

// Where a device was lost everything stays: what computes there may not have ended, and what is freed there is asked of it.
void Engine::dispose(Engine *engine) {
    try {
        engine->run([engine] { engine->unload(); });
    } catch (...) {
        return;
    }
    delete engine;
}

void Engine::load_model(const std::string &path, const bmoe_open_params &params) {
    llama_model_params model = llama_model_default_params();
    Progress progress{params.progress, params.progress_user, false};
    model.progress_callback = Progress::step;
    model.progress_callback_user_data = &progress;
    model.n_gpu_layers = 0;
    model.use_extra_bufts = !params.no_repack;
    choose_device(model, params);
    llama_model_kv_override overrides[2]{};
    if (params.n_expert_used > 0) {
        override_experts_used(overrides[0], params.n_expert_used);
        model.kv_overrides = overrides;
    }
    if (params.stream && !params.inspect && file_.experts_bytes > 0) stream_experts(model, params);
    info_.repack = model.use_extra_bufts;
    if (params.inspect) {
        model.no_alloc = true;
        model.load_mode = LLAMA_LOAD_MODE_NONE;  // a mapping would be populated
    }
    std::vector<const char *> shards;
    for (const std::string &shard : file_.shards) shards.push_back(shard.c_str());
    log_.first_error.clear();
    model_.reset(experts_             ? load_streamed(shards, model, params)
                 : shards.size() == 1 ? llama_model_load_from_file(shards[0], model)
                                      : llama_model_load_from_splits(shards.data(), shards.size(), model));
    if (progress.stopped) fail(BMOE_E_CANCELLED, "loading %s was cancelled", legible(path).c_str());
    if (!model_) fail(BMOE_E_MODEL, "llama.cpp cannot load %s: %s", legible(path).c_str(), why(log_).c_str());
    // Right where positions turn nothing, and a graph without end where they do.
    if (file_.has_no_rotation && llama_model_rope_type(model_.get()) != LLAMA_ROPE_TYPE_NONE)
        fail(BMOE_E_MODEL, "%s is damaged: it says that positions turn 0 dimensions of a head", legible(path).c_str());
    if (llama_model_has_encoder(model_.get()))
        fail(BMOE_E_MODEL, "%s is an encoder-decoder model, which has no plain next token", legible(path).c_str());
    if (llama_model_is_diffusion(model_.get()))
        fail(BMOE_E_MODEL, "%s is a diffusion model, which has no next token", legible(path).c_str());
    if (llama_vocab_type(vocab()) == LLAMA_VOCAB_TYPE_NONE)
        fail(BMOE_E_MODEL, "%s holds no tokenizer", legible(path).c_str());
}

// llama.cpp reads the file's own number through this.
void Engine::override_experts_used(llama_model_kv_override &to, int32_t n_used) {
    if (n_used > file_.n_expert)
        fail(BMOE_E_ARGUMENT, "%d experts per token are asked for, and this model has %d", n_used, file_.n_expert);
    if (file_.n_expert_used <= 0)
        fail(BMOE_E_ARGUMENT, "this model uses another number of experts in each layer, which cannot be changed");
    to.tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    snprintf(to.key, sizeof to.key, "%s.expert_used_count", file_.arch.c_str());
    to.val_i64 = n_used;
    file_.n_expert_used = n_used;
}

void Engine::load_template(const bmoe_open_params &params) {
    std::string text;
    if (params.chat_template) {
        text.assign(params.chat_template, params.chat_template_bytes);
    } else if (const char *own = llama_model_chat_template(model_.get(), nullptr)) {
        text = own;
    }
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
        if (params.chat_template) fail(BMOE_E_TEMPLATE, "the chat template given is empty");
        return;
    }
    const auto piece = [&](llama_token token) {
        return token == LLAMA_TOKEN_NULL ? "" : detokenize(vocab(), {token}, true);
    };
    try {
        template_ =
            std::make_unique<ChatTemplate>(text, piece(llama_vocab_bos(vocab())), piece(llama_vocab_eos(vocab())));
    } catch (const Error &error) {
        if (params.chat_template || error.status == BMOE_E_MEMORY) throw;
        // A broken template in the file must not keep raw prompts from working: it counts as none, and that is said.
        log_line(log_, BMOE_LOG_WARN, std::string("the model's own template is not usable: ") + error.what());
    }
}

const ChatTemplate &Engine::chat_template() const {
    if (!template_)
        fail(BMOE_E_TEMPLATE,
             "this model's file holds no usable chat template: give one, or send a raw prompt without a template");
    return *template_;
}

void Engine::create_context(const bmoe_open_params &params) {
    const int32_t n_ctx_train = std::max(llama_model_n_ctx_train(model_.get()), 0);
    const int32_t limit = n_ctx_train > 0 ? n_ctx_train : DEFAULT_CTX;
    if (params.n_ctx > limit)
        fail(BMOE_E_ARGUMENT, "a context of %d tokens is more than the %d this model was trained for", params.n_ctx,
             limit);
    info_.n_ctx = params.n_ctx > 0 ? params.n_ctx : std::min(DEFAULT_CTX, limit);
    info_.n_ubatch = std::min(params.n_ubatch > 0 ? params.n_ubatch : DEFAULT_UBATCH, info_.n_ctx);
    info_.kv_type = params.kv_type;

    const int64_t kv_bytes = file_.kv_bytes_per_token * info_.n_ctx * (params.kv_type == BMOE_KV_F32 ? 2 : 1);
    const int64_t available = os::available_bytes();
    if (available > 0 && kv_bytes > available) {
        fail(BMOE_E_MEMORY,
             "a context of %d tokens takes %" PRId64 " MiB of KV cache, and %" PRId64
             " MiB are available; use a smaller context",
             info_.n_ctx, kv_bytes >> 20, available >> 20);
    }
    llama_context_params context = llama_context_default_params();
    context.n_ctx = static_cast<uint32_t>(info_.n_ctx);
    context.n_batch = static_cast<uint32_t>(info_.n_ubatch);
    context.n_ubatch = static_cast<uint32_t>(info_.n_ubatch);
    context.n_outputs_max = static_cast<uint32_t>(std::min<int32_t>(BMOE_MAX_ROWS, info_.n_ubatch));
    context.n_outputs_max_per_seq = context.n_outputs_max;
    context.swa_full = false;  // a window is kept as a window
    context.n_threads = info_.n_threads;
    context.n_threads_batch = info_.n_threads;
    context.type_k = params.kv_type == BMOE_KV_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    context.type_v = context.type_k;
    // Flash attention rounds K and V to F16 whatever they are kept as.
    if (params.kv_type == BMOE_KV_F32) context.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    context.abort_callback = should_stop;
    context.abort_callback_data = this;
    if (found_device_.device) {
        context.op_offload = false;  // it computes what it is handed
        context.offload_kqv = true;  // and attention with it; the state is the CPU's all the same, like its layer
    }
    if (experts_ || router_hook_ || layer_hook_ || found_device_.device) {
        context.cb_eval = on_node;
        context.cb_eval_user_data = this;
    }
    log_.first_error.clear();
    {
        const StateMemory memory(found_device_);
        context_.reset(llama_init_from_model(model_.get(), context));
    }
    if (!context_) {
        const bool memory = log_.first_error.find("alloc") != std::string::npos;
        fail(memory ? BMOE_E_MEMORY : BMOE_E_MODEL, "llama.cpp cannot create a context of %d tokens: %s", info_.n_ctx,
             why(log_).c_str());
    }
    if (info_.n_threads > 1) {
        // ggml ends the process where one of them does not start.
        if (!os::can_start_threads(info_.n_threads - 1))
            fail(BMOE_E_MEMORY, "cannot start %d threads", info_.n_threads);
        // Without a pool of its own a context would start and join its threads at every graph.
        ggml_threadpool_params pool = ggml_threadpool_params_default(info_.n_threads);
        pool.poll = 0;  // between two graphs the threads sleep
        threads_.reset(ggml_threadpool_new(&pool));
        if (!threads_) fail(BMOE_E_MEMORY, "cannot start %d threads", info_.n_threads);
        llama_attach_threadpool(context_.get(), threads_.get(), threads_.get());
    }
}

void Engine::fill_info() {
    info_.size_bytes = sizeof info_;
    put_legible(info_.arch, file_.arch);
    put_legible(info_.name, file_.name);
    put_legible(info_.quantization, llama_ftype_name(llama_model_ftype(model_.get())));
    info_.n_params = static_cast<int64_t>(llama_model_n_params(model_.get()));
    info_.weights_bytes = file_.weights_bytes;
    info_.experts_bytes = file_.experts_bytes;
    info_.n_layer = llama_model_n_layer(model_.get());
    info_.n_moe_layer = file_.n_moe_layer;
    info_.n_expert = file_.n_expert;
    info_.n_expert_used = file_.n_expert_used;
    info_.n_embd = llama_model_n_embd(model_.get());
    info_.n_vocab = llama_vocab_n_tokens(vocab());
    info_.n_ctx_train = llama_model_n_ctx_train(model_.get());
    info_.n_swa = llama_model_n_swa(model_.get());
    info_.n_shards = static_cast<int32_t>(file_.shards.size());
    info_.is_recurrent = llama_model_is_recurrent(model_.get());
    info_.is_hybrid = llama_model_is_hybrid(model_.get());
    info_.has_template = template_ != nullptr;
    info_.adds_bos = llama_vocab_get_add_bos(vocab()) && llama_vocab_bos(vocab()) != LLAMA_TOKEN_NULL;
    info_.think_ctl = template_ ? template_->think_ctl() : BMOE_THINK_NONE;
    if (template_ && !template_->reasoning_end().empty()) {
        put_legible(info_.think_start, template_->reasoning_start());
        put_legible(info_.think_end, template_->reasoning_end());
    }
}

void Engine::require_context() const {
    if (!broken_.empty())
        fail(BMOE_E_INTERNAL, "the engine failed before (%s) and can only be closed", broken_.c_str());
    if (thread_) {
        const std::string lost = thread_->lost();
        if (!lost.empty())
            fail(BMOE_E_INTERNAL, "the prefill device was lost before (%s), and the engine can only be closed",
                 lost.c_str());
        // What the call needs of the device: nothing, once this was done.
        run([this] { llama_synchronize(context_.get()); });
    }
    if (!context_) fail(BMOE_E_UNSUPPORTED, "the engine was opened to inspect the model only, without weights");
}

}  // namespace bmoe
