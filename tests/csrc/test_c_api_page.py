"""docs/c-api.md against bmoe.h: every call is in its table, with the errors that the header gives it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "csrc" / "include" / "bmoe.h").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "c-api.md").read_text(encoding="utf-8")
ANY_CALL = {"CLOSED", "BUSY"}  # the page says it once, for all
ANY_THREAD = {
    "bmoe_abi_version",
    "bmoe_build_info",
    "bmoe_open_params_init",
    "bmoe_sampling_init",
    "bmoe_device_count",
    "bmoe_get_device",
    "bmoe_open",
    "bmoe_close",
    "bmoe_last_error",
    "bmoe_cancel",
    "bmoe_cancel_clear",
}


def comments(header: str) -> dict[str, str]:
    """Each function's comment, which several in a row may share."""
    found = {}
    for comment, calls in re.findall(r"(/\*(?:(?!\*/).)*\*/)\n((?:BMOE_API [^;]*;\n)+)", header, re.DOTALL):
        for name in re.findall(r"^BMOE_API [^;(]*?(bmoe_\w+)\(", calls, re.MULTILINE):
            found[name] = comment
    return found


def errors(name: str, told: dict[str, str]) -> set[str]:
    """The codes that follow "returns", those of a call it refers to included."""
    comment = told[name]
    said = re.search(r"(?:\n \*   returns|Returns)(.*?)(?=\n \*   [a-z]|\*/)", comment, re.DOTALL)
    text = said[1] if said else comment
    codes = set(re.findall(r"BMOE_E_(\w+)", text))
    for other in re.findall(r"^ *as (bmoe_\w+)\(\)", text):
        codes |= errors(other, told)
    return codes - ANY_CALL


def table(page: str) -> dict[str, tuple[set[str], str]]:
    """Errors and threads of each call in the page's table."""
    rows = re.findall(r"^\| (`bmoe_[^|]*) \|([^|]*)\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    return {
        name: (set(re.findall(r"`([A-Z_]+)`", codes)), threads.strip())
        for names, codes, _, threads in rows
        for name in re.findall(r"`(bmoe_\w+)`", names)
    }


def test_every_call_is_there_with_its_errors() -> None:
    told, shown = comments(HEADER), table(PAGE)
    declared = set(re.findall(r"^BMOE_API [^;(]*?(bmoe_\w+)\(", HEADER, re.MULTILINE))
    assert set(told) == declared and set(shown) == declared
    assert {name: codes for name, (codes, _) in shown.items()} == {name: errors(name, told) for name in declared}


def test_every_call_says_from_which_threads() -> None:
    shown = table(PAGE)
    assert {name for name, (_, threads) in shown.items() if threads.startswith("any")} == ANY_THREAD
    assert {threads for name, (_, threads) in shown.items() if name not in ANY_THREAD} == {"one at a time"}


def test_every_code_of_the_header_is_a_code_of_some_call() -> None:
    codes = set(re.findall(r"^ +BMOE_E_(\w+) = ", HEADER, re.MULTILINE))
    assert set().union(*(errors(name, comments(HEADER)) for name in table(PAGE))) | ANY_CALL == codes


def test_a_code_more_or_a_call_more_is_seen() -> None:
    more = HEADER.replace(
        "BMOE_E_STATE (no logits, as bmoe_logits()), BMOE_E_LOGITS", "BMOE_E_STATE, BMOE_E_LOGITS, BMOE_E_READ"
    )
    assert (
        errors("bmoe_sample", comments(more))
        == {"ARGUMENT", "STATE", "LOGITS", "READ"}
        != table(PAGE)["bmoe_sample"][0]
    )
    more = HEADER.replace(
        "BMOE_API int32_t bmoe_state_drop(", "BMOE_API int32_t bmoe_more(void);\nBMOE_API int32_t bmoe_state_drop("
    )
    assert set(comments(more)) - set(table(PAGE)) == {"bmoe_more"}
