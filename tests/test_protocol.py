"""Lines in and lines out, against the contract and against hosts that err."""

import dataclasses
import json
import math
from typing import Any, ClassVar

import pytest

from bmoe import protocol
from bmoe.decide import DecideRequest, DecideResult
from bmoe.generate import GenerateRequest, Sampling
from bmoe.route_trace import COLUMNS as ROUTE_COLUMNS
from bmoe.trace import COLUMNS
from tests.fakes import INFO
from tests.protocol.fake import DOC, FakeSession, a_step, answers, check, table

DECIDE = {"cmd": "decide", "prefix": "p", "suffix": "s", "choices": ["A", "B"]}
GENERATE = {"cmd": "generate", "prompt": "p"}
TURN = FakeSession().generate(GenerateRequest(prompt="p"))
DECISION = FakeSession().decide(DecideRequest(prefix="p", suffix="s", choices=("A", "B")))


LINES = {
    "READY": protocol.ready(INFO, load_s=1.5, decide=True),
    "BEGIN": protocol.begin("1"),
    "DECIDE": protocol.decided("1", DECISION),
    "LOAD": protocol.load(mb=1.5, ms=2.0),
    "PROGRESS": protocol.progress(a_step(delta_text="é")),
    "DONE": protocol.done("1", TURN, load_s=1.5),
    "ERROR": protocol.error("1", "why", fatal=False),
}
ORIGINAL = {
    "READY": "load_s arch n_ctx think_ctl n_expert_used",
    "BEGIN": "id",
    "DECIDE": "id cancelled best choice_logp n_tokens n_reused n_prefilled restore_s store_s prefill_s "
    "prefill_cpu_s prefill_read_mib prefill_io_s prefill_stall_s prefill_mgmt_s prefill_dev_tokens "
    "prefill_dev_read_mib prefill_dev_stall_s prefill_dev_routed prefill_dev_demand prefix_state_mib",
    "LOAD": "mb ms",
    "PROGRESS": "step steps wall_ms io_ms compute_ms mgmt_ms stall_ms read_mb cache_hit_pct majflt cpu_ms "
    "delta_reasoning delta_text",
    "DONE": "id cancelled tokens tok_s prefill_s prefill_cpu_s prefill_read_mib prefill_io_s prefill_stall_s "
    "prefill_mgmt_s prefill_dev_tokens prefill_dev_read_mib prefill_dev_stall_s prefill_dev_routed "
    "prefill_dev_demand n_prompt n_past cache_hit_pct cache_resident_mib cache_budget_mib read_mib stall_s_tok "
    "io_s_tok compute_s_tok mgmt_s_tok cpu_s_tok majflt_tok load_s reasoning text",
    "ERROR": "id fatal msg",
}


def parse(line: bytes | str | dict[str, Any]) -> protocol.Command:
    text = json.dumps(line) if isinstance(line, dict) else line
    return protocol.parse(text.encode() if isinstance(text, str) else text).command


def refusal(line: bytes | str | dict[str, Any]) -> str:
    command = parse(line)
    assert isinstance(command, protocol.Bad), command
    return command.message


def request(line: dict[str, Any]) -> Any:
    command = parse(line)
    assert isinstance(command, (protocol.Decide, protocol.Generate)), command
    return command.request


class TestContract:
    """docs/telemetry.md is the contract: every line has the keys of its table, in order, of their types."""

    @pytest.mark.parametrize("tag", LINES)
    def test_keys_and_types(self, tag: str) -> None:
        ((found, record),) = answers(LINES[tag])
        assert found == tag
        check(tag, record)

    @pytest.mark.parametrize("tag", ORIGINAL)
    def test_keys_of_the_original_come_first(self, tag: str) -> None:
        ((_, record),) = answers(LINES[tag])
        wanted = ORIGINAL[tag].split()
        assert list(record)[: len(wanted)] == wanted

    @pytest.mark.parametrize("name", ["decide", "generate"])
    def test_keys_that_are_read(self, name: str) -> None:
        plain = {"decide": DECIDE, "generate": GENERATE}[name]
        for key in table(name):
            line = json.dumps({**plain, key: plain.get(key)}).encode()
            assert protocol.parse(line).ignored == ()
        assert protocol.parse(json.dumps({**plain, "other": 1}).encode()).ignored == ("other",)

    def test_defaults(self) -> None:
        documented = {name: cells[1].split(";")[0].strip("`") for name, cells in table("generate").items()}
        flat = {**dataclasses.asdict(request(GENERATE)), **dataclasses.asdict(Sampling())}
        for name in ("n_predict", "temperature", "top_k", "top_p", "min_p", "seed", "think", "clear_kv", "template"):
            assert json.loads(documented[name].split(":")[0].strip("`")) == flat[name], name

    def test_the_number_and_the_bounds(self) -> None:
        text = DOC.read_text(encoding="utf-8")
        assert f"**version {protocol.VERSION}**" in text
        assert f"{protocol.MAX_LINE_BYTES:,} bytes" in text
        assert f"{protocol.MAX_ID_CHARS:,} characters" in text

    def test_columns_of_the_traces(self) -> None:
        assert list(table("--csv FILE")) == list(COLUMNS)
        assert list(table("--route-trace FILE")) == list(ROUTE_COLUMNS)


class TestDecide:
    def test_all_fields(self) -> None:
        line = {**DECIDE, "reuse_prefix": False, "system": "sys", "template": True}
        assert request(line) == DecideRequest(
            prefix="p", suffix="s", choices=("A", "B"), reuse_prefix=False, system="sys"
        )

    @pytest.mark.parametrize("half", ["prefix", "suffix"])
    def test_one_half_is_enough(self, half: str) -> None:
        line = {key: value for key, value in DECIDE.items() if key != half}
        assert getattr(request(line), half) == ""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"reuse_prefix": 1}, "reuse_prefix must be true or false, not the number 1"),
            ({"reuse_prefix": None}, "reuse_prefix must be true or false, not null"),
            ({"choices": "AB"}, "choices must be a list of texts, not a text"),
            ({"choices": [1, 2]}, r"choices[0] must be text, not the number 1"),
            ({"choices": None}, "choices must be a list of texts, not null"),
            ({"choices": {"A": 1}}, "choices must be a list of texts"),
            ({"choices": ["A", ["B"]]}, "choices[1] must be text, not a list"),
            ({"prefix": 7.5}, "prefix must be text, not the number 7.5"),
            ({"prefix": "\ud800"}, "prefix holds U+D800"),
            ({"system": True}, "system must be text, not true"),
            ({"template": "no"}, "template must be true or false, not a text"),
        ],
    )
    def test_types_are_strict(self, change: dict[str, Any], message: str) -> None:
        assert refusal({**DECIDE, **change}).startswith(message)

    def test_what_is_missing(self) -> None:
        assert refusal({"cmd": "decide", "prefix": "p"}) == "choices is missing: it must be a list of texts"
        assert refusal({"cmd": "decide", "choices": ["A"]}).startswith("prefix and suffix are both missing")

    def test_zero_bytes_are_characters(self) -> None:
        asked = request({**DECIDE, "prefix": "before\0after", "choices": ["A\0", "B"]})
        assert (asked.prefix, asked.choices) == ("before\0after", ("A\0", "B"))


class TestGenerate:
    def test_all_fields(self) -> None:
        sampling = {"temperature": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 2**32 - 1}
        line = {**GENERATE, "n_predict": 5, "think": True, "system": "sys", "stop": ["\n"], **sampling}
        assert request(line) == GenerateRequest(
            prompt="p", n_predict=5, think=True, system="sys", stop=("\n",), sampling=Sampling(**sampling)
        )

    def test_numbers_are_plain_ones(self) -> None:
        asked = request({**GENERATE, "n_predict": 5, "temperature": 0.5, "seed": 3})
        assert [type(value) for value in (asked.n_predict, asked.sampling.temperature, asked.sampling.seed)] == [
            int,
            float,
            int,
        ]

    @pytest.mark.parametrize(
        ("field", "text", "message"),
        [
            ("n_predict", "true", "n_predict must be a whole number"),
            ("n_predict", "1.0", "n_predict must be a whole number"),
            ("n_predict", '"5"', "n_predict must be a whole number"),
            ("n_predict", "null", "n_predict must be a whole number"),
            ("n_predict", "-1", "n_predict is -1, allowed are 0 to 2147483647"),
            ("n_predict", "1e400", "n_predict must be a whole number"),
            ("n_predict", "9" * 5000, "n_predict is 99999999... (5000 digits), allowed are 0 to 2147483647"),
            ("seed", "-" + "9" * 5000, "seed is -9999999... (5000 digits)"),
            ("temperature", "1e400", "temperature is 1e400, allowed are 0 to 100"),
            ("temperature", "9" * 5000, "temperature is 99999999... (5000 digits)"),
            ("temperature", "true", "temperature must be a number"),
            ("temperature", "NaN", "the line is not JSON: NaN is no JSON number"),
            ("top_p", "-Infinity", "the line is not JSON: -Infinity is no JSON number"),
            ("stop", '"end"', "stop must be a list of texts, not a text"),
            ("think", "0", "think must be true or false, not the number 0"),
            ("clear_kv", '"no"', "clear_kv must be true or false, not a text"),
            ("prompt", "[1]", "prompt must be text, not a list"),
        ],
    )
    def test_types_are_strict(self, field: str, text: str, message: str) -> None:
        rest = "" if field == "prompt" else '"prompt":"p",'
        assert refusal(f'{{"cmd":"generate",{rest}"{field}":{text}}}').startswith(message)

    def test_a_prompt_is_needed(self) -> None:
        assert refusal({"cmd": "generate"}) == "prompt is missing: it must be text"


class TestId:
    @pytest.mark.parametrize(
        "text",
        [
            "7",
            '"7"',
            "0",
            "-1",
            "-0",
            "9007199254740993",
            "1.0",
            "1e2",
            "1.00000000000000000001",
            "null",
            "true",
            "false",
            r'"\u00e9"',
            r'"\ud800"',
            '""',
            "9" * 1000,
        ],
    )
    def test_it_comes_back_by_the_letter(self, text: str) -> None:
        command = parse(f'{{"cmd":"generate","prompt":"p","id":{text}}}')
        assert isinstance(command, protocol.Generate)
        assert protocol.begin(command.id) == f'BMOE_BEGIN {{"id":{text}}}\n'.encode()

    def test_letters_are_escaped(self) -> None:
        command = parse('{"cmd":"generate","prompt":"p","id":"é👍"}')
        assert isinstance(command, protocol.Generate)
        assert answers(protocol.begin(command.id)) == [("BEGIN", {"id": "é👍"})]

    def test_none_is_null(self) -> None:
        command = parse(GENERATE)
        assert isinstance(command, protocol.Generate)
        assert command.id == "null"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[1]", "id must be a text, a number, true, false or null, not a list"),
            ('{"a":1}', "id must be a text, a number, true, false or null, not an object"),
            ("1e400", "id is 1e400"),
            (f'"{"x" * 2000}"', "id has 2002 characters as JSON, 1024 are allowed"),
            ("9" * 5000, "id has 5000 characters as JSON, 1024 are allowed"),
        ],
    )
    def test_what_cannot_come_back_is_refused_by_name(self, text: str, message: str) -> None:
        assert refusal(f'{{"cmd":"generate","prompt":"p","id":{text}}}').startswith(message)

    def test_an_error_has_it_where_it_could_be_read(self) -> None:
        assert parse('{"cmd":"what","id":"x"}').id == '"x"'  # type: ignore[union-attr]
        assert parse('{"cmd":"decide","id":3}').id == "3"  # type: ignore[union-attr]
        assert parse('{"id":3').id == "null"  # type: ignore[union-attr]


class TestLine:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "the line is not JSON"),
            (b"\0", "the line is not JSON"),
            (b"[]", "the line must be a JSON object, not a list"),
            (b"7", "the line must be a JSON object, not the number 7"),
            (b"null", "the line must be a JSON object, not null"),
            (b'"cmd"', "the line must be a JSON object, not a text"),
            (b"9" * 5000, "the line must be a JSON object, not the number 99999999... (5000 digits)"),
            (b"{}", "cmd is missing: it is one of decide, generate, cancel, close"),
            (b'{"cmd":1}', "cmd must be text, not the number 1"),
            (b'{"cmd":["cancel"]}', "cmd must be text, not a list"),
            (b'{"cmd":"Decide"}', "cmd 'Decide' is unknown"),
            (b'{"cmd":"\xc3\xa9"}', r"cmd '\xe9' is unknown"),
            (b'{"cmd":"cancel","cmd":"close"}', "the key 'cmd' is given twice"),
            (b'{"cmd":"decide","prefix":"\xff\xfe"}', "the line is not UTF-8 at byte 26"),
            ('{"cmd":"decide","prefix":"👍'.encode()[:-1], "the line is not UTF-8 at byte 26"),
            (b"[" * 200_000, "the line is nested too deeply"),
            (b'{"a":' * 200_000, "the line is nested too deeply"),
        ],
    )
    def test_what_is_no_request(self, line: bytes, message: str) -> None:
        assert refusal(line).startswith(message)

    def test_messages_repeat_little_of_the_line(self) -> None:
        assert len(refusal({"cmd": "x" * 10_000})) < 200
        assert len(refusal('{"%s":1,"%s":1}' % (("k" * 10_000,) * 2))) < 200

    @pytest.mark.parametrize("extra", [{}, {"id": [1]}, {"id": 7, "why": None}])
    def test_cancel_and_close_read_nothing_else(self, extra: dict[str, Any]) -> None:
        assert parse({"cmd": "cancel", **extra}) == protocol.Cancel()
        assert parse({"cmd": "close", **extra}) == protocol.Close()

    def test_unknown_keys_are_told_apart(self) -> None:
        line = json.dumps({**DECIDE, "think": True, "x" * 100: 1}).encode()
        assert protocol.parse(line).ignored == ("think", "x" * 40 + "...")

    def test_what_waits_is_weighed(self) -> None:
        for line in ({**DECIDE, "prefix": "x" * 10_000}, {**GENERATE, "prompt": "x" * 10_000}):
            assert protocol.held_bytes(parse(line)) > 10_000
        assert protocol.held_bytes(parse({**DECIDE, "choices": ["é"] * 1000})) > 50_000


class TestNumbersOut:
    def test_no_mass_is_null(self) -> None:
        ((_, record),) = answers(protocol.decided("1", DECISION))
        assert record["choice_logp"] == [-0.25, None]

    def test_equal_bits_are_equal_text(self) -> None:
        logp = math.nextafter(-0.1, 0)
        result = dataclasses.replace(DECISION, choice_logp=(logp, -1.0))
        ((_, record),) = answers(protocol.decided("1", result))
        assert record["choice_logp"][0] == logp

    def test_a_turn_without_a_token_has_finite_rates(self) -> None:
        nothing = dataclasses.replace(
            TURN, n_generated=0, generate_s=0.0, generate_cpu_s=0.0, ending="cancelled", text=""
        )
        ((_, record),) = answers(protocol.done("1", nothing, load_s=0.0))
        assert (record["tok_s"], record["compute_s_tok"], record["cancelled"]) == (0.0, 0.0, True)

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_a_clock_that_misbehaves(self, value: float) -> None:
        decision: DecideResult = dataclasses.replace(DECISION, prefill_s=value, policy_s=value)
        ((_, record),) = answers(protocol.decided("1", decision))
        assert (record["prefill_s"], record["policy_s"]) == (0.0, 0.0)

    def test_a_path_that_is_no_text(self) -> None:
        ((_, record),) = answers(protocol.error("null", "no \udcff.gguf", fatal=True))
        assert record["msg"] == r"no \udcff.gguf"


class TestReads:
    """What was read of streamed experts, in the units of the contract."""

    PREFILL: ClassVar = {"prefill_read_mib": 8.0, "prefill_io_s": 0.3, "prefill_stall_s": 0.2, "prefill_mgmt_s": 0.1}
    ROUTED: ClassVar = {"prefill_routed_mib": 16.0, "prefill_ahead_mib": 4.0, "prefill_wasted_mib": 1.0}
    DEVICE: ClassVar = {
        **{"prefill_dev_tokens": 64, "prefill_dev_read_mib": 7.0, "prefill_dev_stall_s": 0.4},
        **{"prefill_dev_routed": 9, "prefill_dev_demand": 4, "prefill_dev_nodes": 50},
    }

    def test_of_a_decision(self) -> None:
        told = {**self.PREFILL, **self.ROUTED, **self.DEVICE, "cache_hit_pct": 75.0}
        ((_, record),) = answers(protocol.decided("1", dataclasses.replace(DECISION, **told)))
        check("DECIDE", record)
        assert {key: record[key] for key in told} == told

    def test_of_a_turn(self) -> None:
        told = {
            **self.PREFILL,
            **self.ROUTED,
            **self.DEVICE,
            **{"prefill_cache_hit_pct": 75.0, "cache_hit_pct": 50.0, "read_mib": 2.0, "routed_mib": 3.0},
            **{"ahead_mib": 1.5, "wasted_mib": 0.5, "cache_resident_mib": 90.0, "cache_budget_mib": 100.0},
        }
        times = {"io_s": 0.5, "stall_s": 0.25, "mgmt_s": 0.125, "generate_s": 1.0, "n_generated": 4}
        ((_, record),) = answers(protocol.done("1", dataclasses.replace(TURN, **told, **times), load_s=1.0))
        check("DONE", record)
        assert {key: record[key] for key in told} == told
        per_token = [record[f"{key}_s_tok"] for key in ("io", "stall", "mgmt", "compute")]
        assert per_token == [0.125, 0.0625, 0.03125, 0.15625]

    def test_of_a_token(self) -> None:
        reads = {"read_bytes": 2_500_000, "io_s": 0.2, "stall_s": 0.0625, "mgmt_s": 0.03125, "cache_hit_pct": 12.5}
        ((_, record),) = answers(protocol.progress(a_step(wall_s=0.25, **reads)))
        check("PROGRESS", record)
        assert record["read_mb"] == 2.5
        assert record["cache_hit_pct"] == 12.5
        assert [record[f"{key}_ms"] for key in ("wall", "io", "stall", "mgmt", "compute")] == [
            *(250.0, 200.0, 62.5, 31.25, 156.25)
        ]

    def test_the_device_is_named_when_the_model_is_open(self) -> None:
        info = dataclasses.replace(INFO, prefill_device="Vulkan0")
        for seen, name in ((INFO, ""), (info, "Vulkan0")):
            ((_, record),) = answers(protocol.ready(seen, load_s=1.5, decide=True))
            assert record["prefill_device"] == name

    def test_computing_is_never_less_than_nothing(self) -> None:
        ((_, record),) = answers(protocol.progress(a_step(wall_s=0.25, stall_s=0.5)))
        assert record["compute_ms"] == 0.0
