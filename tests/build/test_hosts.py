"""Hosts that are not Python, against an installed prefix that was moved: they decide with Python's numbers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bmoe import Session
from tests import tiny
from tests.build.conftest import ROOT
from tests.build.hosts import (
    EXAMPLES,
    build_cpp_host,
    clean_environment,
    compiled_by_pkg_config,
    configured_by_cmake,
    run,
)

QUESTION = "Which is a fruit? <|im_end|> naïve"
CHOICES = ("apple", "B", "the", "é")
Lines = list[tuple[float, str]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make install` puts there, in another folder than it was told."""
    folder = tmp_path_factory.mktemp("install")
    run("make", "-C", ROOT, "install", f"PREFIX={folder / 'told'}")
    moved = folder / "moved to Grüße"
    (folder / "told").rename(moved)
    return moved


@pytest.fixture(scope="module")
def c_programs(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return configured_by_cmake("c", prefix, tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module", params=["llama", "qwen3moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny.gguf", arch=request.param)


def lines(text: str) -> Lines:
    split = [line.split(" ", 1) for line in text.splitlines()]
    return [(float(logp), choice) for logp, choice in split]


def in_python(model: Path, question: str = QUESTION) -> Lines:
    with Session.open(model) as session:
        result = session.decide(prefix=question, suffix="", choices=CHOICES, reuse_prefix=False)
    return list(zip(result.choice_logp, CHOICES, strict=True))


def test_a_prefix_holds_what_hosts_need(prefix: Path) -> None:
    names = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()}
    (library,) = {name for name in names if re.fullmatch(r"lib/libbmoe\.so\.\d+", name)}
    assert (prefix / "lib" / "libbmoe.so").readlink() == Path(Path(library).name)
    assert names >= {"include/bmoe.h", "lib/pkgconfig/bmoe.pc", "lib/cmake/bmoe/bmoeConfig.cmake"}
    assert "share/doc/bmoe/LICENSE.llama.cpp" in names
    told = str(prefix.parent / "told").encode()
    assert not [name for name in names if told in (prefix / name).read_bytes()]


def test_c_through_cmake(c_programs: Path, model: Path) -> None:
    assert lines(run(c_programs / "decide", model, QUESTION, *CHOICES)) == in_python(model)


def test_c_through_pkg_config(prefix: Path, tmp_path: Path, model: Path) -> None:
    without_blanks = shutil.copytree(prefix, tmp_path / "prefix", symlinks=True)
    program = compiled_by_pkg_config(EXAMPLES / "c" / "decide.c", without_blanks, tmp_path)
    assert lines(run(program, model, QUESTION, *CHOICES)) == in_python(model)


@pytest.mark.parametrize("how", ["CMake", "pkg-config"])
def test_cpp(prefix: Path, tmp_path: Path, model: Path, how: str) -> None:
    without_blanks = shutil.copytree(prefix, tmp_path / "prefix", symlinks=True)
    program = build_cpp_host(how, without_blanks, tmp_path)
    assert lines(run(program, model, QUESTION, *CHOICES)) == in_python(model)


@pytest.mark.parametrize("cache_mib", [0, 1])
def test_c_streamed_and_watched(c_programs: Path, tmp_path: Path, cache_mib: int) -> None:
    model = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe")
    command = [c_programs / "streamed", model, cache_mib, QUESTION, *CHOICES]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    assert lines(done.stdout) == in_python(model)
    with Session.open(model) as session:
        n_tokens = session.decide(prefix=QUESTION, suffix="", choices=CHOICES).n_tokens
    uses = [int(count) for count in re.findall(r"^layer \d: (\d+) expert uses", done.stderr, re.MULTILINE)]
    assert uses == [2 * n_tokens, 2 * n_tokens, 2]  # the last layer computes the last token alone
    read = re.search(r"^read (\d+\.\d+) MiB", done.stderr, re.MULTILINE)
    assert read and float(read[1]) > 0


def test_c_kept(c_programs: Path, model: Path) -> None:
    """The same pieces as Python's session: steps that continue the kept prefix, joined in other ways."""
    prefix, suffixes = "Task: turn on Wi-Fi. History: opened", ["Screen: home. Which?", " Settings. Which?", "."]
    done = subprocess.run(
        [c_programs / "kept", model, prefix, *suffixes, "--", *CHOICES], capture_output=True, text=True, check=True
    )
    with Session.open(model) as session:
        results = [session.decide(prefix=prefix, suffix=suffix, choices=CHOICES) for suffix in suffixes]
    expected = [pair for result in results for pair in zip(result.choice_logp, CHOICES, strict=True)]
    assert lines(done.stdout) == expected
    told = [(result.n_tokens, result.n_reused) for result in results]
    assert done.stderr.splitlines() == [f"{n} tokens, {reused} of them from the kept state" for n, reused in told]
    assert told[0][1] == 0 < told[1][1]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/node outside the checkout, with what its package.json asks for."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node or npm is not installed")
    folder = shutil.copytree(EXAMPLES / "node", tmp_path_factory.mktemp("node") / "host")
    command = ["npm", "install", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install koffi: {done.stderr[-500:]}")
    return folder


def test_node(prefix: Path, node: Path, model: Path) -> None:
    library = next((prefix / "lib").glob("libbmoe.so.*"))
    assert lines(run("node", node / "decide.mjs", library, model, QUESTION, *CHOICES)) == in_python(model)


@pytest.mark.parametrize(
    ("model", "choices", "code", "why"),
    [
        ("/nowhere.gguf", ["A"], 1, "cannot open the model /nowhere.gguf"),
        ("tiny", ["ab", "ac"], 2, "begin with the same token"),
        ("tiny", [""], 2, "no token"),
        ("tiny", [], 2, "usage"),
    ],
    indirect=[],
)
def test_node_refuses_in_a_sentence(
    prefix: Path, node: Path, tmp_path: Path, model: str, choices: list[str], code: int, why: str
) -> None:
    path = tiny.write(tmp_path / "tiny.gguf") if model == "tiny" else Path(model)
    library = next((prefix / "lib").glob("libbmoe.so.*"))
    command = ["node", str(node / "decide.mjs"), str(library), str(path), "Which?", *choices]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=clean_environment())
    assert done.returncode == code and why in done.stderr, done.stderr


def test_node_sees_the_layouts_that_the_compiler_sees(node: Path) -> None:
    program = (
        'import koffi from "koffi"; import { STRUCTS } from "./bmoe.mjs";'
        "for (const type of Object.values(STRUCTS)) { const { name, size, members } = koffi.introspect(type);"
        "console.log(`struct ${name}: ${size} bytes`);"
        "for (const [field, of] of Object.entries(members)) console.log(`struct ${name}.${field} at ${of.offset}`); }"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", program], cwd=node, capture_output=True, text=True, check=True
    )
    described = re.sub(r"( at \d+), .*", r"\1", (ROOT / "csrc" / "abi.txt").read_text()).splitlines()
    shown = done.stdout.splitlines()
    assert [line for line in described if re.match(r"struct bmoe_(open_params|message|span)\b", line)] == sorted(
        shown, key=described.index
    )
    assert len(shown) > 20
