"""The file: whole lines in one write each, and what becomes of one that holds something else."""

import os
from pathlib import Path

import pytest

from bmoe import Refused
from bmoe.probe import ProbeFile, read
from bmoe.probe.record import LINE_START, line
from tests.probe.made import random_record, record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p.jsonl"


def test_a_line_is_written_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data) or write(file, data))
    long = random_record(n_layer=94, n_expert=128)
    with ProbeFile(path) as file:
        file.write(long)
        file.write(record())
    assert written == [line(long), line(record())]
    assert len(written[0]) > 2**16


@pytest.mark.parametrize("n_torn", [1, 2**16, 2**16 + 7])
def test_it_goes_on_after_whole_lines(path: Path, n_torn: int) -> None:
    for seq in (1, 2):
        with ProbeFile(path) as file:
            file.write(random_record(seq=seq, n_layer=94, n_expert=128))
        with path.open("ab") as torn:
            torn.write(LINE_START.ljust(n_torn, b"1")[:n_torn])
    ProbeFile(path).close()
    assert [found.seq for found in read(path)] == [1, 2]
    assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("start", [b"", LINE_START[:4], LINE_START + b"12345"])
def test_a_first_line_that_was_cut_off_is_begun_anew(path: Path, start: bytes) -> None:
    path.write_bytes(start)
    with ProbeFile(path) as file:
        file.write(record(seq=7))
    assert [found.seq for found in read(path)] == [7]


@pytest.mark.parametrize("data", [b"seq,id,kind\n", b'{"v":2,"seq":1}\n', b"\n", b"{}"])
def test_another_files_content_is_refused_and_kept(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(Refused, match=r"^--decide-probe: .* holds something else: give another file"):
        ProbeFile(path)
    assert path.read_bytes() == data


def test_what_else_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"--record: cannot write .*: No such file"):
        ProbeFile(tmp_path / "no" / "such", flag="--record")
    with ProbeFile(path), pytest.raises(Refused, match="--decide-probe: another process is writing"):
        ProbeFile(path)
    ProbeFile(path).close()


def test_a_write_that_is_cut_short_ends_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    write = os.write
    with ProbeFile(path, note=notes.append) as file:
        file.write(record(seq=1))
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
            file.write(record(seq=2))
        file.write(record(seq=3))
    assert notes == [f"--decide-probe: {path} ends here: only a part of a line was written"]
    assert [found.seq for found in read(path)] == [1]
    with ProbeFile(path) as file:
        file.write(record(seq=4))
    assert [found.seq for found in read(path)] == [1, 4]
