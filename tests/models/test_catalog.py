from pathlib import Path

import pytest

from bmoe import Refused, models


@pytest.mark.parametrize("model", models.CATALOG, ids=lambda model: model.name)
def test_the_parts_of_a_model_are_its_size(model: models.NamedModel) -> None:
    sizes = [model.bytes_of_part(index) for index in range(model.n_parts)]
    assert sum(sizes) == model.size_bytes
    assert min(sizes) > 0
    assert len(set(model.packages())) == model.n_parts
    assert len(model.sha256) == 64


def test_names_are_found_and_others_listed() -> None:
    assert models.named("gemma3-270m").n_parts == 4
    with pytest.raises(Refused, match=r"no model named 'gpt'.*qwen2\.5-coder-1\.5b.*smollm2-135m"):
        models.named("gpt")


def test_a_word_is_a_name_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blob").write_bytes(b"")
    assert models.lookup(None) is models.DEFAULT
    assert models.lookup("smollm2-135m") is models.named("smollm2-135m")
    assert models.lookup("./smollm2-135m") == Path("smollm2-135m")
    assert models.lookup("missing.gguf") == Path("missing.gguf")
    assert models.lookup("blob") == Path("blob")
    assert models.lookup(Path("anything")) == Path("anything")
    with pytest.raises(Refused, match="no model named 'qwen'"):
        models.lookup("qwen")


def test_a_file_of_ones_own_needs_no_cache(tmp_path: Path) -> None:
    assert models.resolve("/nowhere/x.gguf", tmp_path / "cache") == Path("/nowhere/x.gguf")
    assert not (tmp_path / "cache").exists()
