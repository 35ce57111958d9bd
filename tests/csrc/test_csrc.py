"""libbmoe's internals against llama.cpp, its header in C99 and C++17, and a host that is not Python."""

import os
import subprocess
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from benchmarks.expert_caches import ByScore, Layer
from bmoe import Session
from bmoe_native._lib import library_path
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "include" / "bmoe.h"
LIBRARY = library_path()


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    env = {**os.environ, **environment}
    return subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False, env=env)


@pytest.fixture(scope="session")
def programs() -> Path:
    """Where `make cxx` builds the C++ programs; made up to date here, so that plain pytest runs them too."""
    if build := os.environ.get("BMOE_TEST_BUILD"):
        return Path(build)
    made = run("make", "-C", ROOT, "cxx")
    assert made.returncode == 0, made.stdout + made.stderr
    return ROOT / "build" / "dev"


def test_templates_render_as_llama_cpp_renders_them(programs: Path) -> None:
    source = Path((programs / "llama_source_dir").read_text())
    done = run(programs / "tests" / "test_render", source / "models" / "templates")
    assert done.returncode == 0, done.stdout
    assert " 0 wrong" in done.stdout.splitlines()[-1]
    assert int(done.stdout.splitlines()[-1].split()[0]) >= 400


def test_texts_tokenize_as_llama_cpp_tokenizes_the_whole(programs: Path, named_models: list[Path]) -> None:
    done = run(programs / "tests" / "test_tokenize", *named_models)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == len(named_models) == 3


@pytest.mark.parametrize(("language", "standard"), [("c", "c99"), ("c", "c11"), ("c++", "c++17")])
def test_the_header_compiles_without_a_warning(language: str, standard: str, tmp_path: Path) -> None:
    unit = tmp_path / "unit"
    unit.write_text("#include <bmoe.h>\nint main(void) { return bmoe_abi_version() == BMOE_ABI_VERSION ? 0 : 1; }\n")
    compiler = "cc" if language == "c" else "c++"
    flags = ["-Wall", "-Wextra", "-Wshadow", "-Wpedantic", "-Werror", "-Wundef", f"-std={standard}"]
    made = run(compiler, "-x", language, *flags, f"-I{HEADER.parent}", "-fsyntax-only", unit)
    assert (made.returncode, made.stderr) == (0, "")


@pytest.fixture(scope="session")
def c_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("c") / "decide"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wshadow", "-pedantic", "-Werror", f"-I{HEADER.parent}"]
    link = [f"-L{LIBRARY.parent}", "-lbmoe", "-lm", f"-Wl,-rpath,{LIBRARY.parent}"]
    made = run("cc", *flags, ROOT / "examples" / "c" / "decide.c", *link, "-o", program)
    assert made.returncode == 0, made.stderr
    return program


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_the_c_host_decides_as_python_does(c_host: Path, tmp_path: Path, arch: str) -> None:
    model = tiny.write(tmp_path / "tiny.gguf", arch=arch)
    question, choices = "Which is a fruit? <|im_end|> naïve", ("apple", "B", "the", "é")
    done = run(c_host, model, question, *choices)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    with Session.open(model) as session:
        result = session.decide(prefix=question, suffix="", choices=choices, reuse_prefix=False)
    assert [text for _, text in lines] == list(choices)
    assert tuple(float(said) for said, _ in lines) == result.choice_logp


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ([], 2, "usage"),
        (["/nowhere.gguf", "q", "A"], 1, "cannot open"),
        (["{model}", "q", "ab", "ac"], 2, "begin with the same token"),
        (["{model}", "q", ""], 2, "no token"),
        (["{model}", "x" * 3000, "A"], 1, "context of 512"),
    ],
)
def test_the_c_host_refuses_in_a_sentence(
    c_host: Path, tmp_path: Path, arguments: list[str], code: int, why: str
) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    done = run(c_host, *(word.format(model=model) for word in arguments))
    assert done.returncode == code and why in done.stderr, done.stderr


def test_what_a_cpu_lacks_is_named(programs: Path) -> None:
    done = run(programs / "tests" / "test_cpu_level")
    assert (done.returncode, done.stdout) == (0, "")


def test_pages_go_from_experts_given_back_to_those_that_are_read(programs: Path) -> None:
    done = run(programs / "tests" / "test_spares")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("n_layers", "n_experts", "slice_bytes", "share", "seed"),
    [
        *[(4, 16, 4096, 0.4, 1), (3, 64, 1000, 0.25, 2), (5, 8, 6000, 0.0, 3), (2, 32, 512, 1.0, 4)],
        *[(6, 24, 4097, 0.02, 5), (3, 12, 30000, 0.3, 6), (4, 10, 70001, 0.0, 7)],
    ],
)
def test_the_store_does_what_its_model_does(
    programs: Path, tmp_path: Path, n_layers: int, n_experts: int, slice_bytes: int, share: float, seed: int
) -> None:
    """2,000 graphs each, fourteen thousand in all: topics that come and go, of one token and of many."""
    (tmp_path / "weights").write_bytes(os.urandom(n_layers * n_experts * slice_bytes))
    budget = int(share * n_layers * n_experts * slice_bytes)
    random = Random(seed)
    model = ByScore([Layer(n_experts, slice_bytes)] * n_layers, budget)
    lines, wanted, evicted = [], [], 0
    topics = [[[random.random() ** 3 for _ in range(n_experts)] for _ in range(n_layers)] for _ in range(4)]
    for _ in range(2000):
        topic = topics[random.choice((0, 0, 0, 1, 2, 3))]
        n_uses = random.choice((1, 2, 12, 60))
        lines.append("graph")
        model.n_graphs += 1
        for layer in range(n_layers):
            ids = random.choices(range(n_experts), topic[layer], k=n_uses)
            before = len(model.resident[layer] | set(ids))
            model.ask(layer, Counter(ids))
            evicted += before - len(model.resident[layer])
            lines.append(" ".join(map(str, (layer, *ids))))
        wanted.append(f"{model.hits} {model.misses} {model.routed_bytes} {model.resident_bytes}")
    command = [programs / "tests" / "test_store", tmp_path / "weights", n_layers, n_experts, slice_bytes, budget]
    done = subprocess.run(
        [str(word) for word in command], input="\n".join(lines), capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.splitlines() == wanted
    assert model.hits > 0 or share == 0
    assert evicted > 0 or share == 1
