"""What the engine tells: plain values, nothing of C in them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

# bmoe_token_attr_bits of bmoe.h
TOKEN_CONTROL = 2
TOKEN_END = 32

DEFAULT_IO_THREADS = 4  # what io_threads 0 stands for
DEVICE_TYPES = ("cpu", "gpu", "igpu", "accel")  # bmoe_device_type of bmoe.h
RESIDENCY = ("absent", "ahead", "resident")  # bmoe_residency of bmoe.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Routed experts stay in the model's file, and those that a prompt routes to are read from it."""

    cache_bytes: int = -1  # of experts kept in memory between graphs; -1: from what is available
    io_threads: int = 0  # that read; 0: 4
    direct: bool = True  # past the page cache where the file allows it
    prefetch: str = "both"  # what is read before a layer's router has run: "router", what it says one layer early;
    # "previous", what was asked for; "both"; "off", nothing
    dense: str = "mmap"  # where the other weights lie: "mmap", in the page cache; "anon", in the process's memory


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
    is_streamed: bool = False
    reads_direct: bool = False  # past the page cache
    repack: bool = True  # weights in memory may be laid out anew for this CPU
    streamed_bytes: int = 0  # of experts_bytes
    cache_bytes: int = 0  # budget of experts kept in memory
    prefill_device: str = ""  # that computes wide pieces; "": none does
    prefill_device_why: str = ""  # why not the one that was asked for
    prefill_device_bytes: int = 0  # of its memory that weights take


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the library can compute on. Units: bytes."""

    name: str
    description: str
    free_bytes: int  # of its memory; 0 where it does not say
    total_bytes: int
    type: str  # of DEVICE_TYPES; a prefill device is a "gpu" or an "igpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the engine was opened."""

    n_prefill_tokens: int
    n_graphs: int
    prefill_s: float
    prefill_cpu_s: float
    n_major_faults: int
    read_bytes: int
    routed_bytes: int
    ahead_bytes: int
    wasted_bytes: int
    n_hits: int
    n_misses: int
    io_s: float
    stall_s: float
    mgmt_s: float
    resident_bytes: int
    dev_tokens: int
    dev_read_bytes: int
    dev_stall_s: float
    dev_routed: int
    dev_demand: int
    dev_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """One prefill. When cancelled, n_tokens is what had been computed by then."""

    cancelled: bool
    n_tokens: int
    prefill_s: float
    prefill_cpu_s: float
    n_major_faults: int
    read_bytes: int = 0  # of streamed experts, like what follows
    routed_bytes: int = 0
    ahead_bytes: int = 0
    wasted_bytes: int = 0
    n_hits: int = 0
    n_misses: int = 0
    io_s: float = 0.0
    stall_s: float = 0.0
    mgmt_s: float = 0.0
    dev_tokens: int = 0  # computed on the prefill device, like what follows
    dev_read_bytes: int = 0  # of streamed experts that went there
    dev_stall_s: float = 0.0  # in which computing waited for weights
    dev_routed: int = 0  # experts asked for, each layer's of each graph once
    dev_demand: int = 0  # of those, not foreseen
    dev_nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """What a layer's router chose for the tokens of one graph; in the last layer, for those whose logits are wanted."""

    layer: int
    n_expert: int  # of the layer
    experts: npt.NDArray[np.int32]  # [n_tokens, n_used]
    weights: Float32Array  # [n_tokens, n_used], by which the experts' outputs are multiplied
    residency: npt.NDArray[np.uint8] | None  # [n_tokens, n_used], of RESIDENCY by index; None where nothing streams
    expert_bytes: int  # of one expert of the layer in the file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """What makes logits of a state that a layer hands on; the formula is bmoe.h's."""

    norm: str  # "rms" or "layer"
    epsilon: float
    norm_weight: Float32Array  # [n_embd]
    norm_bias: Float32Array  # [n_embd]
    logit_scale: float
    softcap: float  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered prompt, and which of its bytes came from the messages' content."""

    text: bytes
    spans: tuple[tuple[int, int], ...]  # half-open byte ranges, rising

    def __str__(self) -> str:
        return self.text.decode("utf-8", "replace")
