"""The synthetic model: whole, reproducible, computed by llama.cpp, and routed as it says."""

import itertools
import re
import shutil
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

from benchmarks import cache_policies, make_moe
from benchmarks.expert_caches import Layer
from bmoe_native import Engine, Routing
from tests import tiny

LETTERS = "abcdefghijklmnopqrstuvwxyz"
N_LAYER, N_EXPERT = 2, 16
N_VOCAB = 256 + 3 + 26 + 26 * 26
SMALL = [
    *("--layers", "2", "--experts", "16", "--used", "2", "--embd", "256", "--ffn", "256", "--heads", "2"),
    *("--kv-heads", "1", "--topics", "4", "--prompt-count", "2", "--prompt-tokens", "40", "200"),
]


def add_words(writer: gguf.GGUFWriter) -> None:
    """A vocabulary in which every two letters with a space before them are one token."""
    tokens, types = tiny.vocabulary()
    joined = [f"Ġ {a}" for a in LETTERS] + [f"Ġ{a} {b}" for a in LETTERS for b in LETTERS]
    tokens = tokens[:256] + tokens[-3:] + [merge.replace(" ", "") for merge in joined]
    types = types[:256] + types[-3:] + [int(gguf.TokenType.NORMAL)] * len(joined)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(joined)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which only the vocabulary matters."""
    path = tmp_path_factory.mktemp("tokenizer") / "words.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**tiny.family.BASE, "block_count": 1, "context_length": 32}.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    add_words(writer)
    for name, shape in {"token_embd": (N_VOCAB, 64), "output_norm": (64,)}.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    for name, array in tiny.FAMILIES["llama"].layer(0, lambda *shape: np.zeros(shape, np.float32)):
        writer.add_tensor(f"blk.0.{name}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Made(NamedTuple):
    model: Path
    prompts: Path
    tokenizer: Path

    def prompt(self, length: int, topic: int, number: int) -> str:
        return (self.prompts / f"p{length}-{topic}-{number}.txt").read_text()


@pytest.fixture(scope="module")
def made(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    made = Made(folder / "moe.gguf", folder / "prompts", tokenizer)
    make_moe.main([str(made.model), *SMALL, "--tokenizer", str(tokenizer), "--prompts", str(made.prompts)])
    return made


@pytest.fixture(scope="module")
def engine(made: Made) -> Iterator[Engine]:
    with Engine.open(made.model, n_ctx=512, n_ubatch=64, n_threads=1) as engine:
        yield engine


Routes = list[Any]  # of each layer: int32 [token, used]; in the last layer of the last token only


def routed(model: Path, prompts: Sequence[Sequence[int]]) -> list[Routes]:
    """The experts that each prompt's tokens are routed to."""
    heard: list[Routing] = []
    found = []
    with Engine.open(model, n_ctx=512, n_threads=1, on_routing=heard.append) as engine:
        for prompt in prompts:
            heard.clear()
            engine.drop_state()
            engine.prefill(prompt)
            found.append([one.experts for one in heard])
    return found


@pytest.fixture(scope="module")
def routes(made: Made, engine: Engine) -> dict[tuple[int, int, int], Routes]:
    """By length, topic and number of each prompt."""
    names = list(itertools.product((40, 200), range(4), range(2)))
    return dict(zip(names, routed(made.model, [engine.tokenize(made.prompt(*name)) for name in names]), strict=True))


def test_the_engine_sees_the_shape_that_was_asked_for(made: Made, engine: Engine) -> None:
    info = engine.info
    assert (info.arch, info.n_layer, info.n_moe_layer) == ("qwen3moe", N_LAYER, N_LAYER)
    assert (info.n_expert, info.n_expert_used, info.n_embd, info.adds_bos) == (N_EXPERT, 2, 256, False)
    one = 256 * 256 * N_EXPERT // 256
    assert info.experts_bytes == one * (5 * 144 + 210)  # gate and up twice, and one down, in Q4_K; one down in Q6_K
    assert list(made.model.parent.glob("*.unfinished")) == []


def test_weights_have_the_size_they_were_to_have(made: Made) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made.model).tensors}

    def weights(name: str) -> Any:
        return gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    for layer, part in itertools.product(
        range(N_LAYER), ("gate", "up", "down")
    ):  # the gain 2 / sqrt(2 * 2 layers) is 1
        drawn = weights(f"blk.{layer}.ffn_{part}_exps.weight")
        assert abs(drawn.mean()) < 0.01 / 16
        assert drawn.std() == pytest.approx(1 / 16, rel=0.02)
    assert weights("token_embd.weight").std() == pytest.approx(1, rel=0.02)


def test_logits_are_finite_and_of_a_usual_size(made: Made, engine: Engine) -> None:
    for length, topic in itertools.product((40, 200), range(4)):
        engine.drop_state()
        engine.prefill(engine.tokenize(made.prompt(length, topic, 0)))
        logits = engine.logits()
        assert np.isfinite(logits).all()
        assert 0.5 < logits.std() < 2


def test_llama_takes_the_routes_that_it_tells(made: Made, tmp_path: Path) -> None:
    """In the last layer, an expert whose bytes are all zeros changes the logits of the tokens routed to it only."""
    tokens = range(300, N_VOCAB, 50)

    def rows(path: Path) -> Any:
        found = []
        with Engine.open(path, n_ctx=64, n_threads=1) as engine:
            for token in tokens:
                engine.drop_state()
                engine.prefill([token])
                found.append(engine.logits())
        return np.stack(found)

    whole, plain = made.model.read_bytes(), rows(made.model)
    name = f"blk.{N_LAYER - 1}.ffn_down_exps.weight"
    down = next(tensor for tensor in gguf.GGUFReader(made.model).tensors if tensor.name == name)
    size = int(down.n_bytes) // N_EXPERT
    used = []
    for expert in range(N_EXPERT):
        begin = int(down.data_offset) + expert * size
        path = tmp_path / f"{expert}.gguf"
        path.write_bytes(whole[:begin] + bytes(size) + whole[begin + size :])
        used.append((rows(path) != plain).any(axis=1))
    told = [{int(expert) for expert in route[-1][0]} for route in routed(made.model, [[token] for token in tokens])]
    assert [set(np.flatnonzero(token)) for token in np.stack(used).T] == told


def test_prompts_have_exactly_the_tokens_they_are_named_after(made: Made, engine: Engine) -> None:
    files = sorted(made.prompts.iterdir())
    assert len(files) == 2 * 4 * 2
    assert len({file.read_text() for file in files}) == len(files)
    for file in files:
        length = int(file.name[1:].partition("-")[0])
        tokens = engine.tokenize(file.read_text())
        assert len(tokens) == length
        assert engine.chat_tokens([("user", file.read_text())]) == tokens


def test_topics_share_no_words(made: Made) -> None:
    words = [
        {word for length in (40, 200) for number in range(2) for word in made.prompt(length, topic, number).split()}
        for topic in range(4)
    ]
    assert sum(map(len, words)) == len(set().union(*words))


def counts(routes: Routes) -> Any:
    """How many tokens each layer but the last gives to each expert."""
    return np.stack([np.bincount(ids.ravel(), minlength=N_EXPERT) for ids in routes[:-1]])


def busiest(routes: Routes) -> float:
    """The share of its tokens that a layer gives to the quarter of its experts that has most."""
    return float(np.sort(counts(routes))[:, -N_EXPERT // 4 :].sum() / counts(routes).sum())


def test_the_routing_is_skewed_and_topical(routes: dict[tuple[int, int, int], Routes]) -> None:
    assert np.mean([busiest(routes[200, topic, 0]) for topic in range(4)]) > 0.65
    alike: dict[bool, list[float]] = {True: [], False: []}
    reused: dict[bool, list[float]] = {True: [], False: []}
    for one, other in itertools.product(range(4), repeat=2):
        first, second = routes[200, one, 0], routes[200, other, 1]
        alike[one == other].append(np.corrcoef(counts(first)[0], counts(second)[0])[0, 1])
        sets = [
            [set(layer.ravel().tolist()) for layer in routes[40, topic, number][:-1]]
            for topic, number in ((one, 0), (other, 1))
        ]
        reused[one == other].append(cache_policies.reused([Layer(N_EXPERT, 1)] * (N_LAYER - 1), *sets))
    assert min(alike[True]) > 0.9
    assert np.mean(alike[False]) < 0.7
    assert np.mean(reused[True]) > 0.8
    assert np.mean(reused[True]) > float(np.mean(reused[False]))


def test_without_skew_experts_are_used_alike(tokenizer: Path, made: Made, engine: Engine, tmp_path: Path) -> None:
    make_moe.main([str(tmp_path / "flat.gguf"), *SMALL, "--skew", "0", "--tokenizer", str(tokenizer)])
    prompts = [engine.tokenize(made.prompt(200, topic, 0)) for topic in range(4)]
    assert np.mean([busiest(routes) for routes in routed(tmp_path / "flat.gguf", prompts)]) < 0.45


def test_a_seed_gives_the_same_bytes_and_another_other_ones(tokenizer: Path, made: Made, tmp_path: Path) -> None:
    def again(name: str, *more: str) -> tuple[bytes, list[str]]:
        folder = tmp_path / name
        make_moe.main(
            [str(tmp_path / f"{name}.gguf"), *SMALL, "--tokenizer", str(tokenizer), "--prompts", str(folder), *more]
        )
        texts = [file.read_text() for file in sorted(folder.iterdir())]
        return (tmp_path / f"{name}.gguf").read_bytes(), texts

    first = (made.model.read_bytes(), [file.read_text() for file in sorted(made.prompts.iterdir())])
    assert again("same") == first
    model, prompts = again("other", "--seed", "1")
    assert model != first[0]
    assert all(one != two for one, two in zip(prompts, first[1], strict=True))


def test_tensors_are_made_piece_by_piece(
    tokenizer: Path, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much is made at a time is seen neither in the memory held nor in the bytes written."""
    monkeypatch.setattr(make_moe, "CHUNK_BYTES", 1 << 16)
    tracemalloc.start()
    make_moe.main([str(tmp_path / "moe.gguf"), *SMALL, "--tokenizer", str(tokenizer)])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
    assert (tmp_path / "moe.gguf").read_bytes() == made.model.read_bytes()


def test_a_disk_without_room_is_left_as_it_was(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int = 10_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(SystemExit, match=r"has 0\.01 GB free, and the model needs 0\.0[2-9]"):
        make_moe.main([str(tmp_path / "moe.gguf"), *SMALL, "--tokenizer", str(tokenizer)])
    assert list(tmp_path.iterdir()) == []


def test_what_was_interrupted_leaves_no_file(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(make_moe, "router", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_moe.main([str(tmp_path / "moe.gguf"), *SMALL, "--tokenizer", str(tokenizer)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("x.gguf --embd 200", "multiples of 256"),
        ("x.gguf --used 129", "--used"),
        ("x.gguf --heads 3", "multiple of --kv-heads"),
        ("x.gguf --topical 1.5", "out of range"),
        ("", "neither a model nor --prompts"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_moe.main(arguments.split())
    assert said in capsys.readouterr().err


def test_the_figures_are_printed(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    cache_policies.main([str(made.model), str(made.prompts), "--cache-mb", "2.5"])  # of 3.9 in layers of two sizes
    out = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"tokens: ([\d.]+) %", out)]
    assert len(shares) == 2 and 0 < shares[0] < shares[1] <= 100
    assert out.count("read before by a prompt of") == 4
    assert out.count("managing the cache") == 2
    assert re.findall(r"\d+ tokens, .*", out) == [
        f"{length} tokens, {title}: {n_counted} decisions"
        for length in (40, 200)
        for title, n_counted in zip(cache_policies.SEQUENCES, (4, 7, 4, 4), strict=True)
    ]
    assert len(re.findall(r"^\| bmoe \|( [\d.]+ \|){5}$", out, re.MULTILINE)) == 8


def test_a_folder_without_prompts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cache_policies.main(["x.gguf", str(tmp_path)])
    assert "holds no prompts" in capsys.readouterr().err


@pytest.mark.model
def test_prompts_of_a_real_tokenizer_have_exactly_their_tokens(tmp_path: Path, named_models: list[Path]) -> None:
    small = next(path for path in named_models if path.name.startswith("smollm2"))
    lengths = ["--prompt-tokens", "70", "280", "1000", "--prompt-count", "1"]
    make_moe.main(["--tokenizer", str(small), "--prompts", str(tmp_path), *lengths])
    with Engine.open(small, inspect=True) as engine:
        found = [len(engine.tokenize(file.read_text())) for file in sorted(tmp_path.iterdir())]
    assert sorted(found) == [70] * 8 + [280] * 8 + [1000] * 8
