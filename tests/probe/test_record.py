"""A record as a line and back, to the bit; and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe import Refused
from bmoe.probe import Record, read
from bmoe.probe.reader import parse
from bmoe.probe.record import KEYS, LINE_START, line
from tests.probe.made import random_record, record, routed
from tests.probe.test_observer import same

DOC = Path(__file__).parents[2] / "docs" / "probe.md"


def odd() -> Record:
    """Numbers of every kind: most digits, none at all, and none that are numbers."""
    lens = [[np.pi, -np.inf, np.nan], [1e-42, 1 / 3, -3.4e38], [2.0, 1.0, np.inf]]
    wsum = np.random.default_rng(1).integers(1, 2**30, (3, 4), np.uint32).view(np.float32)
    wsum[0] = 0
    wsum[1, 2:] = 0
    counts = routed([[], [2, 4], [1, 2, 3, 2]], n_used=2, expert_mib=1 / 3, wsum=wsum)
    logp = np.array([-1 / 3, -np.inf, -1e-17])
    return record(lens, routed=counts, logp=logp, best=2, choices=("é", '"\n', "x"), prefill_s=0.1 + 0.2)


@pytest.mark.parametrize("made", [odd(), record(), record([[1, 2]]), random_record(), random_record(n_expert=0)])
def test_a_line_reads_back_as_what_was_written(made: Record) -> None:
    data = line(made)
    assert data.startswith(LINE_START)
    assert data.isascii()
    assert data.count(b"\n") == 1
    found = parse(data)
    if made.lens is not None:  # JSON has neither infinity nor NaN
        lens = np.where(np.isfinite(made.lens), made.lens, np.nan)
        np.testing.assert_array_equal(found.lens, lens)
        object.__setattr__(made, "lens", found.lens)
    same(found, made)


def test_the_keys_are_those_of_the_page() -> None:
    assert tuple(json.loads(line(odd()))) == KEYS
    section = DOC.read_text(encoding="utf-8").split("\n## The file\n")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == KEYS


def test_rows_have_only_experts_that_there_are() -> None:
    fields = json.loads(line(odd()))
    assert [len(row) for row in fields["cnt"]] == [len(row) for row in fields["wsum"]] == [0, 2, 4]
    assert fields["nu"] == [0, 2, 2]
    assert fields["lens"][0][1:] == [None, None]
    assert fields["logp"][1] is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"v": 2}, "its version v is 2, and 1 is what can be read"),
        ({"v": True}, "its version v is True"),
        ({"v": None}, "its version v is None"),
        ({"seq": -1}, "seq is -1, and no whole number"),
        ({"seq": 1.0}, "seq is 1.0, and no whole number"),
        ({"n_prefilled": 11}, "n_prefilled is 11, and no whole number from 0 to 10"),
        ({"prefill_s": "0.5"}, "prefill_s is '0.5', and no number"),
        ({"prefill_s": True}, "prefill_s is True, and no number"),
        ({"choices": "AB"}, "choices must be a list of texts"),
        ({"best": 2}, "best is 2, and no whole number from 0 to 1"),
        ({"logp": [-1.0]}, "logp has a row of 1, where 2 belong"),
        ({"lens": [[1.0, 2.0, 3.0]]}, "lens has a row of 3, where 2 belong"),
        ({"lens": [[1.0, 1e39]]}, "lens is 1e+39, and no number of its range"),
        ({"lens": []}, "lens has no layers"),
        ({"lens": None}, "lens is a list and lens_why null, or"),
        ({"lens_why": "because"}, "lens is a list and lens_why null, or"),
        ({"lens": None, "lens_why": ""}, "lens is a list and lens_why null, or"),
        ({"lens": [[1.0, 2.0]]}, "lens has 1 layers and cnt 2"),
        ({"cnt": None}, "cnt is no list"),
        ({"cnt": [[1, 1]]}, "cnt has 1 layers and nu 2"),
        ({"cnt": [[1, 1], [1, -1]]}, "cnt is -1, and no whole number"),
        ({"cnt": [[1, 1], [1, 2]]}, "cnt of layer 1 sums to 3 over 2 experts, of which a token has 2"),
        ({"wsum": [[1.0, 1.0]]}, "cnt has 2 layers and wsum 1"),
        ({"wsum": [[1.0, 1.0], [1.0]]}, "wsum has a row of 1, where 2 belong"),
        ({"nu": [2, 0]}, "cnt of layer 1 sums to"),
        ({"nu": [2, 3]}, "cnt of layer 1 sums to"),
        ({"expert_mib": [1.0]}, "expert_mib has a row of 1, where 2 belong"),
        ({"more": 1}, "key 'more' is unknown"),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    good = line(record([[1, 2], [3, 4]], routed=routed([[1, 1], [2, 2]], n_used=2)))
    parse(good)
    path = tmp_path / "p.jsonl"
    path.write_bytes(good + json.dumps(json.loads(good) | changes).encode() + b"\n")
    with pytest.raises(Refused) as refused:
        list(read(path))
    assert str(refused.value).startswith(f"line 2 of {path} is no record of the probe: ")
    assert why in str(refused.value)


@pytest.mark.parametrize("key", KEYS[1:])
def test_a_missing_key_is_refused(key: str) -> None:
    fields = json.loads(line(record([[1, 2]])))
    del fields[key]
    with pytest.raises(Refused, match=f"key '{key}' is missing"):
        parse(json.dumps(fields).encode())


@pytest.mark.parametrize("data", [b"seq,id,kind\n", b"[1]\n", b'{"v":1,"seq":1}\n', b'{"v":1,"seq":NaN}\n', b"\xff\n"])
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    with pytest.raises(Refused, match=r"line 1 of .* is no record of the probe"):
        list(read(path))


def test_a_torn_last_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    whole = line(record([[1, 2]]))
    path.write_bytes(whole + whole[:40])
    assert len(list(read(path))) == 1
