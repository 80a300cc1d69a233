"""Faults to inject into transfers, for tests: the rules, and when they fire. Pure.

A *script* is a list of rules. Each names a point that every pull passes, and what goes
wrong there::

    [{"at": "range", "do": "corrupt", "field": "digests", "num_tokens": 137}]

Points are the messages of a Fetch stream (open, opened, range, data, confirm,
confirmed) and ``read``: one movement of bytes into local blocks. At the worker that
reads, every point can be reached; at the source ``open`` and ``range``, for what only a
source can do (``revoke``). Probes are left alone, or no pair would ever be proven.

Only a worker started with ``transfer.allow_faults`` has a script.
"""

import random
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from diptych.errors import InvalidRequestError

Point = Literal["open", "opened", "range", "data", "confirm", "confirmed", "read"]
Deed = Literal[
    "drop", "delay", "duplicate", "corrupt", "truncate", "reorder",
    "replay", "swap", "revoke", "hang", "linger", "fail",
]  # fmt: skip

_ONLY_AT: dict[str, tuple[str, ...]] = {
    "replay": ("open",),
    "swap": ("open",),
    "revoke": ("open", "range"),
    "hang": ("read",),
    "linger": ("read",),
    "fail": ("read",),
}


class FaultRule(BaseModel):
    """One thing that goes wrong. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: Point = Field(description="The point of a pull where it happens.")
    do: Deed = Field(
        description="drop: it never comes (a read: reported done, nothing landed). delay: by "
        "seconds. duplicate. corrupt: one bit, or two of a list's numbers "
        "exchanged. truncate: the second half is missing. reorder: a message after the next one; a "
        "read: its first and last half swapped. At open, replay: "
        "an earlier pull's ticket; swap: that of the next pull to come here, which gets this "
        "one's. At a source, revoke: another grant takes the ticket's place. "
        "At read, hang: never ends; linger: lands, but ends only seconds later; fail: ends with "
        "an error."
    )
    field: str = Field(
        "",
        description="Of the message, for corrupt and truncate. Unset: ticket, end_token, "
        "digests, payload, or digest.",
    )
    nth: int = Field(1, ge=1, description="Which of one pull's events of that kind; 1: the first.")
    num_tokens: int | None = Field(
        None, ge=1, description="Only pulls of sequences of so many tokens. Unset: all."
    )
    times: int | None = Field(
        1, ge=1, description="How often it fires in all. Unset (null): always."
    )
    seconds: float = Field(0.0, ge=0, description="Of delay and linger, s.")
    seconds_max: float | None = Field(
        None, ge=0, description="Of each one, a time from seconds to this is drawn, s."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.at not in _ONLY_AT.get(self.do, (self.at,)):
            raise ValueError(f"{self.do} is possible at {', '.join(_ONLY_AT[self.do])} only")
        if self.seconds_max is not None and self.seconds_max < self.seconds:
            raise ValueError("seconds_max is less than seconds")
        return self


_RULES: TypeAdapter[tuple[FaultRule, ...]] = TypeAdapter(tuple[FaultRule, ...])


def parse_rules(text: str) -> tuple[FaultRule, ...]:
    """Read a JSON list of rules. Raises InvalidRequestError that names the field."""
    try:
        return _RULES.validate_json(text or "[]")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        raise InvalidRequestError(first["msg"], field=f"rules{where}") from None


class Fault:
    """A rule that fires here and now."""

    def __init__(self, rule: FaultRule, seconds: float) -> None:
        self.do = rule.do
        self.field = rule.field
        self.seconds = seconds


class FaultScript:
    """The rules in force and how often each fired. Event loop only."""

    def __init__(self, rules: Sequence[FaultRule] = ()) -> None:
        self.random = random.Random(0)
        self.set_rules(rules)

    def set_rules(self, rules: Sequence[FaultRule]) -> None:
        """Replace all; counts begin at 0."""
        self.rules = tuple(rules)
        self.num_fired = [0] * len(self.rules)

    def of_pull(self, num_tokens: int) -> "PullFaults":
        """The script as one pull of a sequence of ``num_tokens`` meets it."""
        return PullFaults(self, num_tokens)

    def fire(self, at: Point, nth: int, num_tokens: int) -> Fault | None:
        """The first rule that applies to this event, if any."""
        for index, rule in enumerate(self.rules):
            if rule.at != at or rule.nth != nth or rule.num_tokens not in (None, num_tokens):
                continue
            if rule.times is not None and self.num_fired[index] >= rule.times:
                continue
            self.num_fired[index] += 1
            return Fault(rule, self._seconds(rule))
        return None

    def _seconds(self, rule: FaultRule) -> float:
        if rule.seconds_max is None:
            return rule.seconds
        return self.random.uniform(rule.seconds, rule.seconds_max)


class PullFaults:
    """Counts one pull's events, and says which go wrong. Event loop only."""

    def __init__(self, script: FaultScript, num_tokens: int) -> None:
        self.script = script
        self._num_tokens = num_tokens
        self._num_seen: dict[str, int] = {}

    def at(self, point: Point) -> Fault | None:
        """The next event of this kind comes."""
        nth = self._num_seen[point] = self._num_seen.get(point, 0) + 1
        return self.script.fire(point, nth, self._num_tokens)
