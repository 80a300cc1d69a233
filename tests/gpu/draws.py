"""Tokens drawn on a device against those that the host's sampler draws of copies, and the time."""

from dataclasses import dataclass, replace

import torch

from diptych.engine.backends.cuda import sampler
from diptych.engine.sampling.sampler import sample
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.sampling_params import SamplingParams
from tests.gpu.attention import Stopwatch

_NEAR = 1e-6  # a margin within which exponentials may decide otherwise

RULES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "all": SamplingParams(temperature=0.8, top_k=2000, top_p=0.95, min_p=0.01),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of which all rows are drawn by the same rules, from RULES."""

    rules: str
    num_rows: int
    vocab_size: int


CASES = tuple(Case(rules, rows, 128_256) for rules in RULES for rows in (1, 64))


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case."""

    case: str
    seconds: float  # of the device, a copy of the logits among it
    num_near: int  # rows that were near a boundary, of which nothing is asked
    num_wrong: int
    holds: bool


def check(case: Case, device: torch.device, stopwatch: Stopwatch) -> Measured:
    """On random logits that spread by 4."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(case.num_rows, case.vocab_size, generator=generator) * 4
    specs = [
        SampleSpec(
            params=replace(RULES[case.rules], seed=row, return_margins=True),
            allow_stop=True,
        )
        for row in range(case.num_rows)
    ]
    positions = list(range(100, 100 + case.num_rows))
    on_device = logits.to(device)
    drawn = sampler.sample(on_device.clone(), specs, positions)
    wanted = sample(logits, specs, positions)
    scratch = on_device.clone()
    seconds = stopwatch(lambda: sampler.draw(scratch.copy_(on_device), specs, positions))
    num_near = num_wrong = 0
    for token, other in zip(drawn, wanted, strict=True):
        assert isinstance(token, SampledToken)
        assert isinstance(other, SampledToken)
        num_near += other.margin < _NEAR
        num_wrong += other.margin >= _NEAR and token.token_id != other.token_id
    return Measured(repr(case), seconds, num_near, num_wrong, num_wrong == 0)
