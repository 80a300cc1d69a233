"""What to simulate, as it is said on the command line."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from diptych.engine.scheduling.step import check_step_limits
from diptych.service_level import ObjectiveMs
from diptych.simulation.cluster import Split, Workers
from diptych.simulation.engine import EngineLimits
from diptych.simulation.measured_steps import DEMO, read_steps
from diptych.simulation.router import RouterLimits, Wires
from diptych.simulation.workload import Lengths, Shape, Swing, drawn, replayed, scaled
from diptych.step_model import StepModel
from diptych.tenant import MAX_LIMIT

_ROLES = ("prefill", "decode", "soft")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MOST_WORKERS = 4096
_MOST_BLOCKS = 2**28  # of all workers, 16 bytes each
_MOST_TIMES = 1e6  # as many, or as fast
_GIGA = 1e9


def _split(text: str) -> Split:
    """Raises ValueError."""
    numbers = dict.fromkeys(_ROLES, 0)
    for part in text.split(","):
        role, _, number = part.partition("=")
        if numbers.pop(role, 1) or _NUMBER.fullmatch(number) is None:
            raise ValueError("expected prefill=P,decode=D,soft=S, or some of these")
        numbers[role] = int(number)
    split = Split(*(numbers[role] for role in _ROLES))
    if not (split.num_decode or split.num_soft):
        raise ValueError("expected a worker at least that decodes: decode=D or soft=S")
    if sum(split) > _MOST_WORKERS:
        raise ValueError(f"expected {_MOST_WORKERS} workers at the most (got {sum(split)})")
    return split


def _check_splits(text: str) -> str:
    if not text.split():
        raise ValueError("name the workers of one deployment at least")
    for part in text.split():
        _split(part)
    return text


class SimulationConfig(BaseModel):
    """Answer what so many workers would give: replay a trace against simulated ones.

    Placement, waiting room, scheduler, block pool and prefix cache are the real ones; steps take
    what a worker's learned step model says. Several deployments get the same requests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    trace: Path = Field(
        description="Requests: CSV as of the Azure LLM inference traces or of BurstGPT (without "
        "those that have no response tokens), or JSON lines as of Mooncake's (timestamp in ms, "
        "input_length, output_length, hash_ids of 512 tokens) or of Qwen-Bailian's (likewise and "
        "chat_id; timestamp in s, hash_ids of 16 tokens); .gz: compressed."
    )
    workers: Annotated[str, AfterValidator(_check_splits)] = Field(
        description="Deployments, each prefill=P,decode=D,soft=S, of which some may be left out: "
        "soft workers have both roles; decode=D alone is colocated engines. Several deployments "
        "are parted by spaces."
    )
    placement: list[Literal["least-loaded", "predicted"]] = Field(
        ["least-loaded"],
        min_length=1,
        description="The router's policies; each deployment is run with each.",
    )
    rate: list[Annotated[float, Field(gt=0, le=_MOST_TIMES)]] = Field(
        [],
        description="Poisson arrivals of the trace's lengths, requests per second; each is run. "
        "Unset: the trace's own times, from its beginning again when it is over.",
    )
    speed: float = Field(
        1.0,
        ge=1 / _MOST_TIMES,
        le=_MOST_TIMES,
        description="The trace's own times pass so much faster.",
    )
    duration_s: float = Field(60.0, gt=0, description="Requests arrive for so long, s.")
    drain_s: float = Field(
        10.0, ge=0, description="What is not done so long after that is not answered, s."
    )
    divide: float = Field(1.0, ge=0.001, description="All lengths of the trace by this.")
    max_prompt: int = Field(
        1024, ge=1, description="Tokens, after dividing; longer prompts are cut to that."
    )
    max_output: int = Field(
        256,
        ge=2,
        description="Tokens, after dividing; longer answers are cut to that. None has less than 2.",
    )
    burst_ratio: float = Field(
        1.0,
        ge=1,
        le=_MOST_TIMES,
        description="With rate: in the first half of each period so many times as many arrive as "
        "in the second.",
    )
    drift_ratio: float = Field(
        1.0,
        ge=1,
        le=_MOST_TIMES,
        description="The ratio of input to output is so many times the trace's in the first half "
        "of each period, and so many times smaller than the trace's in the second.",
    )
    period_s: float = Field(60.0, gt=0, description="Of bursts and of the drift, s.")
    ttft_multiple: float = Field(
        5.0,
        gt=0,
        description="The table's objective, of the unloaded median; predicted aims at it.",
    )
    tpot_multiple: float = Field(2.0, gt=0, description="Likewise.")
    steps: Path | None = Field(
        None, description="File with a worker's step model. Unset: of the demo model on one core."
    )
    noise: bool = Field(True, description="Steps vary as the step model's upper ratio says.")
    max_num_seqs: int = Field(64, ge=1, description="As a worker's.")
    max_batched_tokens: int = Field(512, ge=1, description="As a decode worker's.")
    prefill_max_batched_tokens: int = Field(
        512, ge=1, description="As a prefill worker's, whose own default is 1024."
    )
    tpot_ms: ObjectiveMs | None = Field(None, description="As a decode worker's.")
    local_prefill: bool = Field(
        True, description="As a decode worker's: it may compute prompts itself."
    )
    num_blocks: int = Field(2048, ge=1, description="KV blocks of each worker.")
    block_size: int = Field(16, ge=1, le=256, description="As a worker's.")
    max_model_len: int = Field(
        4096,
        ge=4,
        description="As a worker's, tokens. Longer prompts are cut to it less 2, not refused, and "
        "answers to what it leaves them.",
    )
    transfer_gb_per_s: float = Field(
        1.0, gt=0, description="Into one decode worker, GB/s; nixl on one machine has about 4."
    )
    transfer_latency_ms: float = Field(
        2.0, ge=0, description="Of a pull, to begin and to prove it."
    )
    message_ms: float = Field(1.0, ge=0, description="One way, between router and worker.")
    kv_bytes_per_token: float = Field(46080.0, gt=0, description="The demo model's, if unset.")
    routers: int = Field(1, ge=1, le=64, description="Requests go to them in turn.")
    max_queue: int = Field(256, ge=0, description="As the router's.")
    max_concurrent: int = Field(256, ge=1, description="As the router's.")
    max_pending_prefill_tokens: int = Field(
        16384, ge=1, le=MAX_LIMIT, description="As the router's."
    )
    prefill_runway_s: float = Field(2.0, gt=0, description="As the router's, s.")
    refuse_unreachable: bool = Field(
        True, description="As the router's, and as if each request asked for the table's objective."
    )
    local_prefill_below_tokens: int = Field(64, ge=0, description="As the router's.")
    seed: int = Field(1, ge=0, description="Of arrivals, noise and draws: the same give the same.")
    json_: Path | None = Field(None, alias="json", description="Write every outcome here.")
    svg: Path | None = Field(None, description="Draw goodput over time here.")
    save_steps: Path | None = Field(None, description="Write the step model that was used here.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for budget in (self.max_batched_tokens, self.prefill_max_batched_tokens):
            check_step_limits(max_batched_tokens=budget, max_num_seqs=self.max_num_seqs)
        if self.num_blocks * self.block_size < self.max_model_len - 1:
            raise ValueError(f"num_blocks: {self.num_blocks} do not hold max_model_len tokens")
        for split in self.splits:
            if sum(split) * self.num_blocks > _MOST_BLOCKS:
                raise ValueError(f"num_blocks: {split.name} have more than {_MOST_BLOCKS} in all")
            if not (self.local_prefill or split.num_prefill or split.num_soft):
                raise ValueError(f"local_prefill: off, nobody computes prompts of {split.name}")
        if self.burst_ratio != 1 and not self.rate:
            raise ValueError("burst_ratio: wants a rate")
        return self

    @property
    def splits(self) -> list[Split]:
        """The deployments."""
        return [_split(text) for text in self.workers.split()]

    @property
    def lengths(self) -> Lengths:
        """What becomes of the trace's."""
        return Lengths(self.divide, self.max_prompt, self.max_output)

    def step_model(self) -> StepModel:
        """From the file, or the default. Raises ConfigurationError."""
        return DEMO if self.steps is None else read_steps(self.steps)

    def engines(self, model: StepModel) -> Workers:
        """Both roles'."""
        decode = EngineLimits(
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1000,
            local_prefill=self.local_prefill,
        )
        prefill = decode._replace(max_batched_tokens=self.prefill_max_batched_tokens, tpot_s=None)
        return Workers(prefill, decode, model, is_noisy=self.noise)

    def wires(self) -> Wires:
        """Messages and transfers."""
        return Wires(
            message_s=self.message_ms / 1000,
            bytes_per_s=self.transfer_gb_per_s * _GIGA,
            pull_s=self.transfer_latency_ms / 1000,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )

    def limits(self) -> RouterLimits:
        """The router's."""
        return RouterLimits(
            self.max_queue,
            self.max_concurrent,
            self.max_pending_prefill_tokens,
            self.prefill_runway_s,
        )

    def requests(self, shapes: Sequence[Shape], rate: float | None) -> Iterator[Shape]:
        """In order of time, with our lengths; None: at the trace's own times."""
        swing = Swing(self.period_s, self.burst_ratio, self.drift_ratio)
        if rate is None:
            arrivals = replayed(shapes, self.speed, self.duration_s)
        else:
            arrivals = drawn(shapes, rate, self.duration_s, swing, random.Random(self.seed))
        return scaled(arrivals, self.lengths, swing)
