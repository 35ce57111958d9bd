import dataclasses
import hashlib
import importlib.metadata

import pytest

from bmoe import models
from bmoe_native.errors import LibraryError
from tests.cli.conftest import Terminal
from tests.fakes import INFO, ScriptedEngine


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> models.NamedModel:
    """A catalogue of one model of four bytes."""
    model = dataclasses.replace(models.DEFAULT, size_bytes=4, sha256=hashlib.sha256(b"gguf").hexdigest())
    monkeypatch.setattr(models, "CATALOG", (model,))
    monkeypatch.setattr(models, "DEFAULT", model)
    return model


def test_info_shows_experts(bmoe: Terminal) -> None:
    assert bmoe("info", "x.gguf") == 0
    text = " ".join(bmoe.out.split())
    assert "128 in each of 47 layers, 8 used per token, 17.00 GB together" in text
    assert "qwen3moe, 48 layers" in text
    assert "Q4_K - Medium" in text
    assert "in 2 files" in text
    assert "reasoning can be switched off" in text


def test_info_of_a_dense_model_without_a_template_says_both(bmoe: Terminal) -> None:
    seen = dataclasses.replace(INFO, n_expert=0, experts_bytes=0, has_template=False, n_swa=512, adds_bos=True)
    bmoe.engine = ScriptedEngine(info=seen)
    assert bmoe("info", "x.gguf") == 0
    text = " ".join(bmoe.out.split())
    assert "none: a dense model" in text
    assert "none: use --no-template or --template FILE" in text
    assert "sliding window of 512 tokens" in text
    assert "begins with BOS" in text


@pytest.mark.parametrize("think_ctl", ["none", "switch", "closed", "free", "forced"])
def test_info_has_words_for_every_way_of_reasoning(bmoe: Terminal, think_ctl: str) -> None:
    bmoe.engine = ScriptedEngine(info=dataclasses.replace(INFO, think_ctl=think_ctl))
    assert bmoe("info", "x.gguf") == 0


def test_info_as_json_is_all_of_it(bmoe: Terminal) -> None:
    assert bmoe("info", "x.gguf", "--json") == 0
    assert bmoe.json() == {"path": "x.gguf", **dataclasses.asdict(INFO)}


def test_list_says_what_is_here(bmoe: Terminal, tiny: models.NamedModel) -> None:
    assert bmoe("models", "list", "--json") == 0
    assert bmoe.json()["models"][0]["fetched"] is False
    path = models.path_of(tiny, bmoe.cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"gguf")
    assert bmoe("models", "list") == 0
    assert tiny.name in bmoe.out
    assert " here " in bmoe.out


def test_the_whole_catalogue_is_listed(bmoe: Terminal) -> None:
    assert bmoe("models", "list") == 0
    assert all(name in bmoe.out for name in ("smollm2-135m", "qwen2.5-coder-1.5b", "gemma3-270m"))
    assert [line.split()[0] for line in bmoe.out.splitlines() if " GB  default " in line] == [models.DEFAULT.name]


def test_an_empty_name_is_2(bmoe: Terminal) -> None:
    assert bmoe("info", "") == 2
    assert "the model is an empty text" in bmoe.err


def test_versions_are_those_of_package_and_library(bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"9.8.7 of {package}")
    assert bmoe("--version") == 0
    assert bmoe.out == "bmoe 9.8.7 of bmoe\nlibrary: bmoe 1.2.3, llama.cpp abc\n"


def test_versions_say_where_nothing_is_installed_or_built(bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    def missing() -> str:
        raise LibraryError("bmoe is not built here")

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    bmoe.build_info = missing
    assert bmoe("--version") == 0
    assert bmoe.out == "bmoe (not installed)\nlibrary: none: bmoe is not built here\n"


def test_fetch_prints_the_path_and_talks_on_stderr(bmoe: Terminal, tiny: models.NamedModel) -> None:
    assert bmoe("models", "fetch", tiny.name) == 0
    assert bmoe.out == f"{models.path_of(tiny, bmoe.cache)}\n"
    assert bmoe.fetched == [tiny.name]
    assert bmoe.err.startswith("Fetching")
    assert bmoe.err.count("\n") == 1


def test_path_is_1_where_nothing_is(bmoe: Terminal, tiny: models.NamedModel) -> None:
    path = models.path_of(tiny, bmoe.cache)
    assert bmoe("models", "path") == 1
    assert bmoe.out == f"{path}\n"
    assert "not fetched yet" in bmoe.err
    path.parent.mkdir(parents=True)
    path.write_bytes(b"gguf")
    assert bmoe("models", "path", tiny.name, "--json") == 0
    assert bmoe.json()["path"] == str(path)


def test_verify_is_0_for_a_whole_file_and_names_both_hashes_for_another(
    bmoe: Terminal, tiny: models.NamedModel
) -> None:
    assert bmoe("models", "verify") == 1
    assert "bmoe models fetch" in bmoe.err
    path = models.path_of(tiny, bmoe.cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"gguf")
    assert bmoe("models", "verify", "--json") == 0
    assert bmoe.json()["sha256"] == tiny.sha256
    path.write_bytes(b"ffug")
    assert bmoe("models", "verify") == 1
    assert hashlib.sha256(b"ffug").hexdigest() in bmoe.err
    assert tiny.sha256 in bmoe.err


@pytest.mark.parametrize("command", ["fetch", "path", "verify"])
def test_an_unknown_name_is_2_and_lists_the_names(bmoe: Terminal, command: str) -> None:
    assert bmoe("models", command, "gpt-9") == 2
    assert "smollm2-135m" in bmoe.err
