import pytest

from bmoe.decide import KeptPrefix
from tests.decide.scripted import ScriptedBackend


def stored(*tokens: int) -> tuple[KeptPrefix, ScriptedBackend]:
    kept, backend = KeptPrefix(), ScriptedBackend()
    backend.prefill(tokens)
    kept.store(backend, tokens)
    return kept, backend


def test_nothing_kept_begins_nothing() -> None:
    kept = KeptPrefix()
    assert not kept.begins([1, 2])
    assert not kept.begins([])
    assert (kept.tokens, kept.size_mib) == ((), 0.0)


def test_what_is_kept_begins_itself_and_what_continues_it() -> None:
    kept, _ = stored(1, 2, 3)
    assert kept.begins([1, 2, 3])
    assert kept.begins([1, 2, 3, 4])
    assert not kept.begins([1, 2])
    assert not kept.begins([1, 2, 4, 3])
    assert not kept.begins([0, 1, 2, 3])


def test_a_restored_state_is_the_saved_one() -> None:
    kept, backend = stored(1, 2, 3)
    backend.drop_state()
    backend.prefill([7])
    kept.restore(backend)
    assert backend.pieces == ((1, 2, 3),)


def test_a_refresh_never_holds_two_states() -> None:
    kept, backend = stored(1, 2, 3)
    backend.prefill([4])
    kept.store(backend, [1, 2, 3, 4])
    assert kept.tokens == (1, 2, 3, 4)
    assert sum(ref() is not None for ref in backend.alive) == 1


def test_a_store_that_fails_keeps_nothing() -> None:
    kept, backend = stored(1, 2, 3)
    backend.alive.clear()

    def fail() -> bytes:
        raise MemoryError

    backend.save_state = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        kept.store(backend, [1])
    assert not kept.begins([1, 2, 3])


def test_size_is_that_of_the_state() -> None:
    kept, backend = stored(1, 2, 3)
    saved = backend.alive[0]()
    assert saved is not None
    assert kept.size_mib * 1024 * 1024 == len(saved) == len("1,2,3")


def test_drop_keeps_nothing() -> None:
    kept, backend = stored(1, 2)
    kept.drop()
    assert not kept.begins([1, 2])
    assert [ref() for ref in backend.alive] == [None]
