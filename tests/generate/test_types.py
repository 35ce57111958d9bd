"""What a request may hold, and that a wrong one is refused by name."""

from typing import Any

import pytest

from bmoe.decide import Refused
from bmoe.generate import GenerateRequest, Sampling


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": 7}, "prompt must be text"),
        ({"prompt": "\ud800"}, "half of a surrogate"),
        ({"n_predict": True}, "n_predict must be a whole number"),
        ({"n_predict": 1.0}, "n_predict must be a whole number"),
        ({"n_predict": -1}, "n_predict is -1, allowed are 0 to"),
        ({"n_predict": 2**31}, "allowed are 0 to 2147483647"),
        ({"n_predict": 10**5000}, "n_predict is a number of thousands of digits, allowed"),
        ({"think": 1}, "think must be true or false"),
        ({"clear_kv": None}, "clear_kv must be true or false, not null"),
        ({"template": "no"}, "template must be true or false"),
        ({"system": 3}, "system must be text"),
        ({"stop": "END"}, "stop must be a list of texts, not a text"),
        ({"stop": ["a", ""]}, "empty text"),
        ({"stop": ["a"] * 65}, "65 texts, 64 are allowed"),
        ({"system": "x", "clear_kv": False}, "system begins a conversation"),
        ({"template": False, "think": True}, "raw prompt"),
        ({"template": False, "clear_kv": False}, "raw prompt"),
        ({"template": False, "system": "x"}, "raw prompt"),
    ],
)
def test_a_wrong_request_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        GenerateRequest(**{"prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, allowed are 0 to 100"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"top_p": 1.5}, "top_p is 1.5, allowed are 0 to 1"),
        ({"min_p": float("inf")}, "min_p is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"seed": 2**32}, "seed is 4294967296, allowed are 0 to 4294967295"),
    ],
)
def test_wrong_sampling_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        Sampling(**fields)


def test_what_is_right_is_taken() -> None:
    request = GenerateRequest(prompt="", n_predict=0, stop=["a"], sampling=Sampling(temperature=1, top_p=0))  # type: ignore[arg-type]
    assert request.stop == ("a",)
