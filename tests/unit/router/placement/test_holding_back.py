"""Who is held for a pace holds others back for a while, and not for ever."""

from router.placement.holding_back import MAX_UNPASSED_S, HoldingBack


def test_where_none_that_is_held_is_placed_nobody_is_held_back_for_as_long_again() -> None:
    holding = HoldingBack()
    held = [now_s for now_s in range(60) if holding.may(100.0 + now_s)]
    period = 2 * int(MAX_UNPASSED_S) + 1
    assert held == [now_s for now_s in range(60) if now_s % period <= MAX_UNPASSED_S]


def test_while_those_that_are_held_are_placed_others_are_held_back() -> None:
    holding = HoldingBack()
    for now_s in range(60):
        assert holding.may(100.0 + now_s)
        if now_s % 9 == 0:
            holding.paid_off(100.0 + now_s)


def test_what_was_long_before_does_not_count() -> None:
    holding = HoldingBack()
    assert all(holding.may(100.0 + 2 * now_s) for now_s in range(60))
