"""Who follows a cache by its log has what it has; what is too far behind is told everything."""

from collections.abc import Collection

import pytest

from diptych import cache_log
from diptych.cache_change import CacheChange, fold
from diptych.cache_log import CacheLog
from diptych.v1 import cache_pb2

KEYS = tuple(bytes([i, *range(1, 16)]) for i in range(1, 10))


class Cache:
    """A set with a log."""

    def __init__(self, max_changes: int = 16) -> None:
        self.keys: dict[bytes, None] = {}
        self.log = CacheLog(self.keys.keys(), max_changes)

    def add(self, *keys: bytes) -> None:
        for key in keys:
            self.keys[key] = None
            self.log.entered(key)

    def drop(self, *keys: bytes) -> None:
        for key in keys:
            del self.keys[key]
            self.log.left(key)


def test_all_is_told_at_first_and_then_what_became_other() -> None:
    cache = Cache()
    cache.add(*KEYS[:3])
    assert list(cache.log.since(None)) == [
        CacheChange(0, 3, (), KEYS[:3], 3, fold(KEYS[:3]), is_reset=True)
    ]
    cache.drop(KEYS[0])
    cache.add(KEYS[3])
    held = (KEYS[1], KEYS[2], KEYS[3])
    assert list(cache.log.since(3)) == [CacheChange(3, 5, (KEYS[0],), (KEYS[3],), 3, fold(held))]
    assert list(cache.log.since(5)) == [CacheChange(5, 5, (), (), 3, fold(held))]


def test_what_was_undone_is_not_told() -> None:
    cache = Cache()
    cache.add(KEYS[0])
    cache.drop(KEYS[0])
    cache.add(KEYS[1], KEYS[0])
    cache.drop(KEYS[1])
    (change,) = cache.log.since(1)
    assert (change.removed, change.added, change.to_seq) == ((), (), 5)
    (change,) = cache.log.since(2)
    assert (change.removed, change.added) == ((), (KEYS[0],))
    (change,) = cache.log.since(4)
    assert (change.removed, change.added) == ((KEYS[1],), ())


def test_who_is_too_far_behind_or_nowhere_is_told_everything() -> None:
    cache = Cache(max_changes=2)
    cache.add(*KEYS[:3])
    assert not next(cache.log.since(1)).is_reset
    for seq in (0, 4):
        (change,) = cache.log.since(seq)
        assert change.is_reset
        assert change.added == KEYS[:3]


@pytest.mark.parametrize("seq", [None, 4])
def test_much_is_told_in_parts_each_of_which_can_be_checked(
    monkeypatch: pytest.MonkeyPatch, seq: int | None
) -> None:
    monkeypatch.setattr(cache_log, "_PART_KEYS", 2)
    cache = Cache()
    cache.add(*KEYS[:4])
    cache.drop(*KEYS[:3])
    cache.add(*KEYS[4:])
    parts, held = list(cache.log.since(seq)), set[bytes]() if seq is None else set(KEYS[:4])
    assert [part.is_reset for part in parts] == [seq is None, False, False]
    assert [part.from_seq for part in parts] == [seq or 0, 12, 12]
    assert [part.has_more for part in parts] == [True, True, False]
    for part in parts:
        assert len(part.added) <= 2
        assert len(part.removed) <= 2
        held = (held - set(part.removed)) | set(part.added)
        assert (part.to_seq, part.num_blocks, part.digest) == (12, len(held), fold(held))
    assert held == set(cache.keys)


@pytest.mark.parametrize("seq", [None, 1])
def test_much_is_made_part_by_part_and_is_what_there_was_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, seq: int | None
) -> None:
    """Each part only when it is taken: the worker does other things between them."""
    num_folded: list[int] = []

    def count(keys: Collection[bytes]) -> int:
        num_folded.append(len(keys))
        return fold(keys)

    monkeypatch.setattr(cache_log, "_PART_KEYS", 2)
    cache = Cache()
    cache.add(*KEYS[:7])
    followed = cache.log.since(seq)
    monkeypatch.setattr(cache_log, "fold", count)
    held = [next(followed).added]
    assert sum(num_folded) == 2
    cache.drop(KEYS[0])
    cache.add(KEYS[7])
    held += [part.added for part in followed]
    assert {key for keys in held for key in keys} == set(KEYS[:7] if seq is None else KEYS[1:7])


def test_the_wire_says_the_same() -> None:
    change = CacheChange(3, 9, KEYS[:1], KEYS[1:4], 7, fold(KEYS), is_reset=True, has_more=True)
    sent = change.to_proto("w").SerializeToString()
    told = cache_pb2.CacheChange.FromString(sent)
    assert told.incarnation == "w"
    assert CacheChange.from_proto(told) == change


@pytest.mark.parametrize("field", ["added", "removed"])
def test_what_is_no_key_is_refused_by_name(field: str) -> None:
    told = cache_pb2.CacheChange(**{field: b"x" * 17})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{field}: 17 bytes"):
        CacheChange.from_proto(told)
