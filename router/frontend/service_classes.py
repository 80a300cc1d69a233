"""What a request may claim, class and objectives: by its word, its tenant's, or the settings'."""

import math
from collections.abc import Callable

from diptych.errors import ClassNotAllowedError
from diptych.request_class import RequestClass
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.tenant import Tenant
from router.client_settings import ClassesSettings, Objectives
from router.placement.claim import Claim


class ServiceClasses:
    """Makes claims. Pure but for the clock, whose moments they name."""

    def __init__(
        self, settings: ClassesSettings, for_all: Objectives, clock: Callable[[], float]
    ) -> None:
        """``for_all``: objectives of classes that have none of their own."""
        self._settings = settings
        self._for_all = for_all
        self._clock = clock

    def claim(self, level: ServiceLevel, tenant: Tenant, deadline_s: float | None = None) -> Claim:
        """What a request that came now may claim. Raises ClassNotAllowedError.

        ``deadline_s``: when nobody waits for its answer any more, a moment of the clock. Its first
        token is due by then at the latest.
        """
        request_class = self._class_of(level, tenant)
        settings = self._settings.of(request_class)
        ttft_ms = _first(level.ttft_ms, settings.ttft_ms, self._for_all.ttft_ms)
        tpot_ms = _first(level.tpot_ms, settings.tpot_ms, self._for_all.tpot_ms)
        ttft_s, now_s = None if ttft_ms is None else ttft_ms / 1000, self._clock()
        left_s = math.inf if deadline_s is None else deadline_s - now_s
        asks_first_too = ttft_s is not None and left_s < ttft_s
        has_deadline_first = left_s < (math.inf if ttft_s is None else ttft_s)
        if has_deadline_first:
            ttft_s = left_s
        return Claim(
            request_class,
            tenant.name,
            None if ttft_s is None else now_s + ttft_s,
            None if tpot_ms is None else tpot_ms / 1000,
            ttft_s,
            has_deadline_first,
            asks_first_too,
        )

    def claim_without_objectives(self, tenant: Tenant) -> Claim:
        """What work may claim that says nothing, and whose end nobody waits for token by token."""
        return Claim(self._class_of(NO_LEVEL, tenant), tenant.name)

    def _class_of(self, level: ServiceLevel, tenant: Tenant) -> RequestClass:
        """Nobody who did not ask for more than he may have is refused: he gets what he may."""
        highest = tenant.classes.highest_class or self._settings.highest
        if level.priority is not None:
            if level.priority.is_above(highest):
                raise ClassNotAllowedError(
                    f"priority: {level.priority} is not for this client, at most {highest}",
                    field="priority",
                )
            return level.priority
        default = tenant.classes.default_class or self._settings.default
        return highest if default.is_above(highest) else default


def _first(*values: float | None) -> float | None:
    """The first that says anything."""
    return next((value for value in values if value is not None), None)
