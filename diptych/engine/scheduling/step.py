"""What one model step does, decided by the scheduler and executed by the runner.

A plan is plain data without torch that nobody changes, so that the scheduler can be
tested alone, the model thread never reads state that the event loop may change, and a
plan can be sent to several processes.
"""

import collections.abc
from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.engine.scheduling.report import Part, Told
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.errors import DiptychError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams
from diptych.token_logprobs import TokenLogprobs

UNKNOWN: Final = (-1,)  # tokens of a chunk that follows another: no token's id, so as to be noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one sequence to run through the model.

    Tokens ``token_ids`` stand at positions ``start, start + 1, ...``; their KV is
    written through ``block_table`` and attention reads everything before them.
    """

    token_ids: tuple[int, ...]
    start: int  # position of token_ids[0] = tokens already computed
    # Covers start + len(token_ids) tokens. An array("q") that the next plan has again, or a
    # longer copy of it, so that ids need not pass through Python one by one.
    block_table: collections.abc.Sequence[int]
    sample: "SampleSpec | None"  # None: more of the prompt follows
    report: Part | None = None  # what to tell of these tokens
    # The chunk of the plan before this one that draws its only token, by index; ``token_ids`` is
    # UNKNOWN then: the device has the token, the host not yet.
    follows: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class History(NamedTuple):
    """The tokens before the one to draw: a copy that nobody changes.

    After a chunk that follows another, all but the last one: the device alone has that.
    """

    token_ids: "array[int]"  # "q": prompt, then output
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """How to draw the token at position ``Chunk.end``."""

    params: SamplingParams
    allow_stop: bool  # False before min_tokens: stop tokens are masked out
    history: History | None = None  # None where ``params.needs_history`` is False
    key: SequenceKey | None = None  # whose it is, where ``params.constraint`` is set
    # By the runner, of those: bit i of byte b is of token 8 * b + i, for all of the vocabulary.
    allowed: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: decode chunks (one token) and prefill chunks, mixed."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class SampledToken(NamedTuple):
    """A drawn token.

    ``margin`` says how far it was from being another one: greedy, the distance
    of its logit to the runner-up's; otherwise the distance of the draw (in
    cumulative probability) to the nearer boundary of its interval. NaN unless
    ``return_margins``.
    """

    token_id: int
    margin: float
    logprobs: TokenLogprobs | None = None  # if the parameters ask for them


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The runner's answer: ``tokens[i]`` belongs to ``plan.chunks[i]``.

    None where the chunk asked for no sample; an error where none can be drawn, or where what
    the chunk was to report are no numbers. ``reports`` has what the others had to, by index.
    """

    tokens: tuple[SampledToken | DiptychError | None, ...]
    duration_s: float  # model thread, inputs to tokens
    reports: collections.abc.Mapping[int, Told] = field(default_factory=dict)


class SequenceUpdate(NamedTuple):
    """What a step did to one sequence (that was not released meanwhile)."""

    sequence: Sequence
    num_computed_tokens: int  # KV complete up to here
    num_step_tokens: int  # whose KV this step computed
    token: SampledToken | None
    position: int | None  # of the token
    finish_reason: FinishReason | None
    error: DiptychError | None = None  # it ended, or (prefill_only) will have no token
    report: Told | None = None  # what the step told of its tokens


def check_step_limits(*, max_batched_tokens: int, max_num_seqs: int) -> None:
    """Raise ValueError unless a step has room for a token of each sequence in the batch."""
    if max_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_batched_tokens ({max_batched_tokens}) must be at least "
            f"max_num_seqs ({max_num_seqs}): each running sequence takes one"
        )
