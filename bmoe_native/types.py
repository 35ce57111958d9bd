"""What the engine tells: plain values, nothing of C in them."""

from dataclasses import dataclass

# bmoe_token_attr_bits of bmoe.h
TOKEN_CONTROL = 2
TOKEN_END = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """What an engine sees of its model. Units: bytes and tokens."""

    arch: str
    name: str
    quantization: str
    n_params: int
    weights_bytes: int
    experts_bytes: int  # of weights_bytes, held by routed experts
    n_layer: int
    n_moe_layer: int
    n_expert: int  # per MoE layer; 0: dense
    n_expert_used: int  # per token
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_swa: int  # sliding-window width; 0: none
    n_shards: int
    n_ctx: int  # as opened, like the next two; 0 and "f16" when inspected
    n_ubatch: int
    kv_type: str  # "f16" or "f32"
    n_threads: int  # as opened, or what it would be
    is_recurrent: bool
    is_hybrid: bool
    has_template: bool
    adds_bos: bool
    think_ctl: str  # "none", "switch", "closed", "free" or "forced": see bmoe.h
    think_start: str  # before reasoning, in what the model writes or at the end of its prompt; "" where unknown
    think_end: str  # between reasoning and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the engine was opened."""

    n_prefill_tokens: int
    n_graphs: int
    prefill_s: float
    prefill_cpu_s: float
    n_major_faults: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """One prefill. When cancelled, n_tokens is what had been computed by then."""

    cancelled: bool
    n_tokens: int
    prefill_s: float
    prefill_cpu_s: float
    n_major_faults: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered prompt, and which of its bytes came from the messages' content."""

    text: bytes
    spans: tuple[tuple[int, int], ...]  # half-open byte ranges, rising

    def __str__(self) -> str:
        return self.text.decode("utf-8", "replace")
