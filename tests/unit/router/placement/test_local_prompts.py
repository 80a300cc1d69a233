"""Prompts that a decode worker computes itself are counted once: by us, or in what it tells."""

from router.placement.local_prompts import LocalPrompts


def test_one_is_on_its_way_until_a_worker_tells_that_was_told_to_start_it() -> None:
    prompts = LocalPrompts()
    prompts.asked(1, 100)
    prompts.asked(2, 20)
    prompts.started(1, 7.0)
    assert prompts.num_tokens == 120
    prompts.told(8.0)
    assert prompts.num_tokens == 20
    prompts.told(9.0)
    assert prompts.num_tokens == 20, "it only has its blocks"
    prompts.started(2, 9.0)
    prompts.told(10.0)
    assert prompts.num_tokens == 0


def test_what_is_cached_of_one_is_not_on_its_way() -> None:
    prompts = LocalPrompts()
    prompts.asked(1, 100)
    prompts.asked(2, 30)
    assert prompts.reserved(1, 96)
    assert prompts.num_tokens == 34
    assert prompts.reserved(2, 999)
    assert not prompts.reserved(7, 50), "one that it pulls"
    assert not prompts.reserved(1, 0)
    assert prompts.num_tokens == 4
    assert prompts.over(1)
    assert prompts.over(2)
    assert prompts.num_tokens == 0


def test_a_message_that_is_heard_soon_after_a_start_may_have_crossed_it() -> None:
    prompts = LocalPrompts()
    for sequence_id, now_s in ((1, 7.0), (2, 7.04)):
        prompts.asked(sequence_id, 100)
        prompts.started(sequence_id, now_s)
    prompts.told(7.04)
    assert prompts.num_tokens == 200
    prompts.told(7.06)
    assert prompts.num_tokens == 100
    prompts.told(7.3)
    assert prompts.num_tokens == 0


def test_one_that_is_over_is_not_on_its_way_and_is_so_once() -> None:
    prompts = LocalPrompts()
    prompts.asked(1, 100)
    prompts.started(1, 7.0)
    assert prompts.over(1)
    assert not prompts.over(1)
    assert not prompts.over(7), "a prompt that another worker computes"
    prompts.started(7, 7.0)
    prompts.told(8.0)
    assert prompts.num_tokens == 0
    prompts.asked(2, 30)
    prompts.clear()
    prompts.told(9.0)
    assert prompts.num_tokens == 0
