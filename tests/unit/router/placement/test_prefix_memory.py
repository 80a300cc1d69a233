"""What the router remembers of workers' prefix caches: bounded, and corrected."""

from router.placement.prefix_memory import PrefixMemory

KEYS = tuple(bytes([i]) * 16 for i in range(8))


def test_memory_is_bounded_and_keeps_the_beginnings() -> None:
    memory = PrefixMemory(4)
    memory.remember("a", KEYS)
    assert memory.num_hit_blocks("a", KEYS) == 4
    assert memory.num_hit_blocks("b", KEYS) == 0
    assert memory.num_hit_blocks("a", KEYS[:2]) == 2
    memory.remember("a", [b"x" * 16])
    assert memory.num_hit_blocks("a", KEYS) == 3
    memory.forget("a")
    assert memory.num_hit_blocks("a", KEYS) == 0


def test_memory_forgets_what_a_worker_says_that_it_lacks() -> None:
    memory = PrefixMemory(8)
    memory.remember("a", KEYS)
    memory.correct("a", KEYS, 3)
    assert memory.num_hit_blocks("a", KEYS) == 3
    memory.correct("a", KEYS, 5)
    assert memory.num_hit_blocks("a", KEYS) == 3, "what it has more is learnt elsewhere"
    memory.correct("b", KEYS, 0)


def test_memory_holds_no_more_than_the_pool() -> None:
    memory = PrefixMemory(16)
    memory.remember("a", KEYS)
    memory.resize("a", 2)
    assert memory.num_hit_blocks("a", KEYS) == 2
    memory.resize("a", 100)
    memory.remember("a", KEYS)
    assert memory.num_hit_blocks("a", KEYS) == 8, "never more than the setting allows, either"


def test_what_is_expected_ends_with_the_last_who_expects_it() -> None:
    memory = PrefixMemory(8)
    memory.expect("a", KEYS)
    memory.expect("a", KEYS[:4])
    assert memory.num_hit_blocks("a", KEYS) == 8
    memory.retract("a", KEYS)
    assert memory.num_hit_blocks("a", KEYS) == 4
    memory.retract("a", KEYS[:4])
    assert memory.num_hit_blocks("a", KEYS) == 0
    memory.retract("a", KEYS)
    memory.retract("b", KEYS)


def test_what_is_known_stays_whoever_expected_it() -> None:
    memory = PrefixMemory(8)
    memory.expect("a", KEYS)
    memory.remember("a", KEYS[:4])
    memory.expect("a", KEYS[:6])
    memory.retract("a", KEYS)
    memory.retract("a", KEYS[:6])
    assert memory.num_hit_blocks("a", KEYS) == 4


def test_who_holds_the_beginning_may_hold_more_and_nobody_else_does() -> None:
    memory = PrefixMemory(8)
    memory.remember("a", KEYS[:3])
    memory.expect("b", KEYS[:1])
    memory.remember("c", KEYS[1:])
    assert memory.holders(KEYS) == {"a", "b"}
    memory.retract("b", KEYS[:1])
    assert memory.holders(KEYS) == {"a"}
    assert memory.holders(()) == set()
