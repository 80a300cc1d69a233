"""How much of an engine's time goes into prompts, as of late."""

import pytest

from diptych.engine.scheduling.prefill_time import PrefillTime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_none_before_the_first_prompt(clock: Clock) -> None:
    spent = PrefillTime(clock)
    clock.now_s += 50.0
    assert spent.ratio == 0.0


@pytest.mark.parametrize("busy_ratio", [0.25, 0.75, 1.0])
def test_it_is_known_soon_and_stays(clock: Clock, busy_ratio: float) -> None:
    spent = PrefillTime(clock)
    for second in range(60):
        clock.now_s += 1.0
        spent.add(busy_ratio)
        if second > 5:
            assert spent.ratio == pytest.approx(busy_ratio, rel=0.25)


def test_one_step_alone_does_not_make_all_of_its_time(clock: Clock) -> None:
    spent = PrefillTime(clock)
    spent.add(0.5)
    assert 0.0 < spent.ratio < 0.5


def test_it_fades(clock: Clock) -> None:
    spent = PrefillTime(clock)
    for _ in range(20):
        clock.now_s += 1.0
        spent.add(1.0)
    full = spent.ratio
    clock.now_s += 5.0
    assert 0.3 * full < spent.ratio < 0.45 * full
    clock.now_s += 60.0
    assert spent.ratio < 0.001
