"""Every C call with every kind of wrong argument: a status and a text, never a crash."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bmoe_native import Engine
from bmoe_native._lib import ffi, lib

N_VOCAB = 267


@pytest.fixture
def handle(tiny_path: Path) -> Iterator[Any]:
    out = ffi().new("bmoe_engine **")
    assert lib().bmoe_open(out, bytes(tiny_path), ffi().NULL, ffi().NULL, 0) == 0
    yield out[0]
    lib().bmoe_close(out[0])


def text_of(handle: Any) -> str:
    text: str = ffi().string(lib().bmoe_last_error(handle)).decode()
    return text


def calls() -> dict[str, Callable[[Any], int]]:
    """Each call on an engine with otherwise good arguments."""
    f, c = ffi(), lib()
    size, tokens, text = f.new("size_t *"), f.new("int32_t[]", 8), f.new("char[]", 64)
    message = f.new("bmoe_message[]", 1)
    role, content = f.new("char[]", b"user"), f.new("char[]", b"hi")
    message[0].role, message[0].content, message[0].content_bytes = role, content, 2
    spans, logits = f.new("bmoe_span[]", 4), f.new("float[]", N_VOCAB)
    info, counters = f.new("bmoe_info *"), f.new("bmoe_counters *")
    info.size_bytes, counters.size_bytes = f.sizeof("bmoe_info"), f.sizeof("bmoe_counters")
    state, head, norm = f.new("char[]", 64), f.new("bmoe_head *"), f.new("float[]", N_VOCAB)
    head.size_bytes = f.sizeof("bmoe_head")
    keep = (role, content)
    return {
        "info": lambda e: c.bmoe_get_info(e, info),
        "counters": lambda e: c.bmoe_get_counters(e, counters),
        "render": lambda e: c.bmoe_render(e, message, 1, 0, 1, text, 64, size, spans, 4, size) if keep else 0,
        "tokenize": lambda e: c.bmoe_tokenize(e, b"a", 1, f.NULL, 0, 0, tokens, 8, size),
        "detokenize": lambda e: c.bmoe_detokenize(e, tokens, 1, 0, text, 64, size),
        "token_attr": lambda e: c.bmoe_token_attr(e, 1),
        "prefill": lambda e: c.bmoe_prefill(e, tokens, 1, f.NULL),
        "prefill_rows": lambda e: c.bmoe_prefill_rows(e, tokens, 1, logits, N_VOCAB, f.NULL),
        "sampling_start": lambda e: c.bmoe_sampling_start(e, f.NULL),
        "sample": lambda e: c.bmoe_sample(e, tokens),
        "set_cache": lambda e: c.bmoe_set_cache(e, 1),
        "position": lambda e: c.bmoe_position(e),
        "logits": lambda e: c.bmoe_logits(e, logits, N_VOCAB, size),
        "head": lambda e: c.bmoe_get_head(e, head, logits, norm, N_VOCAB),
        "head_rows": lambda e: c.bmoe_head_rows(e, tokens, 1, logits, N_VOCAB, norm),
        "head_logits": lambda e: c.bmoe_head_logits(e, logits, 1, tokens, 1, norm),
        "cancel": lambda e: c.bmoe_cancel(e),
        "cancel_clear": lambda e: c.bmoe_cancel_clear(e),
        "state_size": lambda e: c.bmoe_state_size(e, size),
        "state_save": lambda e: c.bmoe_state_save(e, state, 64, size),
        "state_load": lambda e: c.bmoe_state_load(e, state, 64),
        "state_keep": lambda e: c.bmoe_state_keep(e, 0),
        "state_drop": lambda e: c.bmoe_state_drop(e),
    }


def test_every_function_of_the_header_that_takes_an_engine_is_in_the_table() -> None:
    names = {name for name in dir(lib()) if name.startswith("bmoe_")}
    others = {
        "bmoe_abi_version",
        "bmoe_build_info",
        "bmoe_open_params_init",
        "bmoe_sampling_init",
        "bmoe_device_count",
        "bmoe_get_device",
        "bmoe_open",
        "bmoe_close",
        "bmoe_last_error",
    }
    short = {name.removeprefix("bmoe_").removeprefix("get_") for name in names - others}
    assert short == set(calls())


def test_devices_that_are_not_there() -> None:
    f, c = ffi(), lib()
    device = f.new("bmoe_device *")
    assert c.bmoe_get_device(0, device) == c.BMOE_E_ARGUMENT
    assert "device->size_bytes is 0" in text_of(f.NULL)
    device.size_bytes = f.sizeof("bmoe_device")
    for index in (-1, c.bmoe_device_count()):
        assert c.bmoe_get_device(index, device) == c.BMOE_E_ARGUMENT
        assert f"device {index} is asked for" in text_of(f.NULL)
    assert c.bmoe_get_device(0, f.NULL) == c.BMOE_E_ARGUMENT
    assert c.bmoe_get_device(0, device) == 0


@pytest.mark.parametrize("name", sorted(calls()))
@pytest.mark.parametrize("which", ["NULL", "closed", "never opened"])
def test_a_handle_that_names_no_open_engine(tiny_path: Path, name: str, which: str) -> None:
    f, c = ffi(), lib()
    stale = f.NULL
    if which == "never opened":
        stale = f.cast("bmoe_engine *", 0xDEAD0)
    if which == "closed":
        out = f.new("bmoe_engine **")
        assert c.bmoe_open(out, bytes(tiny_path), f.NULL, f.NULL, 0) == 0
        stale = out[0]
        c.bmoe_close(stale)
    assert calls()[name](stale) == c.BMOE_E_CLOSED
    assert "NULL" in text_of(stale) if which == "NULL" else "not open" in text_of(stale)
    c.bmoe_close(stale)  # allowed, does nothing


def test_outputs_that_are_null(handle: Any) -> None:
    f, c = ffi(), lib()
    null, size, token = f.NULL, f.new("size_t *"), f.new("int32_t *")
    message = f.new("bmoe_message *")
    role = f.new("char[]", b"user")
    message.role = role
    wrong = {
        "info": c.bmoe_get_info(handle, f.NULL),
        "counters": c.bmoe_get_counters(handle, f.NULL),
        "n_bytes": c.bmoe_render(handle, message, 1, 0, 1, null, 0, null, null, 0, size),
        "n_spans": c.bmoe_render(handle, message, 1, 0, 1, null, 0, size, null, 0, f.NULL),
        "text": c.bmoe_tokenize(handle, null, 3, null, 0, 0, null, 0, size),
        "spans": c.bmoe_tokenize(handle, b"abc", 3, null, 1, 0, null, 0, size),
        "tokens": c.bmoe_tokenize(handle, b"abc", 3, null, 0, 0, null, 3, size),
        "n_tokens": c.bmoe_tokenize(handle, b"abc", 3, null, 0, 0, token, 1, f.NULL),
        "detokenize tokens": c.bmoe_detokenize(handle, null, 1, 0, null, 0, size),
        "prefill tokens": c.bmoe_prefill(handle, null, 1, f.NULL),
        "logits": c.bmoe_logits(handle, null, 5, size),
        "n_logits": c.bmoe_logits(handle, null, 0, f.NULL),
        "state_size": c.bmoe_state_size(handle, f.NULL),
        "head": c.bmoe_get_head(handle, f.NULL, null, null, 0),
        "rows": c.bmoe_head_rows(handle, token, 1, f.NULL, 9, null),
        "head tokens": c.bmoe_head_logits(handle, null, 1, null, 1, null),
        "state_save": c.bmoe_state_save(handle, null, 5, size),
        "state_load": c.bmoe_state_load(handle, null, 5),
        "messages": c.bmoe_render(handle, null, 1, 0, 1, null, 0, size, null, 0, size),
        "no messages": c.bmoe_render(handle, message, 0, 0, 1, null, 0, size, null, 0, size),
    }
    assert {name: status for name, status in wrong.items() if status != c.BMOE_E_ARGUMENT} == {}


def test_open_checks_its_arguments(tiny_path: Path) -> None:
    f, c = ffi(), lib()
    out, path = f.new("bmoe_engine **"), bytes(tiny_path)
    assert c.bmoe_open(f.NULL, path, f.NULL, f.NULL, 0) == c.BMOE_E_ARGUMENT
    assert c.bmoe_open(out, f.NULL, f.NULL, f.NULL, 0) == c.BMOE_E_ARGUMENT
    for field, value in [
        ("size_bytes", 3), ("n_ctx", -1), ("n_ctx", 2**31 - 1), ("n_ctx", 4097), ("n_ubatch", -1), ("n_ubatch", 65537),
        ("n_threads", -1), ("n_threads", 513), ("kv_type", 2), ("inspect", 2), ("log_level", 0), ("log_level", 5),
        ("chat_template_bytes", 5), ("stream", 2), ("prefetch", 4), ("prefetch", -1), ("dense", 2),
    ]:  # fmt: skip
        params, error = f.new("bmoe_open_params *"), f.new("char[]", 200)
        c.bmoe_open_params_init(params)
        setattr(params, field, value)
        assert c.bmoe_open(out, path, params, error, 200) == c.BMOE_E_ARGUMENT, field
        assert out[0] == f.NULL
        said = f.string(error).decode()
        assert (field in said or field == "n_ctx") and (str(value) in said or field == "chat_template_bytes"), said


def test_an_error_text_is_cut_to_its_buffer(tiny_path: Path) -> None:
    f, c = ffi(), lib()
    out, error = f.new("bmoe_engine **"), f.new("char[]", b"x" * 9)
    assert c.bmoe_open(out, b"/nowhere/at/all.gguf", f.NULL, error, 8) == c.BMOE_E_MODEL
    assert bytes(f.buffer(error)) == b"cannot \0x\0"


def test_buffers_that_are_too_small_are_not_written(handle: Any) -> None:
    f, c = ffi(), lib()
    size, tokens, text = f.new("size_t *"), f.new("int32_t[]", [-7] * 4), f.new("char[]", b"zz")
    assert c.bmoe_tokenize(handle, b"xyzabc", 6, f.NULL, 0, 0, tokens, 4, size) == c.BMOE_E_TOO_SMALL
    assert size[0] == 6 and list(tokens) == [-7] * 4
    good = f.new("int32_t[]", 6)
    assert c.bmoe_tokenize(handle, b"xyzabc", 6, f.NULL, 0, 0, good, 6, size) == 0
    assert c.bmoe_detokenize(handle, good, 6, 0, text, 2, size) == c.BMOE_E_TOO_SMALL
    assert size[0] == 6 and f.string(text) == b"zz"
    assert c.bmoe_prefill(handle, good, 6, f.NULL) == 0
    row = f.new("float[]", [-7.0] * 4)
    assert c.bmoe_logits(handle, row, 4, size) == c.BMOE_E_TOO_SMALL
    assert size[0] == N_VOCAB and list(row) == [-7.0] * 4
    state = f.new("char[]", b"zzzz")
    assert c.bmoe_state_save(handle, state, 4, size) == c.BMOE_E_TOO_SMALL
    assert size[0] > 4 and f.string(state) == b"zzzz"


@pytest.mark.parametrize("spans", [[(2, 1)], [(0, 9)], [(0, 3), (2, 4)], [(3, 4), (0, 1)]])
def test_spans_out_of_order_or_range(handle: Any, spans: list[tuple[int, int]]) -> None:
    f, c = ffi(), lib()
    tokens, size = f.new("int32_t[]", 16), f.new("size_t *")
    raw = f.new("bmoe_span[]", spans)
    assert c.bmoe_tokenize(handle, b"abcdefgh", 8, raw, len(spans), 0, tokens, 16, size) == c.BMOE_E_ARGUMENT
    assert "span" in text_of(handle)


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**31 - 1, -(2**31)])
def test_tokens_outside_the_vocabulary(handle: Any, token: int) -> None:
    f, c = ffi(), lib()
    raw, size, text = f.new("int32_t[]", [1, token]), f.new("size_t *"), f.new("char[]", 64)
    assert c.bmoe_prefill(handle, raw, 2, f.NULL) == c.BMOE_E_ARGUMENT
    assert str(token) in text_of(handle) and str(N_VOCAB) in text_of(handle)
    assert c.bmoe_detokenize(handle, raw, 2, 0, text, 64, size) == c.BMOE_E_ARGUMENT
    assert c.bmoe_token_attr(handle, token) == c.BMOE_E_ARGUMENT
    assert c.bmoe_position(handle) == 0


def test_roles_and_flags(handle: Any) -> None:
    f, c = ffi(), lib()
    size, message, role = f.new("size_t *"), f.new("bmoe_message *"), f.new("char[]", b"wizard")
    render = lambda reasoning: c.bmoe_render(handle, message, 1, reasoning, 1, f.NULL, 0, size, f.NULL, 0, size)  # noqa: E731
    assert render(0) == c.BMOE_E_ARGUMENT and "role" in text_of(handle)
    message.role = role
    assert render(0) == c.BMOE_E_ARGUMENT and "wizard" in text_of(handle)
    user = f.new("char[]", b"user")
    message.role = user
    assert render(2) == c.BMOE_E_ARGUMENT and "reasoning" in text_of(handle)


def test_the_text_belongs_to_the_handle_that_failed(tiny_path: Path) -> None:
    f, c = ffi(), lib()
    with Engine.open(tiny_path) as a, Engine.open(tiny_path) as b:
        assert c.bmoe_token_attr(a._handle, -1) == c.BMOE_E_ARGUMENT
        assert text_of(a._handle) != ""
        assert f.string(c.bmoe_last_error(b._handle)) == b""
