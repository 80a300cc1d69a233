"""What a source of workers is: it tells, over and over, the whole set of addresses."""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from diptych.errors import ConfigurationError
from router.placement.place import Place

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic, s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Every worker that this router shall use, as host:port, by pool.

    ``has_prefill_pool`` says whether there shall be prefill workers, also while none is there;
    ``places`` where those are of whom the source knows it, by address: a worker's own word counts
    before it.
    """

    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()
    has_prefill_pool: bool = True
    places: Mapping[str, Place] = field(default_factory=dict)


class Discovery(Protocol):
    """Tells where workers are. Knows nothing of how they are."""

    def targets(self) -> AsyncIterator[Targets]:
        """The whole set now and after each change; it may end when nothing can change any more.

        An address that is missing is left at once: what runs there fails over. So a source
        keeps an address until its process has ended, not until it drains. A source that
        cannot be asked, or says what makes no sense, yields nothing: what was known stays.
        Raises ConfigurationError where it can never become right.
        """
        ...

    @property
    def age_s(self) -> float:
        """Since the source last said, or confirmed, what the set is; from the start before that."""
        ...


class Freshness:
    """When a source was last heard. Owned by the source."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard_s = clock()

    def heard(self) -> None:
        """The source said what the set is now."""
        self._heard_s = self._clock()

    @property
    def age_s(self) -> float:
        """See :class:`Discovery`."""
        return self._clock() - self._heard_s


class Doubt:
    """Why what a source says is not believed: told once, until it is another reason, or none."""

    def __init__(self, warning: str, **about: object) -> None:
        """``about`` says in the log which source it is."""
        self._warning = warning
        self._about = about
        self._why = ""

    def __bool__(self) -> bool:
        return bool(self._why)

    def because(self, why: str) -> None:
        """Those known stay."""
        if why != self._why:
            self._why = why
            logger.warning(self._warning, extra={**self._about, "why": why})

    def over(self) -> None:
        """What it says makes sense again."""
        self._why = ""


class StaticDiscovery:
    """The lists of the settings; nothing changes."""

    age_s = 0.0

    def __init__(self, *, prefill: Iterable[str], decode: Iterable[str]) -> None:
        """Raises ConfigurationError: nobody could decode, ever."""
        named = frozenset(prefill)
        self._targets = Targets(
            prefill=named, decode=frozenset(decode), has_prefill_pool=bool(named)
        )
        if not self._targets.decode:
            raise ConfigurationError("at least one --decode worker is needed")

    async def targets(self) -> AsyncIterator[Targets]:
        """See :class:`Discovery`."""
        yield self._targets
