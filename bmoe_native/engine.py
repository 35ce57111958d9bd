"""The Engine: one model, one context, one template, behind libbmoe."""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_native import errors
from bmoe_native._lib import ERROR_TEXT_BYTES, check, ffi, lib, raise_status
from bmoe_native.hooks import Hooks
from bmoe_native.types import (
    DEVICE_TYPES,
    Counters,
    Device,
    Float32Array,
    Head,
    Info,
    PrefillResult,
    Prompt,
    Routing,
    Streaming,
)

KV_TYPES = ("f16", "f32")
THINK_CTLS = ("none", "switch", "closed", "free", "forced")
PREFETCH = ("both", "previous", "router", "off")
NORMS = ("", "rms", "layer")
DENSE = ("mmap", "anon")
LOG_WARN = 3


def _close(handle: Any, pid: int) -> None:
    if os.getpid() == pid:
        lib().bmoe_close(handle)


def _index(name: str, value: str, allowed: tuple[str, ...]) -> int:
    """The enum value of bmoe.h that a word stands for."""
    if value not in allowed:
        raise errors.ArgumentError(f"{name} is {value!r}, allowed are {', '.join(allowed)}")
    return allowed.index(value)


def _c_string(raw: bytes, what: str) -> bytes:
    """The same, for what reads it up to a zero byte."""
    if b"\0" in raw:
        raise errors.ArgumentError(f"{what} holds a zero byte")
    return raw


def _encoded(text: str | bytes, what: str) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise errors.ArgumentError(
            f"{what} is not valid Unicode: a lone surrogate {text[error.start]!r} at {error.start}"
        ) from error


def devices() -> list[Device]:
    """What this library can compute on, with the memory of each as it is now."""
    f, c = ffi(), lib()
    found = []
    for index in range(max(c.bmoe_device_count(), 1)):  # a CPU that lacks something counts as none, and [0] says so
        raw = f.new("bmoe_device *")
        raw.size_bytes = f.sizeof("bmoe_device")
        check(c.bmoe_get_device(index, raw), f.NULL)
        found.append(
            Device(
                name=f.string(raw.name).decode("utf-8", "replace"),
                description=f.string(raw.description).decode("utf-8", "replace"),
                free_bytes=raw.free_bytes,
                total_bytes=raw.total_bytes,
                type=DEVICE_TYPES[raw.type],
            )
        )
    return found


class Engine:
    """One open model. Use `Engine.open(...)`, in a `with` or with `close()`.

    One call at a time: a second thread's call raises BusyError. `cancel()` is for any thread. A forked child must open
    its own. Ctrl-C in the main thread stops a load or a prefill and leaves an open engine usable.
    """

    def __init__(self, handle: Any, hooks: Hooks) -> None:
        self._handle = handle
        self._hooks = hooks
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close, handle, self._pid)
        try:
            self.info = self._read_info()
        except BaseException:
            self._finalizer()
            raise

    @classmethod
    def open(
        cls,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
        *,
        n_ctx: int = 0,
        n_ubatch: int = 0,
        n_threads: int = 0,
        kv_type: str = "f16",
        chat_template: str | None = None,
        inspect: bool = False,
        streaming: Streaming | None = None,
        repack: bool = True,
        n_expert_used: int = 0,
        prefill_device: str = "",
        prefill_min_tokens: int = 0,
        prefill_loaders: int = 0,
        on_log: Callable[[int, str], None] | None = None,
        log_level: int = LOG_WARN,
        on_progress: Callable[[float], None] | None = None,
        on_routing: Callable[[Routing], None] | None = None,
        on_layer: Callable[[int, Float32Array], None] | None = None,
    ) -> "Engine":
        """Open a GGUF model; 0 stands for the default documented in bmoe.h.

        prefill_device names one of devices(), on which pieces of at least prefill_min_tokens are computed; one that
        cannot be used leaves them on the CPU, and info.prefill_device_why tells why.

        on_routing is told what each layer's router chose, once for each graph. on_layer is told what a layer hands on
        for the last token of a prefill: its number, and float32 [n_embd].

        Raises: ArgumentError, ModelError, EngineMemoryError, TemplateError, and what on_progress raises.
        """
        f, c = ffi(), lib()
        raw_path = _c_string(os.fsencode(path), "the model's path")
        hooks = Hooks(on_log, on_progress, on_routing, on_layer)
        params = f.new("bmoe_open_params *")
        c.bmoe_open_params_init(params)
        for name, value in {
            "n_ctx": n_ctx,
            "n_ubatch": n_ubatch,
            "n_threads": n_threads,
            "log_level": log_level,
            "n_expert_used": n_expert_used,
            "prefill_min_tokens": prefill_min_tokens,
            "prefill_loaders": prefill_loaders,
        }.items():
            try:
                setattr(params, name, value)
            except (OverflowError, TypeError) as error:
                raise errors.ArgumentError(f"{name} is {value!r}: not a number of 32 bits") from error
        params.kv_type = _index("kv_type", kv_type, KV_TYPES)
        params.inspect = int(inspect)
        params.no_repack = int(not repack)
        if streaming is not None:
            params.stream, params.no_direct = 1, int(not streaming.direct)
            params.prefetch = _index("prefetch", streaming.prefetch, PREFETCH)
            params.dense = _index("dense", streaming.dense, DENSE)
            params.io_threads, params.cache_bytes = streaming.io_threads, streaming.cache_bytes
        template = f.NULL
        if chat_template is not None:
            encoded = _encoded(chat_template, "the chat template")
            template = f.new("char[]", encoded)
            params.chat_template, params.chat_template_bytes = template, len(encoded)
        device = f.new("char[]", _c_string(_encoded(prefill_device, "prefill_device"), "prefill_device"))
        params.prefill_device = device
        params.log, params.progress, params.poll = hooks.log, hooks.progress, hooks.poll
        params.router, params.layer = hooks.routing, hooks.layer
        handle, text = f.new("bmoe_engine **"), f.new("char[]", ERROR_TEXT_BYTES)
        status = c.bmoe_open(handle, raw_path, params, text, ERROR_TEXT_BYTES)
        if status < 0:
            hooks.reraise()
            raise_status(status, f.string(text).decode("utf-8", "replace"))
        return cls(handle[0], hooks)

    def close(self) -> None:
        """Free everything. A call running in another thread is cancelled and waited for. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("an Engine cannot be pickled: open one in the other process")

    @contextmanager
    def _in_use(self) -> Iterator[Any]:
        """The handle, or the reason why there is none."""
        if os.getpid() != self._pid:
            raise errors.ForkedError("the engine was opened before a fork: open one in this process")
        if not self._finalizer.alive:
            raise errors.ClosedError("the engine is closed")
        yield self._handle

    def _read_info(self) -> Info:
        f = ffi()
        raw = f.new("bmoe_info *")
        raw.size_bytes = f.sizeof("bmoe_info")
        with self._in_use() as handle:
            check(lib().bmoe_get_info(handle, raw), handle)
        values: dict[str, Any] = {}
        for name in Info.__dataclass_fields__:
            value = getattr(raw, name)
            values[name] = value if isinstance(value, int) else f.string(value).decode("utf-8", "replace")
        for name in ("is_recurrent", "is_hybrid", "has_template", "adds_bos", "is_streamed", "reads_direct", "repack"):
            values[name] = bool(values[name])
        values["kv_type"] = KV_TYPES[raw.kv_type]
        values["think_ctl"] = THINK_CTLS[raw.think_ctl]
        return Info(**values)

    @property
    def n_ctx(self) -> int:
        """Tokens the context has room for."""
        return self.info.n_ctx

    @property
    def position(self) -> int:
        """Tokens the state holds."""
        with self._in_use() as handle:
            return check(lib().bmoe_position(handle), handle)

    def counters(self) -> Counters:
        """Totals since the engine was opened."""
        f = ffi()
        raw = f.new("bmoe_counters *")
        raw.size_bytes = f.sizeof("bmoe_counters")
        with self._in_use() as handle:
            check(lib().bmoe_get_counters(handle, raw), handle)
        return Counters(**{name: getattr(raw, name) for name in Counters.__dataclass_fields__})

    def render(self, messages: Sequence[tuple[str, str]], *, reasoning: bool = False, generate: bool = True) -> Prompt:
        """(role, content) messages through the chat template; with generate up to where the answer begins.

        Raises: TemplateError with the template's own words, ArgumentError.
        """
        f = ffi()
        raw = f.new("bmoe_message[]", len(messages))
        alive = []
        text_cap = 4096
        for slot, (role, content) in zip(raw, messages, strict=True):
            encoded = _encoded(content, "a message")
            alive += [f.new("char[]", _c_string(_encoded(role, "a role"), "a role")), f.from_buffer("char[]", encoded)]
            slot.role, slot.content, slot.content_bytes = alive[-2], alive[-1], len(encoded)
            text_cap += 2 * len(encoded)
        spans_cap = 16 + 4 * len(messages)
        n_bytes, n_spans = f.new("size_t *"), f.new("size_t *")
        with self._in_use() as handle:
            while True:
                text, spans = f.new("char[]", text_cap), f.new("bmoe_span[]", spans_cap)
                status = lib().bmoe_render(
                    handle, raw, len(messages), reasoning, generate, text, text_cap, n_bytes, spans, spans_cap, n_spans
                )
                if status != lib().BMOE_E_TOO_SMALL:
                    break
                text_cap, spans_cap = max(text_cap, n_bytes[0]), max(spans_cap, n_spans[0])
            check(status, handle)
        ranges = tuple((spans[i].begin, spans[i].end) for i in range(n_spans[0]))
        return Prompt(text=bytes(f.buffer(text, n_bytes[0])), spans=ranges)

    def tokenize(self, text: str | bytes | Prompt, *, add_bos: bool = False) -> list[int]:
        """Text to tokens. What is not a Prompt is data from end to end: no control token comes from it."""
        if isinstance(text, Prompt):
            return self._tokenize(text.text, text.spans, add_bos)
        encoded = _encoded(text, "the text")
        return self._tokenize(encoded, ((0, len(encoded)),), add_bos)

    def _tokenize(self, text: bytes, spans: Sequence[tuple[int, int]], add_bos: bool) -> list[int]:
        f = ffi()
        raw_text, raw_spans = f.from_buffer("char[]", text), f.new("bmoe_span[]", list(spans))
        n_tokens = f.new("size_t *", len(text) + 8)
        with self._in_use() as handle:
            while True:
                cap = n_tokens[0]
                tokens = np.empty(cap, np.int32)
                status = lib().bmoe_tokenize(
                    handle, raw_text, len(text), raw_spans, len(spans), add_bos,
                    f.from_buffer("int32_t[]", tokens), cap, n_tokens,
                )  # fmt: skip
                if status != lib().BMOE_E_TOO_SMALL:
                    break
            check(status, handle)
        return [int(token) for token in tokens[: n_tokens[0]]]

    def chat_tokens(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of the rendered messages, reasoning off, to where the answer begins; BOS where the model wants it."""
        return self.tokenize(self.render(messages), add_bos=True)

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        """Tokens of a text that is data; with add_bos led by BOS where the model wants one."""
        return self.tokenize(text, add_bos=add_bos)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """The bytes of tokens, joined; control tokens as text with special, else left out."""
        f = ffi()
        raw = self._tokens(tokens)
        n_bytes = f.new("size_t *", 16 * len(tokens))
        with self._in_use() as handle:
            while True:
                cap = n_bytes[0]
                text = f.new("char[]", cap)
                status = lib().bmoe_detokenize(
                    handle, f.from_buffer("int32_t[]", raw), len(tokens), special, text, cap, n_bytes
                )
                if status != lib().BMOE_E_TOO_SMALL:
                    break
            check(status, handle)
        return bytes(f.buffer(text, n_bytes[0]))

    def token_text(self, token: int) -> str:
        """One token's text; bytes that form no character are replaced."""
        return self.detokenize([token], special=True).decode("utf-8", "replace")

    def token_attr(self, token: int) -> int:
        """The bmoe_token_attr_bits of a token."""
        with self._in_use() as handle:
            return check(lib().bmoe_token_attr(handle, int(self._tokens([token])[0])), handle)

    def _tokens(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        wide = np.asarray(tokens, dtype=np.int64)
        bound = np.iinfo(np.int32)
        if wide.size and (wide.min() < bound.min or wide.max() > bound.max):
            raise errors.ArgumentError(f"a token outside the vocabulary of {self.info.n_vocab}")
        return wide.astype(np.int32)

    def prefill(self, tokens: Sequence[int]) -> PrefillResult:
        """Compute tokens after the current position, in pieces one ubatch wide.

        Raises: ArgumentError, TooLongError, KeyboardInterrupt; EngineError when llama.cpp failed.
        """
        raw = self._tokens(tokens)

        def prefill(handle: Any, spent: Any) -> int:
            return int(lib().bmoe_prefill(handle, ffi().from_buffer("int32_t[]", raw), len(raw), spent))

        return self._prefilled(prefill)

    def prefill_rows(self, tokens: Sequence[int]) -> tuple[PrefillResult, Float32Array]:
        """Compute at most max_rows tokens in one piece, with the logits after each of them.

        Shapes: tokens [n] → rows float32 [n, n_vocab], meaningless when cancelled.
        Raises: as prefill().
        """
        raw = self._tokens(tokens)
        rows = np.empty((len(raw), self.info.n_vocab), np.float32)

        def prefill(handle: Any, spent: Any) -> int:
            f = ffi()
            tokens_in, rows_out = f.from_buffer("int32_t[]", raw), f.from_buffer("float[]", rows)
            return int(lib().bmoe_prefill_rows(handle, tokens_in, len(raw), rows_out, rows.size, spent))

        return self._prefilled(prefill), rows

    @property
    def max_rows(self) -> int:
        """Most tokens of one prefill_rows()."""
        return min(int(lib().BMOE_MAX_ROWS), self.info.n_ubatch)

    def _prefilled(self, call: Callable[[Any, Any], int]) -> PrefillResult:
        f, c = ffi(), lib()
        spent = f.new("bmoe_counters *")
        spent.size_bytes = f.sizeof("bmoe_counters")
        with self._in_use() as handle:
            status = call(handle, spent)
            self._hooks.reraise()
            cancelled = status == c.BMOE_E_CANCELLED
            if not cancelled:
                check(status, handle)
        return PrefillResult(
            cancelled=cancelled,
            n_tokens=spent.n_prefill_tokens,
            prefill_s=spent.prefill_s,
            prefill_cpu_s=spent.prefill_cpu_s,
            n_major_faults=spent.n_major_faults,
            read_bytes=spent.read_bytes,
            routed_bytes=spent.routed_bytes,
            ahead_bytes=spent.ahead_bytes,
            wasted_bytes=spent.wasted_bytes,
            n_hits=spent.n_hits,
            n_misses=spent.n_misses,
            io_s=spent.io_s,
            stall_s=spent.stall_s,
            mgmt_s=spent.mgmt_s,
            dev_tokens=spent.dev_tokens,
            dev_read_bytes=spent.dev_read_bytes,
            dev_stall_s=spent.dev_stall_s,
            dev_routed=spent.dev_routed,
            dev_demand=spent.dev_demand,
            dev_nodes=spent.dev_nodes,
        )

    def head(self) -> Head:
        """The head, of an engine opened with on_layer, after a prefill.

        Raises: StateError before one; UnsupportedError, where it cannot be said in these terms; ReadError.
        """
        f = ffi()
        raw = f.new("bmoe_head *")
        raw.size_bytes = f.sizeof("bmoe_head")
        weight, bias = np.empty((2, self.info.n_embd), np.float32)
        with self._in_use() as handle:
            status = lib().bmoe_get_head(
                handle, raw, f.from_buffer("float[]", weight), f.from_buffer("float[]", bias), weight.size
            )
            check(status, handle)
        return Head(
            norm=NORMS[raw.norm],
            epsilon=raw.epsilon,
            norm_weight=weight,
            norm_bias=bias,
            logit_scale=raw.logit_scale,
            softcap=raw.softcap,
        )

    def head_rows(self, tokens: Sequence[int]) -> tuple[Float32Array, Float32Array]:
        """The head's rows of tokens [n], dequantized: float32 [n, n_embd], and their biases [n].

        Raises: as head(); ArgumentError.
        """
        f = ffi()
        raw = self._tokens(tokens)
        rows, biases = np.empty((len(raw), self.info.n_embd), np.float32), np.empty(len(raw), np.float32)
        with self._in_use() as handle:
            status = lib().bmoe_head_rows(
                handle, f.from_buffer("int32_t[]", raw), len(raw),
                f.from_buffer("float[]", rows), rows.size, f.from_buffer("float[]", biases),
            )  # fmt: skip
            check(status, handle)
        return rows, biases

    def head_logits(self, states: Float32Array, tokens: Sequence[int]) -> Float32Array:
        """What the head makes of states that layers handed on, by the kernels that graphs use.

        Shapes: states [n_states, n_embd], tokens [n] → float32 [n_states, n].
        Raises: as head_rows().
        """
        f = ffi()
        given = np.ascontiguousarray(states, np.float32)
        if given.ndim != 2 or given.shape[1] != self.info.n_embd:
            raise errors.ArgumentError(f"states have the shape {given.shape}, wanted is [n, {self.info.n_embd}]")
        raw = self._tokens(tokens)
        logits = np.empty((len(given), len(raw)), np.float32)
        with self._in_use() as handle:
            status = lib().bmoe_head_logits(
                handle, f.from_buffer("float[]", given), len(given),
                f.from_buffer("int32_t[]", raw), len(raw), f.from_buffer("float[]", logits),
            )  # fmt: skip
            check(status, handle)
        return logits

    def start_sampling(
        self, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
    ) -> None:
        """How sample() chooses from here on; equal seeds give equal draws from equal logits. The default is greedy.

        Raises: ArgumentError.
        """
        f = ffi()
        raw = f.new("bmoe_sampling *")
        raw.size_bytes = f.sizeof("bmoe_sampling")
        raw.temperature, raw.top_p, raw.min_p = temperature, top_p, min_p
        try:
            raw.top_k, raw.seed = top_k, seed
        except OverflowError as error:
            raise errors.ArgumentError(f"top_k {top_k} or seed {seed} is out of range") from error
        with self._in_use() as handle:
            check(lib().bmoe_sampling_start(handle, raw), handle)

    def sample(self) -> int:
        """A token drawn from the last logits; the state does not move. Raises: StateError, LogitsError."""
        token = ffi().new("int32_t *")
        with self._in_use() as handle:
            check(lib().bmoe_sample(handle, token), handle)
        return int(token[0])

    def set_cache(self, n_bytes: int) -> None:
        """Change how much of the experts is kept in memory. Raises: ArgumentError, UnsupportedError."""
        with self._in_use() as handle:
            check(lib().bmoe_set_cache(handle, n_bytes), handle)

    def logits(self) -> Float32Array:
        """Logits of the last prefilled token: float32 [n_vocab], unnormalised, a copy.

        Raises: StateError when nothing was prefilled since the state was opened, loaded, cut or dropped.
        """
        f = ffi()
        row = np.empty(self.info.n_vocab, np.float32)
        n_logits = f.new("size_t *")
        with self._in_use() as handle:
            check(lib().bmoe_logits(handle, f.from_buffer("float[]", row), len(row), n_logits), handle)
        return row

    def cancel(self) -> None:
        """Stop the prefill that is running, or refuse the next one. Any thread."""
        with self._in_use() as handle:
            check(lib().bmoe_cancel(handle), handle)

    def clear_cancel(self) -> None:
        """Forget a cancel that nothing has noticed yet."""
        with self._in_use() as handle:
            check(lib().bmoe_cancel_clear(handle), handle)

    def state_size(self) -> int:
        """Bytes that save_state() takes now."""
        n_bytes = ffi().new("size_t *")
        with self._in_use() as handle:
            check(lib().bmoe_state_size(handle, n_bytes), handle)
        size: int = n_bytes[0]
        return size

    def save_state(self) -> bytearray:
        """The whole sequence state at the current position, logits not included."""
        f = ffi()
        n_bytes = f.new("size_t *", self.state_size())
        status = lib().BMOE_E_TOO_SMALL
        with self._in_use() as handle:
            while status == lib().BMOE_E_TOO_SMALL:  # another thread's prefill came between
                state = bytearray(n_bytes[0])
                with f.from_buffer("char[]", state) as raw:
                    status = lib().bmoe_state_save(handle, raw, len(state), n_bytes)
            check(status, handle)
        del state[n_bytes[0] :]
        return state

    def load_state(self, state: bytes | bytearray) -> None:
        """Replace the state by a saved one. Raises: StateError when it does not belong here."""
        with self._in_use() as handle:
            check(lib().bmoe_state_load(handle, ffi().from_buffer("char[]", state), len(state)), handle)

    def keep_state(self, n_tokens: int) -> None:
        """Cut the state to its first n_tokens. Raises: UnsupportedError where the memory cannot be trimmed."""
        with self._in_use() as handle:
            check(lib().bmoe_state_keep(handle, n_tokens), handle)

    def drop_state(self) -> None:
        """Empty the state."""
        with self._in_use() as handle:
            check(lib().bmoe_state_drop(handle), handle)
