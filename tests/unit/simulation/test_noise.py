"""Simulated steps vary as a step model says, and as recorded ones do."""

import math
from statistics import correlation

import pytest

from diptych.simulation.noise import Noise


def test_noise_is_what_the_step_model_says() -> None:
    noise = Noise(5, is_on=True)
    factors = sorted(noise.factor(number, 1.2, only_decodes=False) for number in range(1000))
    assert 0.98 < factors[500] < 1.02
    assert factors[900] == pytest.approx(1.2, rel=0.03)
    for only_decodes in (False, True):
        assert Noise(5, is_on=False).factor(3, 1.2, only_decodes=only_decodes) == 1.0


def test_decode_steps_that_follow_one_another_are_slow_together_as_recorded_ones_are() -> None:
    noise = Noise(5, is_on=True)
    logs = [math.log(noise.factor(number, 1.1, only_decodes=True)) for number in range(20_000)]
    together = [correlation(logs[:-gap], logs[gap:]) for gap in (1, 5, 20, 100)]
    assert together == pytest.approx([0.55, 0.42, 0.16, 0.0], abs=0.06)
