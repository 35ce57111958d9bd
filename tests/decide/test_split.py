from hypothesis import given
from hypothesis import strategies as st

from bmoe.decide.split import tokens_to_keep

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def test_one_matching_token_is_given_back() -> None:
    assert tokens_to_keep([1, 2, 3, 4], [1, 2, 3, 9]) == 2


def test_nothing_in_common_keeps_nothing() -> None:
    assert tokens_to_keep([1, 2], [2, 1]) == 0
    assert tokens_to_keep([1, 2], []) == 0


def test_a_prefix_that_is_the_whole_prompt_leaves_one_token_to_compute() -> None:
    assert tokens_to_keep([1, 2, 3], [1, 2, 3]) == 2


def test_what_matches_again_after_the_join_does_not_count() -> None:
    assert tokens_to_keep([1, 2, 3, 4, 5], [1, 2, 9, 4, 5]) == 1


@given(TOKENS, TOKENS)
def test_what_is_kept_is_common_and_never_all(prompt: list[int], alone: list[int]) -> None:
    keep = tokens_to_keep(prompt, alone)
    assert 0 <= keep <= max(len(prompt) - 1, 0)
    assert prompt[: keep + 1] == alone[: keep + 1] or keep == 0


@given(TOKENS, TOKENS, TOKENS)
def test_a_shared_beginning_is_kept_up_to_one_token(shared: list[int], ours: list[int], theirs: list[int]) -> None:
    assert tokens_to_keep(shared + ours, shared + theirs) >= len(shared) - 1
