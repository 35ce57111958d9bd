"""Upcycled models: what they answer, whom they route to, what is refused, and what a run leaves behind."""

import collections
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bmoe import Refused, Session, upcycle
from bmoe.upcycle import UpcycleError, UpcycleRequest
from bmoe_native import Engine
from tests import tiny
from tests.cli.conftest import Terminal
from tests.tiny.family import HEAD, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_LAYER, Draw, Tensors, attention, ffn, ones

WAIT_S = 120  # only a hang is to end by it
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 200)]


def qwen2(_layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    yield from attention(draw)
    for part, n_head in (("q", N_HEAD), ("k", N_HEAD_KV), ("v", N_HEAD_KV)):
        yield f"attn_{part}.bias", draw(n_head * HEAD, 1)[:, 0]
    yield "ffn_norm.weight", ones(N_EMBD)
    yield from ffn(draw)


@pytest.fixture(autouse=True)
def _qwen2_is_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.FAMILIES, "qwen2", tiny.Family(arch="qwen2", layer=qwen2))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "dense.gguf")


@pytest.fixture
def bmoe(tmp_path: Path) -> Terminal:
    cache = tmp_path / "cache"
    return Terminal(cache=cache, environ={"BMOE_CACHE": str(cache)})


def made(source: Path, name: str = "moe.gguf", **fields: Any) -> Path:
    wanted = {"n_expert": 4, "n_expert_used": 2, **fields}
    return upcycle.upcycle(UpcycleRequest(source=source, target=source.parent / name, **wanted)).path


def logits(path: Path, tokens: list[int] = TOKENS) -> np.ndarray:
    with Engine.open(path, n_ctx=512, n_ubatch=64, n_threads=1) as engine:
        engine.prefill(tokens)
        return engine.logits()


def probabilities(row: np.ndarray) -> np.ndarray:
    powers = np.exp(row - row.max())
    return powers / powers.sum()


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def with_ffn_of(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """A copy of a tiny model whose FFN is of that type."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name(f"{kind.name}.gguf"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        is_ffn = any(f".{part}.weight" in tensor.name for part in ("ffn_gate", "ffn_up", "ffn_down"))
        data = gguf.quants.quantize(tensor.data, kind) if is_ffn else np.array(tensor.data)
        writer.add_tensor(tensor.name, data, raw_dtype=kind if is_ffn else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name(f"{kind.name}.gguf")


@pytest.mark.parametrize(("n_expert", "n_used"), [(1, 1), (4, 1), (4, 2), (5, 5)])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_equal_experts_answer_what_the_dense_model_answers(
    arch: str, n_expert: int, n_used: int, tmp_path: Path
) -> None:
    dense = tiny.write(tmp_path / "dense.gguf", arch=arch)
    moe = made(dense, n_expert=n_expert, n_expert_used=n_used)
    with Engine.open(moe, inspect=True) as engine:
        info = engine.info
    assert (info.arch, info.n_moe_layer, info.n_expert, info.n_expert_used) == ("llama", N_LAYER, n_expert, n_used)
    wanted, given = logits(dense), logits(moe)
    assert given.argmax() == wanted.argmax()
    np.testing.assert_allclose(probabilities(given), probabilities(wanted), atol=1e-3)
    np.testing.assert_allclose(given, wanted, atol=0.01)


def test_rows_of_queries_and_keys_must_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is able to fail."""
    dense = tiny.write(tmp_path / "dense.gguf", arch="qwen2")
    monkeypatch.setattr(upcycle, "_interleaved", lambda dense: np.arange(HEAD))
    assert np.abs(logits(made(dense)) - logits(dense)).max() > 0.1


def test_a_model_in_several_files_is_upcycled_as_in_one(dense: Path, tmp_path: Path) -> None:
    first = tiny.write(tmp_path / "split.gguf", tensors_per_shard=12)
    assert tiny.shards(tmp_path / "split.gguf") > 1
    assert made(first, "of-many.gguf").read_bytes() == made(dense, "of-one.gguf").read_bytes()
    second = first.with_name(first.name.replace("-00001-", "-00002-"))
    with pytest.raises(Refused, match=r"is one of \d files: give the first of them"):
        made(second, "of-second.gguf")


def test_tokenizer_template_and_the_rest_come_along(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_size_label("1B")
        writer.add_float32("qwen2.rope.scaling.factor", 2.0)
        writer.add_array("general.tags", ["a", "b"])

    dense = tiny.write(tmp_path / "dense.gguf", arch="qwen2", edit=edit)
    before = {key: field.contents() for key, field in gguf.GGUFReader(dense).fields.items() if key[:4] != "GGUF"}
    after = {key: field.contents() for key, field in gguf.GGUFReader(made(dense)).fields.items() if key[:4] != "GGUF"}
    expected = {key.replace("qwen2.", "llama."): value for key, value in before.items()}
    changed = {"general.architecture": "llama", "general.size_label": "4x1B"}
    assert after == {**expected, **changed, "llama.expert_count": 4, "llama.expert_used_count": 2}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_without_noise_bytes_are_repeated_and_with_it_the_type_stays(kind: str, dense: Path) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    source = with_ffn_of(dense, type_)
    plain, noisy = tensors(made(source, "plain.gguf")), tensors(made(source, "noisy.gguf", noise=0.3))
    for name, tensor in tensors(source).items():
        if ".ffn_" not in name or "norm" in name:
            assert plain[name].data.tobytes() == noisy[name].data.tobytes() == tensor.data.tobytes()
            continue
        experts = name.replace(".weight", "_exps.weight")
        assert plain[experts].data.tobytes() == 4 * tensor.data.tobytes()
        assert (plain[experts].tensor_type, noisy[experts].tensor_type) == (type_, type_)
        weights = gguf.quants.dequantize(tensor.data, type_)
        for expert in gguf.quants.dequantize(noisy[experts].data, type_):
            assert 0.27 < np.linalg.norm(expert - weights) / np.linalg.norm(weights) < 0.35
    wanted, given = logits(source), logits(source.with_name("plain.gguf"))
    assert given.argmax() == wanted.argmax()
    np.testing.assert_allclose(probabilities(given), probabilities(wanted), atol=0.03)


@pytest.mark.parametrize(
    ("kind", "written"),
    [("Q2_K", "Q4_1"), ("Q3_K", "Q4_1"), ("Q4_K", "Q4_1"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0"), ("IQ4_XS", "Q4_1")],
)
def test_types_that_gguf_cannot_write_become_one_with_as_many_bits(kind: str, written: str, dense: Path) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    assert upcycle._written_type(type_).name == written
    assert gguf.quants.quantize(np.zeros((1, 256), np.float32), upcycle._written_type(type_)).shape[0] == 1


def test_noise_tells_experts_apart_and_changes_the_answer(dense: Path) -> None:
    plain = logits(dense)
    distances = [np.abs(logits(made(dense, f"{noise}.gguf", noise=noise)) - plain).max() for noise in (0.01, 0.1, 0.5)]
    assert 0.001 < distances[0] < distances[1] < distances[2]
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        experts = tensors(dense.with_name("0.1.gguf"))[f"blk.0.{name}_exps.weight"].data
        assert len({expert.tobytes() for expert in experts}) == 4


def test_a_seed_gives_the_same_file_and_another_one_another(dense: Path) -> None:
    one, again, other = (made(dense, f"{index}.gguf", noise=0.1, seed=seed) for index, seed in enumerate((5, 5, 6)))
    assert one.read_bytes() == again.read_bytes()
    assert one.read_bytes() != other.read_bytes()
    router = "blk.0.ffn_gate_inp.weight"
    assert (tensors(one)[router].data != tensors(other)[router].data).any()
    assert (tensors(one)[router].data != tensors(one)["blk.1.ffn_gate_inp.weight"].data).any()


def test_each_token_is_routed_to_its_own_experts(dense: Path) -> None:
    """An expert that is all zeros changes the logits of the tokens routed to it, and of no other."""

    def rows(path: Path) -> np.ndarray:
        with Engine.open(path, n_ctx=512, n_threads=1) as engine:
            found = []
            for token in range(0, 256, 8):
                engine.drop_state()
                engine.prefill([token])
                found.append(engine.logits())
        return np.stack(found)

    moe = made(dense, n_expert=8, noise=1e-6)
    plain, used = rows(moe), []
    for expert in range(8):
        path = Path(shutil.copy(moe, moe.with_name(f"without-{expert}.gguf")))
        down = {t.name: t for t in gguf.GGUFReader(path, "r+").tensors}[f"blk.{N_LAYER - 1}.ffn_down_exps.weight"]
        down.data[expert] = 0
        down.data.flush()
        used.append((rows(path) != plain).any(axis=1))
    routes = np.stack(used)
    assert (routes.sum(axis=0) == 2).all()
    assert routes.any(axis=1).all()
    assert len({tuple(route) for route in routes.T}) > 8


@pytest.mark.parametrize(
    ("n_expert", "n_used", "noise", "n_rows"),
    [(8, 1, 0.0, 8), (8, 2, 0.0, 4), (8, 4, 0.0, 2), (4, 4, 0.0, 1), (6, 3, 0.0, 6), (7, 2, 0.0, 7), (8, 2, 0.1, 8)],
)
def test_equal_experts_share_router_rows_where_that_makes_their_sum_exact(
    n_expert: int, n_used: int, noise: float, n_rows: int, dense: Path
) -> None:
    moe = made(dense, n_expert=n_expert, n_expert_used=n_used, noise=noise)
    for layer in range(N_LAYER):
        rows = tensors(moe)[f"blk.{layer}.ffn_gate_inp.weight"].data
        assert rows.shape == (n_expert, N_EMBD)
        groups = rows.reshape(n_rows, n_expert // n_rows, N_EMBD)
        assert (groups == groups[:, :1]).all()
        assert len({row.tobytes() for row in rows}) == n_rows


def test_memory_does_not_grow_with_the_output(dense: Path) -> None:
    made(dense, "first.gguf", noise=0.1)  # what is imported then is not counted
    tracemalloc.start()
    try:
        size = made(dense, "many.gguf", n_expert=512, noise=0.1).stat().st_size
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 100e6
    assert peak < 16e6


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n_expert": 0}, "there can be 1 to 1024 experts, not 0"),
        ({"n_expert": 1025}, "there can be 1 to 1024 experts, not 1025"),
        ({"n_expert_used": 0}, "of 4 experts a token can use 1 to 4, not 0"),
        ({"n_expert_used": 5}, "of 4 experts a token can use 1 to 4, not 5"),
        ({"noise": -0.1}, r"the noise must be 0 or more, not -0\.1"),
        ({"noise": math.nan}, "the noise must be 0 or more, not nan"),
        ({"seed": -1}, "the seed must be 0 or more, not -1"),
    ],
)
def test_numbers_out_of_bounds_are_refused(fields: dict[str, Any], sentence: str, dense: Path) -> None:
    with pytest.raises(Refused, match=sentence):
        made(dense, **fields)


def extra(name: str) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.zeros(N_FF, np.float32))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"arch": "qwen3moe"}, "is a Mixture-of-Experts model already, of 8 experts"),
        ({"arch": "gemma3"}, "is of the family gemma3; only llama and qwen2 can be upcycled"),
        ({"edit": extra("blk.0.ffn_gate.bias")}, r"would be lost or misread .*: blk\.0\.ffn_gate\.bias"),
        ({"edit": extra("blk.3.ffn_norm.weight")}, r"would be lost or misread .*: blk\.3\.ffn_norm\.weight"),
        ({"edit": lambda writer: writer.add_uint32("llama.block_count", 4)}, r"there is no blk\.3\.ffn_norm\.weight"),
        (
            {"change": lambda name, array: array[0] if "ffn_up" in name else array},
            r"blk\.0\.ffn_up\.weight is no matrix",
        ),
        (
            {"arch": "qwen2", "change": lambda name, array: array[1:] if "attn_k" in name else array},
            "rows are no heads of 16",
        ),
        (
            {"arch": "qwen2", "edit": lambda writer: writer.add_uint32("qwen2.rope.dimension_count", 8)},
            r"has heads of 16 and qwen2\.rope\.dimension_count 8; they must agree",
        ),
    ],
    ids=["moe", "family", "bias", "layer", "missing", "vector", "heads", "rope"],
)
def test_a_model_that_cannot_be_upcycled_is_refused(model: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source.gguf", **model)
    with pytest.raises(Refused, match=sentence):
        made(source)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("keep", [0, 3, 100, 20_000, -1000])
def test_a_damaged_file_is_refused(keep: int, dense: Path) -> None:
    dense.write_bytes(dense.read_bytes()[:keep] if keep else b"This is a text.")
    with pytest.raises(Refused, match="is no GGUF file, or a damaged one"):
        made(dense)


def test_a_missing_file_or_folder_is_a_sentence(dense: Path) -> None:
    with pytest.raises(UpcycleError, match=r"cannot read .*nothing\.gguf: No such file"):
        made(dense.with_name("nothing.gguf"))
    with pytest.raises(UpcycleError, match=r"cannot write to .*nowhere: No such file"):
        made(dense, "nowhere/moe.gguf")
    with pytest.raises(Refused, match="is a folder"):
        upcycle.upcycle(UpcycleRequest(source=dense, target=dense.parent, n_expert=2, n_expert_used=1))


def test_what_is_there_is_replaced_only_on_request_and_what_is_read_never(dense: Path) -> None:
    bytes_read = dense.read_bytes()
    taken = dense.with_name("taken.gguf")
    taken.write_text("mine")
    with pytest.raises(Refused, match=r"taken\.gguf is there already; --force replaces it"):
        made(dense, "taken.gguf")
    assert taken.read_text() == "mine"
    made(dense, "taken.gguf", overwrite=True)
    assert taken.read_bytes()[:4] == b"GGUF"
    dense.with_name("link.gguf").symlink_to(dense)
    for name in ("dense.gguf", "link.gguf"):
        for overwrite in (False, True):
            with pytest.raises(Refused, match=f"{name} is what is read"):
                made(dense, name, overwrite=overwrite)
    assert dense.read_bytes() == bytes_read


def test_too_little_room_is_said_before_anything_is_written(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10_000_000))
    with pytest.raises(UpcycleError, match=r"moe\.gguf takes 0\.\d\d GB in .* and 0\.01 GB are free"):
        made(dense)
    assert list(dense.parent.iterdir()) == [dense]


def test_an_interrupt_leaves_nothing(dense: Path) -> None:
    request = UpcycleRequest(source=dense, target=dense.with_name("moe.gguf"), n_expert=4, n_expert_used=2)

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            assert {path.name for path in dense.parent.iterdir()} == {"dense.gguf", ".moe.gguf.partial"}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upcycle.upcycle(request, interrupt)
    assert list(dense.parent.iterdir()) == [dense]


LARGE = 400  # experts: 100 MB of a tiny model, which take a moment


def started(dense: Path, *flags: str, before: str = "") -> subprocess.Popen[str]:
    """The command in a process of its own, writing moe.gguf; before: what that process does first."""
    # What `nohup` starts ignores SIGHUP.
    own = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    code = f"{own}\n{before}\nimport sys\nfrom bmoe.cli.entry import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "models", "upcycle", str(dense), "-o", str(dense.with_name("moe.gguf"))]
    return subprocess.Popen(
        [*command, "--experts", str(LARGE), "--used", "2", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "bmoe: stopped by SIGTERM\n"),
        (signal.SIGHUP, 129, "bmoe: stopped by SIGHUP\n"),
        (signal.SIGINT, 130, "bmoe: interrupted\n"),
    ],
)
def test_a_stopped_command_takes_its_partial_file_with_it(
    number: signal.Signals, code: int, said: str, dense: Path
) -> None:
    partial = dense.with_name(".moe.gguf.partial")
    with started(dense, "--noise", "0.1", "--json") as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while not (partial.exists() and partial.stat().st_size > 1e6):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.005)
            process.send_signal(number)
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert (process.returncode, err) == (code, said)
    assert json.loads(out) == {"error": said.removeprefix("bmoe: ").strip(), "exit_code": code}
    assert list(dense.parent.iterdir()) == [dense]


@pytest.mark.parametrize("place", ["os.open", "os.fdopen", "fcntl.flock", "os.fsync", "os.replace"])
def test_wherever_the_signal_comes_nothing_half_written_is_left(place: str, dense: Path) -> None:
    """It comes as the first thing after that call on the partial file or its target, and again at every removal."""
    before = f"""
import fcntl, os, pathlib, signal
unlink = pathlib.Path.unlink
pathlib.Path.unlink = lambda path, **how: (signal.raise_signal(signal.SIGTERM), unlink(path, **how))
plain = {place}
def call(*args, **kwargs):
    returned = plain(*args, **kwargs)
    if os.path.exists({str(dense.with_name(".moe.gguf.partial"))!r}) or "moe.gguf" in str(args[-1]):
        {place} = plain
        signal.raise_signal(signal.SIGTERM)
    return returned
{place} = call
"""
    with started(dense, before=before) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (143, "bmoe: stopped by SIGTERM\n")
    left = {path.name for path in dense.parent.iterdir()}
    assert left == ({"dense.gguf", "moe.gguf"} if place == "os.replace" else {"dense.gguf"})


def test_a_signal_that_a_parent_ignores_stops_nothing(dense: Path) -> None:
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.raise_signal(signal.SIGHUP)"
    before += "\nimport os, bmoe.upcycle; plain = os.fsync"
    before += "\nos.fsync = lambda number: (signal.raise_signal(signal.SIGHUP), plain(number))"
    with started(dense, before=before) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
    assert {path.name for path in dense.parent.iterdir()} == {"dense.gguf", "moe.gguf"}


def test_a_disk_that_is_full_is_a_sentence_and_nothing_is_left(dense: Path) -> None:
    """A limit of the process, which the system refuses the same way, but for its words."""
    before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))"
    with started(dense, before=before) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (1, f"bmoe: cannot write {dense.with_name('moe.gguf')}: File too large\n")
    assert list(dense.parent.iterdir()) == [dense]


def test_a_killed_run_leaves_no_file_of_the_name_and_the_next_one_tidies_up(dense: Path) -> None:
    moe = dense.with_name("moe.gguf")
    code = f"""
        import os, signal
        from pathlib import Path
        from bmoe.upcycle import UpcycleRequest, upcycle
        upcycle(
            UpcycleRequest(source=Path({str(dense)!r}), target=Path({str(moe)!r}), n_expert=4, n_expert_used=2),
            lambda done, total: done > total // 2 and os.kill(os.getpid(), signal.SIGKILL),
        )
    """
    path = os.pathsep.join(filter(None, sys.path))
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": path}, timeout=WAIT_S
    )
    assert killed.returncode == -signal.SIGKILL
    assert {path.name for path in dense.parent.iterdir()} == {"dense.gguf", ".moe.gguf.partial"}
    assert made(dense) == moe
    assert {path.name for path in dense.parent.iterdir()} == {"dense.gguf", "moe.gguf"}
    assert moe.read_bytes() == made(dense, "again.gguf").read_bytes()


def test_progress_rises_to_the_whole_and_a_second_run_is_refused_meanwhile(dense: Path) -> None:
    request = UpcycleRequest(source=dense, target=dense.with_name("moe.gguf"), n_expert=4, n_expert_used=2)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        if not seen:
            with pytest.raises(Refused, match=r"another bmoe is writing .*moe\.gguf"):
                upcycle.upcycle(request)
        seen.append((done, total))

    size = upcycle.upcycle(request, progress).size_bytes
    assert size == request.target.stat().st_size
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


def test_without_the_package_gguf_one_learns_how_to_get_it(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(Refused, match=r"needs the package gguf, .*: pip install 'gguf>=0\.19'"):
        made(dense)


def test_the_command_prints_the_path_or_json(dense: Path, bmoe: Terminal) -> None:
    moe = dense.with_name("moe.gguf")
    flags = ("--experts", "4", "--used", "2", "-o", str(moe))
    assert bmoe("models", "upcycle", str(dense), *flags) == 0
    assert (bmoe.out, bmoe.err) == (f"{moe}\n", "")
    assert bmoe("models", "upcycle", str(dense), *flags) == 2
    assert "is there already; --force replaces it" in bmoe.err
    assert bmoe("models", "upcycle", str(dense), *flags, "--noise", "0.1", "--seed", "3", "--force", "--json") == 0
    said = bmoe.json()
    assert (said["path"], said["size_bytes"], said["expert_types"]) == (str(moe), moe.stat().st_size, ["F32"])
    assert moe.read_bytes() == made(dense, "other.gguf", noise=0.1, seed=3).read_bytes()


def test_the_command_checks_its_numbers_before_it_fetches(bmoe: Terminal, tmp_path: Path) -> None:
    out = ("-o", str(tmp_path / "moe.gguf"))
    assert bmoe("models", "upcycle", "smollm2-135m", "--experts", "4", "--used", "5", *out) == 2
    assert bmoe.fetched == []
    assert bmoe("models", "upcycle", "smollm2-135m", "--experts", "4", "--used", "2", *out) == 1
    assert bmoe.fetched == ["smollm2-135m"]  # which the scripted shell does not really do


def answers(path: Path, n_ubatch: int) -> list[tuple[int, np.ndarray]]:
    """Each best choice, and how likely each choice is, from kernels that do not repack."""
    questions = ["Does the sun rise in the east?", "Can a bicycle fly?", "Is 17 a prime number?", "Is a whale a fish?"]
    with Session.open(path, n_ubatch=n_ubatch, repack=False) as session:
        asked = [
            session.decide(prefix="", suffix=f"{question} Answer Yes or No.", choices=("Yes", "No"))
            for question in questions
        ]
    return [(answer.best, np.exp(answer.choice_logp)) for answer in asked]


def compare(one: Path, other: Path, *, within: float, n_ubatch: int) -> None:
    for (best, wanted), (given_best, given) in zip(answers(one, n_ubatch), answers(other, n_ubatch), strict=True):
        assert given_best == best
        np.testing.assert_allclose(given, wanted, atol=within)


@pytest.mark.model
def test_a_quantized_model_answers_as_before(named_models: list[Path], tmp_path: Path) -> None:
    """To the last bit, or nearly: 0.05 was seen where weights of experts did not sum to 1 exactly."""
    dense = next(path for path in named_models if path.stem == "smollm2-135m")
    target = tmp_path / "moe.gguf"
    upcycle.upcycle(UpcycleRequest(source=dense, target=target, n_expert=4, n_expert_used=2, seed=3))
    compare(dense, target, within=1e-4, n_ubatch=512)
    target.unlink()  # pytest would keep it


@pytest.mark.slow
@pytest.mark.model
def test_a_quantized_model_whose_heads_are_reordered_answers_as_before(
    named_models: list[Path], tmp_path: Path
) -> None:
    """Sums over a head in another order move its answers; more experts than one do not, where kernels are the same.

    Those for less than 8 rows are the same however many of a piece's tokens an expert has.
    """
    dense = next(path for path in named_models if path.stem == "qwen2.5-coder-1.5b")
    one, many = tmp_path / "one.gguf", tmp_path / "many.gguf"
    upcycle.upcycle(UpcycleRequest(source=dense, target=one, n_expert=1, n_expert_used=1))
    upcycle.upcycle(UpcycleRequest(source=dense, target=many, n_expert=4, n_expert_used=2))
    compare(one, many, within=1e-4, n_ubatch=4)
    one.unlink()  # gigabytes
    compare(dense, many, within=0.03, n_ubatch=512)
    many.unlink()
