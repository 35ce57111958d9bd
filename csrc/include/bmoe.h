/* bmoe.h - the whole public face of libbmoe. C99, also valid C++17.
 *
 * One engine is one GGUF model, one context and one chat template. What is not declared here is not
 * exported. The same text, preprocessed with -DBMOE_CDEF, is what Python's cffi parses.
 *
 * RULES THAT HOLD FOR EVERY CALL
 *   status    a call that can fail returns BMOE_OK (0) or a negative bmoe_status; the reason, one line,
 *             is then bmoe_last_error(engine) in the thread that made the call
 *   handles   a bmoe_engine* is a name, not an address: using one after bmoe_close(), after fork() in the
 *             child, or one that never was, is BMOE_E_CLOSED and touches nothing
 *   threads   one call at a time per engine: a second one is refused with BMOE_E_BUSY, it neither waits
 *             nor races. bmoe_cancel() and bmoe_last_error() may be called from any thread at any time.
 *             Two engines, also of the same file, are independent
 *   text      bytes with a length; a zero byte is text like any other. Invalid UTF-8 is never an error: it becomes
 *             what llama.cpp's tokenizer makes of it, U+FFFD in a byte-level BPE vocabulary
 *   buffers   belong to the caller. Where one is too small the call returns BMOE_E_TOO_SMALL, has written
 *             nothing into it, and has set the size needed; NULL with capacity 0 asks for the size
 *   structs   begin with size_bytes, set by their bmoe_*_init(); fields are only ever added at the end
 *   hooks     run on the calling thread while a call is in progress; they may call bmoe_cancel() and
 *             nothing else of the engine. What they are given is lent for the duration of the hook
 *   output    the library writes nothing to any stream; what it has to say goes to the log hook. One exception: where
 *             llama.cpp ends the process by an assertion and there is no log hook, its last words go to stderr
 *   memory    any call can return BMOE_E_MEMORY, and has then changed nothing but what it says. Where llama.cpp hides that
 *             it was memory the code is that of what failed: MODEL, TEMPLATE, STATE, INTERNAL
 *   stack     a call needs 2 MiB of the caller's
 */
#ifndef BMOE_H
#define BMOE_H

#ifdef BMOE_CDEF
#define BMOE_API
#else
#include <stddef.h>
#include <stdint.h>
#if defined(__GNUC__)
#define BMOE_API __attribute__((visibility("default")))
#else
#define BMOE_API
#endif
#ifdef __cplusplus
extern "C" {
#endif
#endif

/* Moves with any change of a signature, a layout or an enum value. */
enum bmoe_abi { BMOE_ABI_VERSION = 4 };

typedef struct bmoe_engine bmoe_engine;

enum bmoe_status {
    BMOE_OK = 0,
    BMOE_E_ARGUMENT = -1,     /* an argument is outside what its call documents; nothing changed */
    BMOE_E_CLOSED = -2,       /* no open engine in this process goes by this handle */
    BMOE_E_BUSY = -3,         /* another call is running on this engine; nothing changed */
    BMOE_E_TOO_SMALL = -4,    /* the caller's buffer; the size needed has been set */
    BMOE_E_TOO_LONG = -5,     /* more tokens than the context has room for; nothing changed */
    BMOE_E_CANCELLED = -6,    /* bmoe_cancel() or a hook stopped the call */
    BMOE_E_MODEL = -7,        /* the file is missing, damaged, or no language model that can be run here */
    BMOE_E_MEMORY = -8,       /* not enough memory */
    BMOE_E_TEMPLATE = -9,     /* no chat template, or it refused the messages, or cannot be closed to reasoning */
    BMOE_E_STATE = -10,       /* a saved state that does not belong here, or no logits to read yet */
    BMOE_E_UNSUPPORTED = -11, /* this model's memory cannot do that, or this CPU lacks what it takes; nothing changed */
    BMOE_E_INTERNAL = -12,    /* llama.cpp failed; only bmoe_close() makes sense afterwards */
    BMOE_E_LOGITS = -13,      /* the logits are no distribution (NaN, or no finite maximum); the model is broken */
    BMOE_E_READ = -14         /* an expert could not be read from the model's file; the state is as after a cancel */
};

enum bmoe_log_level { BMOE_LOG_DEBUG = 1, BMOE_LOG_INFO = 2, BMOE_LOG_WARN = 3, BMOE_LOG_ERROR = 4 };

/* What the chat template lets a caller say about reasoning ("thinking"). */
enum bmoe_think_ctl {
    BMOE_THINK_NONE = 0,   /* the template knows no reasoning, or there is no template */
    BMOE_THINK_SWITCH = 1, /* it has a switch: off renders a prompt that the answer follows directly */
    BMOE_THINK_CLOSED = 2, /* it opens reasoning whatever the switch says; render closes the block */
    BMOE_THINK_FREE = 3,   /* it knows reasoning but neither opens it nor has a switch: the model may open it */
    BMOE_THINK_FORCED = 4  /* it opens reasoning and does not declare how to close it: off is refused */
};

enum bmoe_kv_type { BMOE_KV_F16 = 0, BMOE_KV_F32 = 1 };

/* Bits of bmoe_token_attr(). A token has at least one of the first five. */
enum bmoe_token_attr_bits {
    BMOE_TOKEN_NORMAL = 1,
    BMOE_TOKEN_CONTROL = 2,      /* special: never made from a caller's text; unknown tokens count here */
    BMOE_TOKEN_USER_DEFINED = 4, /* an added word of the vocabulary; text, not control */
    BMOE_TOKEN_BYTE = 8,
    BMOE_TOKEN_UNUSED = 16,
    BMOE_TOKEN_END = 32 /* ends a generation */
};

/* By what it is guessed which experts are read before their router has run. */
enum bmoe_prefetch {
    BMOE_PREFETCH_BOTH = 0,     /* the router, and where it cannot be applied early what was asked for before */
    BMOE_PREFETCH_PREVIOUS = 1, /* what earlier graphs asked for */
    BMOE_PREFETCH_ROUTER = 2,   /* the layer's own router, applied to the layer before */
    BMOE_PREFETCH_OFF = 3       /* none are */
};

/* Where the weights lie that do not stream. */
enum bmoe_dense {
    BMOE_DENSE_MMAP = 0, /* in the page cache, which the kernel may take back and read again */
    BMOE_DENSE_ANON = 1  /* in memory of the process, read once */
};

/* Where an expert was when a router asked for it. */
enum bmoe_residency {
    BMOE_ABSENT = 0,
    BMOE_AHEAD = 1, /* read, or being read, on a guess */
    BMOE_RESIDENT = 2
};

enum bmoe_device_type { BMOE_DEVICE_CPU = 0, BMOE_DEVICE_GPU = 1, BMOE_DEVICE_IGPU = 2, BMOE_DEVICE_ACCEL = 3 };

/* Most tokens of one bmoe_prefill_rows(). */
enum bmoe_rows { BMOE_MAX_ROWS = 32 };

/* text    one line, no line end, NUL-terminated */
typedef void (*bmoe_log_fn)(int32_t level, const char *text, void *user);
/* Nonzero stops the load: bmoe_open() then returns BMOE_E_CANCELLED.   fraction  0..1, rising */
typedef int32_t (*bmoe_progress_fn)(float fraction, void *user);
/* Called at most every 20 ms during a prefill, between two graph nodes. Nonzero cancels it. */
typedef int32_t (*bmoe_poll_fn)(void *user);

/* What a layer's router chose for the tokens of one graph. */
typedef struct bmoe_routing {
    size_t size_bytes;
    int32_t layer;
    int32_t n_tokens; /* that this layer computes experts for: in the last layer only those whose logits are wanted */
    int32_t n_used;   /* experts of a token */
    int32_t n_expert; /* of the layer */
    const int32_t *experts;   /* [n_tokens, n_used] */
    const float *weights;     /* [n_tokens, n_used], by which their outputs are multiplied */
    const uint8_t *residency; /* [n_tokens, n_used], bmoe_residency; NULL where nothing streams */
    int64_t expert_bytes;     /* of one expert of the layer in the file */
} bmoe_routing;
/* Called for each layer of each graph that has routed experts, once they have been computed. */
typedef void (*bmoe_router_fn)(const bmoe_routing *routing, void *user);
/* Called at the end of each layer of a call's last graph, with what it hands to the next one for the last token.
 *   state     float32 [n_embd] */
typedef void (*bmoe_layer_fn)(int32_t layer, const float *state, int32_t n_embd, void *user);

enum bmoe_norm { BMOE_NORM_RMS = 1, BMOE_NORM_LAYER = 2 };

/* What makes logits of a state x that a layer hands on: with n the norm of x over [n_embd], its weight and bias,
 *   l = logit_scale * (row . (n(x) * weight + bias) + row's bias), and where softcap is not 0, softcap * tanh(l / softcap) */
typedef struct bmoe_head {
    size_t size_bytes;
    int32_t n_embd;
    int32_t norm; /* bmoe_norm */
    float epsilon;
    float logit_scale;
    float softcap;
} bmoe_head;

typedef struct bmoe_open_params {
    size_t size_bytes;
    int32_t n_ctx;             /* tokens of context, 1..n_ctx_train; 0: the smaller of 4096 and n_ctx_train */
    int32_t n_ubatch;          /* widest piece of a prefill, tokens, 1..65536; 0: 512. Capped at n_ctx */
    int32_t n_threads;         /* 1..512; 0: the CPUs this process may use (affinity and cgroup quota) */
    int32_t kv_type;           /* bmoe_kv_type */
    int32_t inspect;           /* 1: metadata only. No weight is read; what needs them is BMOE_E_UNSUPPORTED */
    int32_t log_level;         /* least bmoe_log_level that reaches log; default BMOE_LOG_WARN */
    const char *chat_template; /* Jinja text in place of the model's own; copied; NULL: the model's own */
    size_t chat_template_bytes;
    bmoe_log_fn log; /* may be NULL */
    void *log_user;
    bmoe_progress_fn progress; /* may be NULL; called during bmoe_open() only */
    void *progress_user;
    bmoe_poll_fn poll; /* may be NULL */
    void *poll_user;
    int32_t stream;      /* 1: routed experts stay in the file, and those that a prompt routes to are read from it. A
                            model without any is opened as ever, and its info.is_streamed is 0 */
    int32_t io_threads;  /* that read, 1..64; 0: 4 */
    int64_t cache_bytes; /* of experts kept in memory from one graph to the next; 0: none; -1: from what is available */
    int32_t no_direct;   /* 1: read through the page cache */
    int32_t prefetch;    /* bmoe_prefetch */
    int32_t no_repack;   /* 1: weights are computed with as they lie in the file, streamed or not */
    int32_t n_expert_used; /* per token, 1..n_expert; 0: as the file says. Fewer is quicker, and another model */
    int32_t dense;         /* bmoe_dense; where nothing streams, weights are mapped */
    bmoe_router_fn router; /* may be NULL. Hooks see what is computed, and change nothing of it */
    void *router_user;
    bmoe_layer_fn layer; /* may be NULL; never called where llama.cpp does not name what a layer hands on */
    void *layer_user;
    const char *prefill_device; /* name of a bmoe_device that wide pieces of a prefill are computed on; copied; NULL or
                                   empty: none. One that cannot be used leaves them on the CPU: info.prefill_device is
                                   then empty, and a line of the log says why. With a device no_repack is 1 */
    int32_t prefill_min_tokens; /* of a piece that is computed there, 1..65536; 0: 32 */
    int32_t prefill_loaders;    /* threads that bring weights there, 1..64; 0: 2 */
} bmoe_open_params;

typedef struct bmoe_info {
    size_t size_bytes;
    char arch[64];         /* general.architecture, cut at 63 bytes */
    char name[128];        /* general.name, cut at 127 bytes; may be empty */
    char quantization[64]; /* e.g. "Q4_K - Medium" */
    int64_t n_params;
    int64_t weights_bytes; /* all tensors, all shards */
    int64_t experts_bytes; /* the part of weights_bytes that routed experts hold; 0 for a dense model */
    int32_t n_layer;
    int32_t n_moe_layer;   /* layers that hold routed experts */
    int32_t n_expert;      /* per MoE layer; 0 for a dense model */
    int32_t n_expert_used; /* per token */
    int32_t n_embd;
    int32_t n_vocab;
    int32_t n_ctx_train;
    int32_t n_swa;    /* width of sliding-window attention, tokens; 0: none */
    int32_t n_shards; /* files the model is split into, 1 when whole */
    int32_t n_ctx;    /* as opened, like the following two; 0 where only inspected */
    int32_t n_ubatch;
    int32_t kv_type;
    int32_t n_threads;    /* as opened, or what it would be */
    int32_t is_recurrent; /* every layer keeps recurrent state */
    int32_t is_hybrid;    /* some layers do */
    int32_t has_template; /* the file's own, or one given at open */
    int32_t adds_bos;     /* prompts of this model begin with its BOS token */
    int32_t think_ctl;    /* bmoe_think_ctl */
    char think_start[64]; /* what the model writes, or its prompt ends with, before reasoning; empty where unknown */
    char think_end[64];   /* and between reasoning and answer. Special tokens as text */
    int32_t is_streamed;
    int32_t reads_direct; /* past the page cache */
    int32_t repack; /* weights in memory may be laid out anew for this CPU: neither no_repack nor a prefill device */
    int64_t streamed_bytes;       /* of experts_bytes; 0 where nothing streams */
    int64_t cache_bytes;          /* budget of experts kept in memory, as opened */
    char prefill_device[128];     /* its name; empty where there is none */
    char prefill_device_why[256]; /* why not the one that was asked for */
    int64_t prefill_device_bytes; /* of its memory that weights take: two layers */
} bmoe_info;

/* Totals since bmoe_open(); they never fall. */
typedef struct bmoe_counters {
    size_t size_bytes;
    int64_t n_prefill_tokens; /* tokens computed, those of cancelled pieces not counted */
    int64_t n_graphs;         /* prefill pieces computed */
    double prefill_s;         /* wall seconds inside bmoe_prefill() */
    double prefill_cpu_s;     /* CPU seconds of the whole process during them */
    int64_t n_major_faults;   /* page faults of the process during them that had to read */
    int64_t read_bytes;       /* asked of the kernel for streamed experts */
    int64_t routed_bytes;     /* of the experts that graphs asked for */
    int64_t ahead_bytes;      /* read before a router had asked for them */
    int64_t wasted_bytes;     /* of those, never asked for */
    int64_t n_hits;           /* experts asked for that were in memory */
    int64_t n_misses;
    double io_s;            /* in which at least one lane was reading */
    double stall_s;         /* in which computing waited for reads */
    double mgmt_s;          /* spent on choosing what to keep, and giving back the rest */
    int64_t resident_bytes; /* of streamed experts in memory now: the one figure here that falls */
    int64_t dev_tokens;     /* of n_prefill_tokens, computed on the prefill device */
    int64_t dev_read_bytes; /* asked of the kernel for streamed experts that went there; not in read_bytes */
    double dev_stall_s;     /* in which computing waited for weights to be there */
    int64_t dev_routed;     /* experts that its graphs asked for, each layer's of each graph once */
    int64_t dev_demand;     /* of those, not foreseen: brought when a router had asked for them */
    int64_t dev_nodes;      /* of graphs, computed there */
} bmoe_counters;

typedef struct bmoe_message {
    const char *role;    /* NUL-terminated: "system", "user" or "assistant" */
    const char *content; /* may be NULL when content_bytes is 0 */
    size_t content_bytes;
} bmoe_message;

/* How bmoe_sample() chooses, through llama.cpp's samplers in this order: top-k, top-p, min-p, temperature, a draw. */
typedef struct bmoe_sampling {
    size_t size_bytes;
    float temperature; /* 0..100; below 0.0001 greedy: the likeliest token, and nothing else here acts */
    int32_t top_k;     /* the k likeliest; 0: all */
    float top_p;       /* 0..1: the likeliest that together hold this mass; 1: all */
    float min_p;       /* 0..1: those of at least this share of the likeliest one's probability; 0: all */
    uint32_t seed;     /* of the draws */
} bmoe_sampling;

/* A half-open range of bytes [begin, end) of a text. */
typedef struct bmoe_span {
    size_t begin;
    size_t end;
} bmoe_span;

/* BMOE_ABI_VERSION of the library; a caller compares it with the one it was compiled against. */
BMOE_API int32_t bmoe_abi_version(void);
/* Versions of bmoe and of llama.cpp, and how it was built; one line, static. */
BMOE_API const char *bmoe_build_info(void);

/* Fill *params with the defaults. NULL is allowed and does nothing. */
BMOE_API void bmoe_open_params_init(bmoe_open_params *params);

/* What this library can compute on. A prefill device is a GPU or an IGPU. */
typedef struct bmoe_device {
    size_t size_bytes;
    char name[128];
    char description[256];
    int64_t free_bytes; /* of its memory; 0 where it does not say, like total_bytes */
    int64_t total_bytes;
    int32_t type; /* bmoe_device_type */
} bmoe_device;

/* How many bmoe_device there are. */
BMOE_API int32_t bmoe_device_count(void);
/*   index     0..bmoe_device_count() - 1
 *   returns   BMOE_OK, BMOE_E_ARGUMENT or BMOE_E_UNSUPPORTED (this CPU), whose reason is bmoe_last_error(NULL) */
BMOE_API int32_t bmoe_get_device(int32_t index, bmoe_device *device);

/* Open a GGUF model.
 *   engine    set to a handle that is never reused, or to NULL on an error
 *   path      of the model, or of the first file of a split one; bytes, NUL-terminated
 *   params    NULL: the defaults
 *   error     gets the reason, NUL-terminated and cut to error_cap bytes; may be NULL with error_cap 0
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_UNSUPPORTED (this CPU lacks what the library was compiled for; the reason
 *             names it), BMOE_E_MODEL, BMOE_E_MEMORY, BMOE_E_TEMPLATE (an override that does not parse),
 *             BMOE_E_CANCELLED (the progress hook said so), BMOE_E_INTERNAL
 *   note      the file is mapped, not copied: while the engine is open it must not be changed */
BMOE_API int32_t bmoe_open(bmoe_engine **engine, const char *path, const bmoe_open_params *params, char *error,
                           size_t error_cap);

/* Free everything. A call running in another thread is cancelled and waited for. NULL, an engine closed
 * before and one inherited through fork() are allowed and do nothing. Not from a hook. */
BMOE_API void bmoe_close(bmoe_engine *engine);

/* Why this thread's last failed call on this engine failed. Never NULL; lent until this thread's next call. */
BMOE_API const char *bmoe_last_error(const bmoe_engine *engine);

/* info->size_bytes must be sizeof(bmoe_info) of the caller. Returns BMOE_OK, BMOE_E_ARGUMENT. */
BMOE_API int32_t bmoe_get_info(bmoe_engine *engine, bmoe_info *info);
/* counters->size_bytes must be sizeof(bmoe_counters) of the caller. Returns BMOE_OK, BMOE_E_ARGUMENT. */
BMOE_API int32_t bmoe_get_counters(bmoe_engine *engine, bmoe_counters *counters);

/* Messages to a prompt, through the chat template.
 *   reasoning 0: off; a block the template opens all the same is closed as the template declares. 1: on
 *   generate  1: end with what opens the assistant's turn
 *   text      the prompt, not NUL-terminated; *n_bytes its length
 *   spans     the ranges of text that came from the messages' content, rising; *n_spans how many.
 *             Handed to bmoe_tokenize() they keep a caller's text from becoming control tokens
 *   system    where the template has no such role, its text is put before that of the first
 *             message, with a line break between
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_TOO_SMALL (either buffer; both sizes are set), BMOE_E_TEMPLATE */
BMOE_API int32_t bmoe_render(bmoe_engine *engine, const bmoe_message *messages, size_t n_messages, int32_t reasoning,
                             int32_t generate, char *text, size_t text_cap, size_t *n_bytes, bmoe_span *spans,
                             size_t spans_cap, size_t *n_spans);

/* Text to tokens. Outside the spans, special tokens are parsed; no control token comes from bytes inside one,
 * nor from bytes that only touch one. Where no span holds the text of a control token the result is
 * llama.cpp's own tokenization of the whole text with special tokens parsed.
 *   spans     rising, not overlapping, within the text: bytes that are data. NULL with n_spans 0: none
 *   add_bos   1: begin with the model's BOS token if the model wants one; never two. EOS is never added
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_TOO_SMALL, BMOE_E_TOO_LONG (over 1 GiB, or a run of over 1 MiB without
 *             a blank, or of blanks), BMOE_E_MEMORY */
BMOE_API int32_t bmoe_tokenize(bmoe_engine *engine, const char *text, size_t n_bytes, const bmoe_span *spans,
                               size_t n_spans, int32_t add_bos, int32_t *tokens, size_t tokens_cap, size_t *n_tokens);

/* Tokens to text: the bytes each stands for, joined; a character may be cut at either end.
 *   special   1: control tokens as their text. 0: they are left out
 *   returns   BMOE_OK, BMOE_E_ARGUMENT (also a token outside [0, n_vocab)), BMOE_E_TOO_SMALL */
BMOE_API int32_t bmoe_detokenize(bmoe_engine *engine, const int32_t *tokens, size_t n_tokens, int32_t special,
                                 char *text, size_t text_cap, size_t *n_bytes);

/* The bmoe_token_attr_bits of a token, or BMOE_E_ARGUMENT for one outside [0, n_vocab). */
BMOE_API int32_t bmoe_token_attr(bmoe_engine *engine, int32_t token);

/* Compute tokens[n_tokens] after the current position, in pieces one ubatch wide.
 *   tokens    copied; each in [0, n_vocab); n_tokens in [1, n_ctx - position]
 *   spent     what this call added to the counters, set on OK and CANCELLED; its size_bytes must be sizeof(bmoe_counters)
 *             of the caller; may be NULL
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_TOO_LONG, BMOE_E_CANCELLED, BMOE_E_READ, BMOE_E_MEMORY,
 *             BMOE_E_UNSUPPORTED (its experts cannot be streamed: they are read before it is known which), BMOE_E_INTERNAL
 *   state     moved by n_tokens on OK; as before on ARGUMENT, TOO_LONG and MEMORY; on CANCELLED, READ and UNSUPPORTED as before, or empty
 *             where the memory cannot be trimmed (bmoe_position() tells); after another code only
 *             bmoe_close() is allowed
 *   cancel    is noticed within one graph's compute
 *   bits      the same tokens in the same pieces from the same state give the same logits, bit for bit */
BMOE_API int32_t bmoe_prefill(bmoe_engine *engine, const int32_t *tokens, size_t n_tokens, bmoe_counters *spent);

/* The same in one piece, with the logits after each of its tokens.
 *   tokens    n_tokens in [1, the smaller of BMOE_MAX_ROWS and n_ubatch]
 *   rows      float32 [n_tokens, n_vocab], unnormalised; rows_cap in floats
 *   returns   as bmoe_prefill(); BMOE_E_TOO_SMALL, which changes nothing
 *   bits      a row rounds as a piece with that many rows does, not as bmoe_logits() after bmoe_prefill() */
BMOE_API int32_t bmoe_prefill_rows(bmoe_engine *engine, const int32_t *tokens, size_t n_tokens, float *rows,
                                   size_t rows_cap, bmoe_counters *spent);

/* Change how much of the experts is kept in memory between graphs; what is over it is given back at once.
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_UNSUPPORTED (nothing streams) */
BMOE_API int32_t bmoe_set_cache(bmoe_engine *engine, int64_t n_bytes);

/* Tokens the state holds, 0..n_ctx, or BMOE_E_CLOSED, BMOE_E_BUSY. */
BMOE_API int32_t bmoe_position(bmoe_engine *engine);

/* Logits of the last prefilled token: float32 [n_vocab], unnormalised.
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_TOO_SMALL (*n_logits is set), BMOE_E_STATE (nothing was prefilled
 *             since the state was opened, loaded, cut or dropped) */
BMOE_API int32_t bmoe_logits(bmoe_engine *engine, float *logits, size_t logits_cap, size_t *n_logits);

/* The head, as the last graph computed it. For engines with a layer hook, after a prefill.
 *   head         its size_bytes must be sizeof(bmoe_head) of the caller
 *   norm_weight  float32 [n_embd], and norm_bias; 1 and 0 where the model has none
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_TOO_SMALL (head is set), BMOE_E_STATE (nothing was prefilled, or there is no
 *             layer hook), BMOE_E_UNSUPPORTED (it does more than bmoe_head can say), BMOE_E_READ */
BMOE_API int32_t bmoe_get_head(bmoe_engine *engine, bmoe_head *head, float *norm_weight, float *norm_bias,
                               size_t norm_cap);
/* Its rows for some tokens, dequantized from the file.
 *   rows      float32 [n_tokens, n_embd]; biases  float32 [n_tokens]
 *   rows_cap  in floats
 *   returns   as bmoe_get_head(); BMOE_E_ARGUMENT for a token outside [0, n_vocab) */
BMOE_API int32_t bmoe_head_rows(bmoe_engine *engine, const int32_t *tokens, size_t n_tokens, float *rows,
                                size_t rows_cap, float *biases);
/* What it makes of states, by the kernels that graphs use: of the last layer's state bmoe_logits() but for rounding.
 *   states    float32 [n_states, n_embd]
 *   logits    float32 [n_states, n_tokens]
 *   returns   as bmoe_head_rows() */
BMOE_API int32_t bmoe_head_logits(bmoe_engine *engine, const float *states, size_t n_states, const int32_t *tokens,
                                  size_t n_tokens, float *logits);

/* Fill *sampling with the defaults: greedy. NULL is allowed and does nothing. */
BMOE_API void bmoe_sampling_init(bmoe_sampling *sampling);
/* Begin a sequence of draws: what bmoe_sample() does from here on. Equal seeds give equal draws from equal logits.
 *   sampling  NULL: greedy
 *   returns   BMOE_OK, BMOE_E_ARGUMENT (nothing changed) */
BMOE_API int32_t bmoe_sampling_start(bmoe_engine *engine, const bmoe_sampling *sampling);
/* Draw a token from the logits of the last prefilled one; the state does not move. Greedy before any
 * bmoe_sampling_start().
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_STATE (no logits, as bmoe_logits()), BMOE_E_LOGITS */
BMOE_API int32_t bmoe_sample(bmoe_engine *engine, int32_t *token);

/* Cancel: the prefill that is running stops within one graph's compute; if none is running, the next one is
 * refused before it computes anything. Either returns BMOE_E_CANCELLED and uses the request up.
 * Returns BMOE_OK or BMOE_E_CLOSED. Any thread; also from a signal handler's thread, not from the handler. */
BMOE_API int32_t bmoe_cancel(bmoe_engine *engine);
/* Forget a cancel that nothing has noticed yet. Any thread. */
BMOE_API int32_t bmoe_cancel_clear(bmoe_engine *engine);

/* The whole sequence state as bytes: attention KV and recurrent state alike, not the logits.
 *   size      bytes that bmoe_state_save() needs at the current position
 *   save      *n_bytes is what was written. In a model with a sliding window the engine's own state is laid out anew by
 *             it, as it will be where it is restored: from there both go on bit for bit alike
 *   load      replaces the state. The bytes must be one saved by an engine of the same file, KV type and ABI
 *             version, and fit n_ctx; a restored state computes what the saved one would have, bit for bit
 *   returns   BMOE_OK, BMOE_E_ARGUMENT, BMOE_E_TOO_SMALL, BMOE_E_STATE (does not belong here, or is damaged: it carries
 *             a checksum, and all of it is checked before anything changes), BMOE_E_MEMORY (after a load the state is empty) */
BMOE_API int32_t bmoe_state_size(bmoe_engine *engine, size_t *n_bytes);
BMOE_API int32_t bmoe_state_save(bmoe_engine *engine, void *state, size_t state_cap, size_t *n_bytes);
BMOE_API int32_t bmoe_state_load(bmoe_engine *engine, const void *state, size_t n_bytes);

/* Cut the state to its first n_tokens positions.
 *   returns   BMOE_OK, BMOE_E_ARGUMENT (more than the position), BMOE_E_UNSUPPORTED (recurrent state and
 *             sliding windows, which cannot be cut exactly); nothing changed then */
BMOE_API int32_t bmoe_state_keep(bmoe_engine *engine, int32_t n_tokens);
/* Empty the state: position 0, nothing left of what was there. */
BMOE_API int32_t bmoe_state_drop(bmoe_engine *engine);

#ifndef BMOE_CDEF
#ifdef __cplusplus
}
#endif
#endif
#endif
