"""What a request may claim: by what it says, then its tenant, then the router's settings."""

import pytest

from diptych.errors import ClassNotAllowedError
from diptych.request_class import RequestClass
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.tenant import NOBODY, Classes, Tenant
from router.client_settings import ClassesSettings, ClassSettings, Objectives
from router.frontend.service_classes import ServiceClasses
from router.placement.claim import Claim

REALTIME, STANDARD, BATCH = RequestClass
NOW_S = 100.0
DEFAULTS = ClassesSettings()
NO_OBJECTIVES = Objectives()


def claim(
    level: ServiceLevel = NO_LEVEL,
    tenant: Tenant = NOBODY,
    settings: ClassesSettings = DEFAULTS,
    for_all: Objectives = NO_OBJECTIVES,
) -> Claim:
    return ServiceClasses(settings, for_all, lambda: NOW_S).claim(level, tenant)


def test_nothing_said_is_standard_and_without_objectives() -> None:
    assert claim() == Claim(STANDARD, "", None, None)


def test_the_request_comes_before_its_class_and_that_before_all() -> None:
    settings = ClassesSettings(realtime=ClassSettings(ttft_ms=500), batch=ClassSettings(tpot_ms=90))
    for_all = Objectives(2000, 60)
    assert claim(ServiceLevel(REALTIME), settings=settings, for_all=for_all) == Claim(
        REALTIME, "", NOW_S + 0.5, 0.06, 0.5
    )
    assert claim(ServiceLevel(BATCH), settings=settings, for_all=for_all) == Claim(
        BATCH, "", NOW_S + 2.0, 0.09, 2.0
    )
    own = ServiceLevel(REALTIME, 250, 30)
    assert claim(own, settings=settings, for_all=for_all) == Claim(
        REALTIME, "", NOW_S + 0.25, 0.03, 0.25
    )


def test_a_first_token_is_due_before_nobody_waits_for_it_any_more() -> None:
    classes = ServiceClasses(DEFAULTS, NO_OBJECTIVES, lambda: NOW_S)
    late, soon, wanted = NOW_S + 9.0, NOW_S + 0.2, ServiceLevel(STANDARD, 500)
    assert classes.claim(NO_LEVEL, NOBODY, late) == Claim(STANDARD, "", late, None, 9.0, True)
    assert classes.claim(wanted, NOBODY, late) == Claim(STANDARD, "", NOW_S + 0.5, None, 0.5)
    bound = classes.claim(wanted, NOBODY, soon)
    assert (bound.first_token_due_s, bound.has_deadline_first) == (soon, True)
    assert bound.ttft_s == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("level", "left_s", "asks_too"),
    [
        (ServiceLevel(STANDARD, 500), 9.0, False),
        (ServiceLevel(STANDARD, 500), 0.2, True),
        (NO_LEVEL, 0.2, False),
    ],
)
def test_who_asks_for_a_first_token_does_so_with_a_deadline_before_it_as_well(
    level: ServiceLevel, left_s: float, asks_too: bool
) -> None:
    classes = ServiceClasses(DEFAULTS, NO_OBJECTIVES, lambda: NOW_S)
    assert classes.claim(level, NOBODY, NOW_S + left_s).asks_first_too is asks_too


@pytest.mark.parametrize(
    ("classes", "settings", "expected"),
    [
        (Classes(), ClassesSettings(default=BATCH), BATCH),
        (Classes(default_class=REALTIME), ClassesSettings(default=BATCH), REALTIME),
        (Classes(highest_class=BATCH), ClassesSettings(), BATCH),
        (Classes(REALTIME, STANDARD), ClassesSettings(), STANDARD),
        (Classes(default_class=REALTIME), ClassesSettings(highest=STANDARD), STANDARD),
        (Classes(highest_class=REALTIME), ClassesSettings(highest=BATCH), STANDARD),
    ],
)
def test_who_says_nothing_gets_what_he_may_have(
    classes: Classes, settings: ClassesSettings, expected: RequestClass
) -> None:
    made = claim(tenant=Tenant("alice", classes=classes), settings=settings)
    assert (made.request_class, made.tenant) == (expected, "alice")


def test_more_than_one_may_have_is_refused_by_its_name() -> None:
    alice = Tenant("alice", classes=Classes(highest_class=STANDARD))
    assert claim(ServiceLevel(STANDARD), alice).request_class is STANDARD
    with pytest.raises(ClassNotAllowedError, match="priority: realtime is not for this client"):
        claim(ServiceLevel(REALTIME), alice)
    with pytest.raises(ClassNotAllowedError):
        claim(ServiceLevel(REALTIME), settings=ClassesSettings(highest=STANDARD))
