"""What tenants may take, by a clock that the test sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import QuotaExceededError
from diptych.tenant import NOBODY, Limits, Tenant
from router.frontend.minute_bucket import MinuteBucket
from router.frontend.quotas import Admitted, Quotas


class World:
    def __init__(self, defaults: Limits = Limits()) -> None:  # noqa: B008 - it is immutable
        self.now_s = 1000.0
        self.refused: list[str] = []
        self.chance = 0.5
        self.quotas = Quotas(defaults, lambda: self.now_s, self.refused.append, lambda: self.chance)

    def admit(self, limits: Limits = Limits(), tokens: int = 1, name: str = "a") -> Admitted:  # noqa: B008
        admitted = self.quotas.admit(Tenant(name, limits), tokens)
        admitted.reserve(tokens)
        return admitted

    def refusal(
        self,
        limits: Limits = Limits(),  # noqa: B008
        tokens: int = 1,
        name: str = "a",
    ) -> tuple[str, float]:
        """Of what quota, and when to come back."""
        with pytest.raises(QuotaExceededError) as caught:
            self.admit(limits, tokens, name)
        error = caught.value
        assert error.metadata["quota"] in error.message
        assert self.refused.pop() == error.metadata["quota"]
        assert error.retry_after_s is not None
        return error.metadata["quota"], error.retry_after_s


def test_without_limits_everything_is_admitted() -> None:
    world = World()
    for _ in range(1000):
        world.admit(tokens=10**9)


def test_requests_come_back_one_after_the_other() -> None:
    world, limits = World(), Limits(requests_per_minute=6)
    for _ in range(6):
        world.admit(limits)
    quota, wait_s = world.refusal(limits)
    assert quota == "requests_per_minute"
    assert wait_s == pytest.approx(10.0)
    world.now_s += 9.0
    quota, wait_s = world.refusal(limits)
    assert quota == "requests_per_minute"
    assert wait_s == pytest.approx(1.0)
    world.now_s += 1.5
    world.admit(limits)
    quota, wait_s = world.refusal(limits)
    assert quota == "requests_per_minute"
    assert wait_s == pytest.approx(9.5)


def test_who_asked_for_nothing_for_long_has_a_minutes_worth() -> None:
    world, limits = World(), Limits(requests_per_minute=6)
    world.admit(limits)
    world.now_s += 3600.0
    for _ in range(6):
        world.admit(limits)
    assert world.refusal(limits)[1] == pytest.approx(10.0)


def test_open_requests_count_until_they_end() -> None:
    world, limits = World(), Limits(max_concurrent=2)
    first, _ = world.admit(limits), world.admit(limits)
    assert world.refusal(limits) == ("max_concurrent", 1.0)
    first.leave(0)
    world.admit(limits)


def test_those_for_whom_no_place_is_free_come_back_about_when_one_is_due_and_not_together() -> None:
    world, limits = World(), Limits(max_concurrent=2)
    running = [world.admit(limits), world.admit(limits)]
    for _ in range(4):  # one ends each ten seconds
        world.now_s += 10.0
        running.pop(0).leave(0)
        running.append(world.admit(limits))
    world.now_s += 2.0
    assert world.refusal(limits)[1] == pytest.approx(8.0)
    world.chance = 0.0
    assert world.refusal(limits)[1] == pytest.approx(4.0)
    world.now_s += 20.0  # it is overdue: nobody knows
    waits = set()
    for world.chance in (0.0, 0.25, 0.75):
        waits.add(world.refusal(limits)[1])
    assert waits == {0.5, 0.75, 1.25}
    assert world.admit(limits, name="another")


def test_ends_while_places_were_free_foretell_nothing() -> None:
    world, limits = World(), Limits(max_concurrent=2)
    for _ in range(4):
        one = world.admit(limits)
        world.now_s += 10.0
        one.leave(0)
    world.admit(limits), world.admit(limits)
    assert world.refusal(limits) == ("max_concurrent", 1.0)


def test_what_was_reserved_and_not_used_is_given_back() -> None:
    world, limits = World(), Limits(tokens_per_minute=100)
    first = world.admit(limits, tokens=100)
    quota, wait_s = world.refusal(limits, tokens=50)
    assert quota == "tokens_per_minute"
    assert wait_s == pytest.approx(30.0)
    first.leave(40)
    world.admit(limits, tokens=60)
    assert world.refusal(limits, tokens=1)[0] == "tokens_per_minute"


def test_one_who_leaves_before_it_reserved_owes_nothing() -> None:
    world, limits = World(), Limits(tokens_per_minute=100, max_concurrent=1)
    world.quotas.admit(Tenant("a", limits), 1).leave(0)
    world.admit(limits, tokens=100)


def test_a_request_larger_than_a_minutes_worth_waits_for_a_full_bucket_and_owes() -> None:
    world, limits = World(), Limits(tokens_per_minute=100)
    world.admit(limits, tokens=300)
    assert world.refusal(limits, tokens=1)[1] == pytest.approx(121, abs=1)
    world.now_s += 181
    world.admit(limits, tokens=300)


def test_a_refused_request_takes_nothing() -> None:
    world, limits = World(), Limits(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2)
    world.admit(limits, tokens=60)
    late = world.quotas.admit(Tenant("a", limits), 1)  # nobody has counted its prompt yet
    with pytest.raises(QuotaExceededError, match="tokens_per_minute"):
        late.reserve(50)
    late.leave(0)
    world.admit(limits, tokens=40)


def test_tenants_do_not_share_quotas() -> None:
    world, limits = World(), Limits(requests_per_minute=1)
    world.admit(limits, name="a")
    world.admit(limits, name="b")
    assert world.refusal(limits, name="a")[0] == "requests_per_minute"


def test_what_a_key_does_not_say_the_settings_say() -> None:
    world = World(Limits(requests_per_minute=1, max_concurrent=5))
    said = Limits(requests_per_minute=2)
    world.admit(said)
    world.admit(said)
    assert world.refusal(said)[0] == "requests_per_minute"
    world.quotas.admit(NOBODY, 1)
    with pytest.raises(QuotaExceededError, match=r"requests_per_minute: .* 1 "):
        world.quotas.admit(NOBODY, 1)


def test_limits_that_change_count_from_the_next_request_on() -> None:
    world = World()
    for _ in range(10):
        world.admit(Limits(requests_per_minute=10))
    assert world.refusal(Limits(requests_per_minute=10))[0] == "requests_per_minute"
    world.admit(Limits(requests_per_minute=20))
    assert world.refusal(Limits(requests_per_minute=5))[1] == pytest.approx(84.0)
    world.admit()


def test_who_took_nothing_of_a_new_limit_gives_nothing_back_to_it() -> None:
    world = World()
    before = world.admit(tokens=100_000)
    for limits in (Limits(tokens_per_minute=1000), Limits(requests_per_minute=1)):
        world.admit(limits, 1000)
        before.withdraw()
        world.refusal(limits)


def test_tokens_that_name_other_limits_leave_what_was_taken() -> None:
    """Of one tenant, used in turns: neither makes the other's minute anew."""
    world = World()
    some, others = Limits(requests_per_minute=10), Limits(tokens_per_minute=100)
    for _ in range(10):
        world.admit(some)
    world.admit(others, tokens=100)
    assert world.refusal(some)[1] == pytest.approx(6.0)
    assert world.refusal(others)[0] == "tokens_per_minute"
    world.now_s += 6.0
    world.admit(some, tokens=100_000).withdraw()
    assert world.refusal(others, tokens=11)[0] == "tokens_per_minute"
    world.admit(others, tokens=10)


def test_who_is_refused_by_another_tokens_limit_gives_back_what_it_took() -> None:
    world = World()
    some, others = Limits(requests_per_minute=1), Limits(tokens_per_minute=100)
    late = world.quotas.admit(Tenant("a", some), 1)  # nobody has counted its prompt yet
    world.admit(others, tokens=100)
    with pytest.raises(QuotaExceededError):
        late.reserve(1)
    late.leave(0)
    world.admit(some)


def test_tenants_who_are_idle_are_forgotten() -> None:
    world, limits = World(), Limits(requests_per_minute=60)
    busy = world.admit(limits, name="busy")
    for number in range(5000):
        world.now_s += 1.0
        world.admit(limits, name=str(number)).leave(0)
    assert world.quotas.num_tenants <= 1025
    busy.leave(0)
    assert world.refused == []


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(1, 150), st.floats(0, 1)), min_size=1, max_size=60
    )
)
def test_no_tenant_gets_more_than_its_rate_and_one_burst(
    asked: list[tuple[float, int, float]],
) -> None:
    """However requests come, are refused and end."""
    world, limits = World(), Limits(tokens_per_minute=100)
    began_s, used = world.now_s, 0
    for pause_s, tokens, share in asked:
        world.now_s += pause_s
        try:
            admitted = world.admit(limits, tokens)
        except QuotaExceededError as error:
            world.now_s += (error.retry_after_s or 0.0) + 1e-6
            admitted = world.admit(limits, tokens)  # what it says is true
        admitted.leave(int(tokens * share))
        used += int(tokens * share)
        assert used <= 100 + 150 + (world.now_s - began_s) * 100 / 60 + 1


def test_a_bucket_is_never_more_than_full() -> None:
    bucket = MinuteBucket(60, 0.0)
    bucket.give_back(100)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(60, 1000.0) == 0
    assert bucket.is_full(1000.0)


def test_places_are_taken_once_and_left_one_by_one_or_all() -> None:
    world, limits = World(), Limits(max_concurrent=4)
    alone = world.admit(limits)
    places = world.quotas.take_places(Tenant("a", limits), 16, 16)
    assert places.num == 3
    parts = world.quotas.admit_all(Tenant("a", limits), [1, 1, 1])
    assert world.refusal(limits)[0] == "max_concurrent"
    with pytest.raises(QuotaExceededError):
        world.quotas.take_places(Tenant("a", limits), 1, 1)
    for each in parts:
        each.leave(1)
    assert world.refusal(limits)[0] == "max_concurrent"
    places.leave_one()
    world.admit(limits).leave(1)
    for _ in range(2):
        places.leave()
    alone.leave(1)
    assert world.quotas.take_places(Tenant("a", limits), 16, 16).num == 4
    assert world.quotas.take_places(NOBODY, 16, 16).num == 16


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        (Limits(requests_per_minute=10), "requests_per_minute"),
        (Limits(tokens_per_minute=100), "tokens_per_minute"),
    ],
)
def test_several_are_admitted_all_or_none(limits: Limits, quota: str) -> None:
    """Those that are refused take nothing, and those that never begin give back what they took."""
    world, tenant = World(), Tenant("a", limits)
    for each in world.quotas.admit_all(tenant, [10] * 6):
        each.reserve(10)  # it is already
    with pytest.raises(QuotaExceededError) as caught:
        world.quotas.admit_all(tenant, [10] * 5)
    assert world.refused == [caught.value.metadata["quota"]] == [quota]
    rest = world.quotas.admit_all(tenant, [10] * 4)
    assert world.refusal(limits)[0] == quota
    world.refused.clear()
    begun, *others = rest
    for each in others:
        each.withdraw()
    begun.leave(10)
    world.quotas.admit_all(tenant, [10] * 3)
    assert world.refusal(limits)[0] == quota


def test_what_was_never_begun_is_given_back_once() -> None:
    world, limits = World(), Limits(requests_per_minute=3)
    first, *_ = world.quotas.admit_all(Tenant("a", limits), [1] * 3)
    first.withdraw()
    first.uncount()
    world.admit(limits)
    assert world.refusal(limits)[0] == "requests_per_minute"


def test_places_are_for_requests_that_the_tenant_can_make_now() -> None:
    world, tenant = World(), Tenant("a", Limits(requests_per_minute=10, max_concurrent=4))
    world.quotas.admit_all(tenant, [1] * 8)
    with pytest.raises(QuotaExceededError):
        world.quotas.take_places(tenant, 3, 3)
    assert world.refused == ["requests_per_minute"]
    assert world.quotas.take_places(tenant, 2, 2).num == 2


def test_more_than_a_minutes_worth_is_admitted_once_the_minute_is_full() -> None:
    world, tenant = World(), Tenant("a", Limits(requests_per_minute=10))
    world.quotas.admit_all(tenant, [1] * 20)
    with pytest.raises(QuotaExceededError) as caught:
        world.quotas.admit_all(tenant, [1])
    assert caught.value.retry_after_s == pytest.approx(66.0)
