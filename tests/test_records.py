import dataclasses
import json
import math
from typing import Any

import pytest

from bmoe import Refused, Session
from bmoe.decide import DecideResult
from bmoe.records import Asked, asked, read_object, request_id, result_record
from tests.fakes import ScriptedEngine

RESULT = DecideResult(
    cancelled=False,
    choices=("A", "B"),
    best=0,
    choice_logp=(-0.25, -math.inf),
    outside_mass=0.2,
    outside_text="Ok",
    outside_text_mass=0.1,
    n_tokens=12,
    n_reused=5,
    n_prefilled=7,
    policy_s=0.001,
    restore_s=0.002,
    store_s=0.003,
    prefill_s=0.5,
    prefill_cpu_s=1.0,
    prefix_state_mib=0.75,
)


def read(line: bytes | str, **more: Any) -> Asked:
    raw = line if isinstance(line, bytes) else line.encode()
    return asked(read_object(raw), Session(ScriptedEngine()).lettered, **more)


def test_a_line_as_it_is() -> None:
    line = '{"prefix":"p","suffix":"s","choices":["A","B"],"reuse_prefix":false,"system":"be brief"}'
    request = read(line).request
    assert (request.prefix, request.suffix, request.choices) == ("p", "s", ("A", "B"))
    assert (request.reuse_prefix, request.system, request.template) == (False, "be brief", True)


def test_a_line_with_options() -> None:
    line = read('{"question":"Which?","options":["billing","sales"],"template":false}')
    assert line.request.choices == (" A", " B")
    assert line.options == ("billing", "sales")


def test_the_template_is_the_batchs_unless_the_line_says() -> None:
    assert not read('{"prefix":"p","choices":["A"]}', template=False).request.template
    assert read('{"prefix":"p","choices":["A"],"template":true}', template=False).request.template


def test_a_raw_line_cannot_have_the_batchs_system_message() -> None:
    raw = '{"prefix":"p","choices":["A"],"template":false'
    for line in (raw + "}", raw + ',"system":null}', '{"question":"q","options":["a"],"template":false}'):
        with pytest.raises(Refused, match="a raw prompt has no system message"):
            read(line, system="be brief")
        assert not read(line).request.template
    assert read('{"prefix":"p","choices":["A"],"system":"mine"}', system="be brief").request.system == "mine"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[]", "must be a JSON object"),
        ('"AB"', "must be a JSON object"),
        ('{"prefix":"p"}', "choices is missing"),
        ('{"choices":["A"]}', "prefix and suffix are both missing"),
        ('{"options":["A"]}', "question is missing"),
        ('{"question":"q"}', "options is missing"),
        ('{"prefix":"p","choices":"AB"}', "choices must be a list of texts, not a text"),
        ('{"prefix":"p","choices":[1,2]}', r"choices\[0\] must be text, not the number 1"),
        ('{"prefix":"p","choices":null}', "choices must be a list of texts, not null"),
        ('{"prefix":null,"choices":["A"]}', "prefix must be text, not null"),
        ('{"prefix":"p","choices":["A"],"reuse_prefix":1}', "reuse_prefix must be true or false, not the number 1"),
        ('{"prefix":"p","choices":["A"],"template":"no"}', "template must be true or false"),
        ('{"prefix":"p","choices":["A"],"choice":["B"]}', "unknown key 'choice'"),
        ('{"prefix":"p","question":"q","options":["A"]}', "either prefix, suffix and choices, or question"),
        ('{"prefix":"p","prefix":"q","choices":["A"]}', "a key is given twice"),
        ('{"prefix":"p","choices":[NaN]}', "NaN is no JSON number"),
        ('{"prefix":"p","choices":[-Infinity]}', "-Infinity is no JSON number"),
        ('{"prefix":1e400,"choices":["A"]}', "prefix must be text, not the number inf"),
        ('{"id":' + "9" * 5000 + ',"choices":["A"]}', "number of 5000 digits is too long to read: write it as a text"),
        ("[" * 200_000, "nested too deeply"),
        ('{"prefix":"\\ud83d","choices":["A"]}', r"prefix holds U\+D83D"),
        (b'{"prefix":"\xff\xfe","choices":["A"]}', "not UTF-8 at byte 11"),
    ],
)
def test_a_bad_line_is_refused_by_name(line: bytes | str, says: str) -> None:
    with pytest.raises(Refused, match=says):
        read(line)


@pytest.mark.parametrize("value", [7, "7", 0, -1, 9007199254740993, "é", None])
def test_an_id_comes_back_as_sent(value: object) -> None:
    back = request_id(read_object(json.dumps({"id": value}).encode()))
    assert json.dumps(back) == json.dumps(value)


@pytest.mark.parametrize("value", ["[1]", "true", "1.5", "1e400", '"\\ud83d"'])
def test_an_id_of_another_kind_is_refused(value: str) -> None:
    with pytest.raises(Refused, match="id "):
        request_id(read_object(f'{{"id":{value}}}'.encode()))


def test_a_result_is_json_without_infinities() -> None:
    record = result_record(RESULT, ["billing", "sales"])
    assert record["choice_logp"] == [-0.25, None]
    assert record["options"] == ["billing", "sales"]
    assert json.loads(json.dumps(record, allow_nan=False))["best"] == 0
    assert "options" not in result_record(RESULT)


def test_a_result_tells_what_was_read() -> None:
    plain = result_record(RESULT)
    assert [plain[key] for key in ("prefill_read_mib", "prefill_stall_s", "cache_hit_pct")] == [0.0, 0.0, 0.0]
    streamed = result_record(dataclasses.replace(RESULT, prefill_read_mib=8.0, cache_hit_pct=75.0))
    assert (streamed["prefill_read_mib"], streamed["cache_hit_pct"]) == (8.0, 75.0)
    assert {field.name for field in dataclasses.fields(RESULT)} - {"cancelled"} == set(streamed)
