"""What placement knows of workers' prefix caches: what they told, and what is on its way."""

import pytest

from diptych.cache_change import CacheChange, fold
from router.placement import cache_index
from router.placement.cache_index import CacheIndex
from tests.told_caches import whole

KEYS = tuple(bytes([i, *range(1, 16)]) for i in range(1, 9))


def told(*names: str, max_blocks: int = 100) -> CacheIndex:
    """Each has the first four keys."""
    index = CacheIndex(max_blocks)
    for name in names:
        assert index.told(name, whole(KEYS[:4], seq=4))
    return index


def test_a_change_is_followed_and_a_reset_replaces_everything() -> None:
    index = told("a", "b")
    held = KEYS[1:5]
    assert index.told("a", CacheChange(4, 6, KEYS[:1], KEYS[4:5], 4, fold(held)))
    assert (index.num_hit_blocks("a", KEYS), index.num_hit_blocks("b", KEYS)) == (0, 4)
    assert index.num_hit_blocks("a", KEYS[1:]) == 4
    assert index.holders(KEYS) == {"b"}
    assert (index.seq("a"), index.seq("b"), index.seq("c")) == (6, 4, None)
    assert index.told("a", whole(KEYS[:2], seq=1))
    assert (index.num_hit_blocks("a", KEYS), index.seq("a")) == (2, 1)
    assert index.holders(()) == set()


def test_a_block_behind_one_that_was_evicted_is_no_hit() -> None:
    index = told("a")
    without = (*KEYS[:1], *KEYS[2:4])
    assert index.told("a", CacheChange(4, 5, KEYS[1:2], (), 3, fold(without)))
    assert index.num_hit_blocks("a", KEYS) == 1


@pytest.mark.parametrize(
    "change",
    [
        CacheChange(3, 6, (), KEYS[4:6], 6, fold(KEYS[:6])),
        CacheChange(5, 6, (), KEYS[5:6], 6, fold(KEYS[:6])),
        CacheChange(4, 5, (), KEYS[4:5], 6, fold(KEYS[:5])),
        CacheChange(4, 5, (), KEYS[4:5], 5, fold(KEYS[:6])),
        CacheChange(4, 5, (), KEYS[3:4], 5, fold((*KEYS[:4], KEYS[3]))),
        CacheChange(4, 5, KEYS[5:6], (), 3, fold((*KEYS[:4], KEYS[5]))),
    ],
    ids=["repeated", "gap", "count", "digest", "added what it had", "removed what it had not"],
)
def test_nothing_is_believed_of_a_worker_that_was_lost_track_of(change: CacheChange) -> None:
    index = told("a", "b")
    assert not index.told("a", change)
    assert index.seq("a") is None
    assert index.holders(KEYS) == {"b"}
    assert not index.told("a", CacheChange(5, 6, (), (), 5, fold(KEYS[:5]))), "ask it for all"
    assert index.told("a", whole(KEYS[:5], seq=5))
    assert index.num_hit_blocks("a", KEYS) == 5


def test_no_more_is_kept_of_a_worker_than_there_is_room_for() -> None:
    """What it has beyond is taken not to be there: never the other way round."""
    index = told("a", max_blocks=3)
    assert index.num_hit_blocks("a", KEYS) == 3
    assert not index.is_whole("a")
    assert index.told("a", CacheChange(4, 6, KEYS[2:4], (), 2, fold(KEYS[:2])))
    assert index.told("a", CacheChange(6, 9, (), KEYS[2:5], 5, fold(KEYS[:5])))
    assert index.num_hit_blocks("a", KEYS[2:]) == 3, "what is new"
    assert index.num_blocks == 3
    assert not index.told("a", CacheChange(9, 10, (), KEYS[5:6], 6, fold(KEYS[:5])))
    assert index.is_whole("a"), "nothing is known of it"
    index.expect("b", KEYS)
    assert index.num_hit_blocks("b", KEYS) == 3
    index.retract("b", KEYS)
    nothing = told("a", max_blocks=0)
    nothing.expect("a", KEYS)
    assert nothing.holders(KEYS) == set()


def test_what_is_new_takes_the_room_of_what_nobody_asked_for_since_longest() -> None:
    """A beginning that all prompts have came first, and is to stay."""
    index = told("a", max_blocks=4)
    shared = KEYS[:2]
    for seq in range(4, 8):
        index.expect("a", shared)
        assert index.is_whole("a") == (seq == 4)
        new = KEYS[seq : seq + 1]
        assert index.told("a", CacheChange(seq, seq + 1, (), new, seq + 1, fold(KEYS[: seq + 1])))
        index.retract("a", shared)
        assert index.num_hit_blocks("a", (*shared, *new)) == 3
    assert index.told("a", CacheChange(8, 9, KEYS[2:4], (), 6, fold((*KEYS[:2], *KEYS[4:]))))
    assert index.num_hit_blocks("a", (*shared, *KEYS[6:])) == 4, "it was dropped already"


def test_of_a_prompt_that_nobody_asked_for_the_end_is_dropped_first() -> None:
    index = told("a", max_blocks=4)
    index.expect("a", KEYS[:4])
    index.retract("a", KEYS[:4])
    assert index.told("a", CacheChange(4, 5, (), KEYS[4:5], 5, fold(KEYS[:5])))
    assert index.num_hit_blocks("a", KEYS) == 3


def test_what_goes_on_in_other_messages_takes_no_room_of_what_came_before() -> None:
    """Of a whole cache what stayed there longest is told first, of a change what is newest."""
    index = told("a", max_blocks=3)
    assert index.told("a", CacheChange(4, 4, (), KEYS[4:6], 6, fold(KEYS[:6])))
    assert index.num_hit_blocks("a", KEYS) == 3


def test_what_is_expected_ends_with_the_last_who_expects_it() -> None:
    index = CacheIndex(8)
    index.expect("a", KEYS)
    index.expect("a", KEYS[:4])
    assert index.num_hit_blocks("a", KEYS) == 8
    index.retract("a", KEYS)
    assert index.num_hit_blocks("a", KEYS) == 4
    index.settle("a", KEYS[:4])
    assert index.num_hit_blocks("a", KEYS) == 0
    index.retract("a", KEYS)
    index.settle("b", KEYS)
    assert not index._workers


def test_what_is_expected_continues_what_is_held() -> None:
    index = told("a")
    index.expect("a", KEYS[3:6])
    assert index.num_hit_blocks("a", KEYS) == 6
    without = KEYS[:3]
    assert index.told("a", CacheChange(4, 5, KEYS[3:4], (), 3, fold(without)))
    assert index.num_hit_blocks("a", KEYS) == 6
    index.retract("a", KEYS[3:6])
    assert index.num_hit_blocks("a", KEYS) == 3


class Counted(dict[bytes, int]):
    """Counts what it is asked for."""

    num_asked = 0

    def get(self, key: bytes, default: int = 0) -> int:  # type: ignore[override]
        self.num_asked += 1
        return super().get(key, default)


def test_a_prompt_that_many_expect_is_walked_once_for_all_of_them() -> None:
    index = told(*(f"holds {place}" for place in range(64)))
    for place in range(64):
        index.expect(f"expects {place}", KEYS)
    for worker in index._workers.values():
        worker.expected = Counted(worker.expected)
    index._expected = Counted(index._expected)
    assert len(index.holders(KEYS)) == 128
    asked = [worker.expected for worker in index._workers.values()]
    assert all(isinstance(each, Counted) and not each.num_asked for each in asked)
    assert index._expected.num_asked == len(KEYS)


def test_who_is_forgotten_expects_nothing_when_its_place_is_anothers() -> None:
    index = CacheIndex(8)
    index.expect("a", KEYS)
    index.forget("a")
    index.expect("b", KEYS[:1])
    assert index.num_hit_blocks("b", KEYS) == 1
    index.retract("a", KEYS)
    assert index.num_hit_blocks("b", KEYS) == 1
    index.expect("b", KEYS[:1])
    index.retract("b", KEYS[:1])
    assert index.num_hit_blocks("b", KEYS) == 1, "of two one still expects it"
    index.retract("b", KEYS[:1])
    assert not index._expected


def test_what_settled_is_held_for_true_until_the_worker_told_twice() -> None:
    index = told("a")
    same = CacheChange(4, 4, (), (), 4, fold(KEYS[:4]))
    index.expect("a", KEYS)
    index.settle("a", KEYS)
    for num_hits in (8, 4):
        assert index.told("a", same)
        assert index.num_hit_blocks("a", KEYS) == num_hits
    index.expect("a", KEYS)
    index.settle("a", KEYS)
    index.untold("a")
    assert not index._workers, "who does not tell any more"
    index.forget("a")


def test_of_much_that_settled_before_its_worker_told_again_what_came_first_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_index, "_MOST_SETTLING", 1)
    index = told("a")
    for keys in (KEYS, KEYS[:6]):
        index.expect("a", keys)
        assert index.num_hit_blocks("a", KEYS) == 8
        index.settle("a", keys)
    assert index.num_hit_blocks("a", KEYS) == 6


def test_what_is_told_in_several_messages_is_told_once() -> None:
    index = told("a")
    same = CacheChange(4, 4, (), (), 4, fold(KEYS[:4]))
    index.expect("a", KEYS)
    index.settle("a", KEYS)
    for has_more in (True, True, False):
        assert index.told("a", same._replace(has_more=has_more))
    assert index.num_hit_blocks("a", KEYS) == 8
    assert index.told("a", same)
    assert index.num_hit_blocks("a", KEYS) == 4


def test_a_worker_that_is_gone_is_forgotten() -> None:
    index = told("a")
    index.forget("a")
    assert index.num_hit_blocks("a", KEYS) == 0
    assert index.seq("a") is None
    index.expect("a", KEYS)
    index.settle("a", KEYS)
    assert not index._workers


@pytest.mark.parametrize("is_accepted", [True, False])
def test_who_expects_what_a_worker_has_that_is_seen_again_keeps_it(is_accepted: bool) -> None:
    """A lease of before ends: what it takes back is its own."""
    index, same = told("a"), CacheChange(4, 4, (), (), 4, fold(KEYS[:4]))
    index.expect("a", KEYS)
    index.forget("a")
    assert index.num_hit_blocks("a", KEYS) == 8, "it may still be computed"
    assert index.told("a", whole(KEYS[:4], seq=4))
    index.expect("a", KEYS)
    over = index.settle if is_accepted else index.retract
    over("a", KEYS)
    for _ in range(2):
        assert index.told("a", same)
        assert index.num_hit_blocks("a", KEYS) == 8
    index.retract("a", KEYS)
    assert index.num_hit_blocks("a", KEYS) == 4
    assert not index._expected


def test_what_settled_is_forgotten_with_its_worker() -> None:
    """Nobody is left who would take it back."""
    index = told("a")
    index.expect("a", KEYS)
    index.settle("a", KEYS)
    index.forget("a")
    assert not index._workers
    assert not index._expected
