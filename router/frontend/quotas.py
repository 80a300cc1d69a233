"""How much each tenant may take of this router, and what it has taken. Pure."""

import enum
from collections.abc import Callable, Sequence

from diptych.errors import RETRY_LATER_S, QuotaExceededError
from diptych.tenant import Limits, Tenant
from router.frontend.minute_bucket import MinuteBucket
from router.placement.comeback import comeback_s
from router.placement.departures import Departures

_LEAST_SWEPT = 1024  # tenants, before those who are idle are forgotten


class Quota(enum.Enum):
    """What can run out, by its name in limits."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "max_concurrent"


class _Account:
    """What one tenant has taken. Owned by Quotas.

    What it took of a limit it took where the limit does not hold for a while: its tokens may name
    different ones.
    """

    def __init__(self, departures: Departures) -> None:
        """``departures`` are of its requests."""
        self.limits = Limits()
        self.num_open = 0
        self.departures = departures
        self._requests: MinuteBucket | None = None
        self._tokens: MinuteBucket | None = None

    @property
    def requests(self) -> MinuteBucket | None:
        """What is left of them; None: they are not limited."""
        return None if self.limits.requests_per_minute is None else self._requests

    @property
    def tokens(self) -> MinuteBucket | None:
        """As of requests."""
        return None if self.limits.tokens_per_minute is None else self._tokens

    def limit(self, limits: Limits, now_s: float) -> None:
        """These hold from now on."""
        if limits != self.limits:
            self.limits = limits
            self._requests = _changed(self._requests, limits.requests_per_minute, now_s)
            self._tokens = _changed(self._tokens, limits.tokens_per_minute, now_s)

    @property
    def is_full(self) -> bool:
        """Whether as many are open as may be."""
        limit = self.limits.max_concurrent
        return limit is not None and self.num_open >= limit

    def leave(self, num: int) -> None:
        """So many that were open are not."""
        for _ in range(num):
            self.departures.left(others_wait=self.is_full)
        self.num_open -= num

    def is_idle(self, now_s: float) -> bool:
        """Whether a new one would be the same."""
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        return not self.num_open and all(bucket.is_full(now_s) for bucket in buckets)


class Quotas:
    """Admits requests within their tenants' quotas. Event loop only.

    A request that is refused takes nothing. Invariant: what ``admit`` counted as open is
    counted out by ``Admitted.leave``, however the request ends.
    """

    def __init__(
        self,
        defaults: Limits,
        clock: Callable[[], float],
        refused: Callable[[str], None],
        chance: Callable[[], float] = lambda: 0.5,
    ) -> None:
        """``defaults``: of tenants of whom nothing is said. ``refused`` is told what ran out.

        ``chance``, uniform in [0, 1), spreads those who are told to come back when one has ended.
        """
        self._defaults = defaults
        self._clock = clock
        self._refused = refused
        self._chance = chance
        self._accounts: dict[str, _Account] = {}
        self._sweep_at = _LEAST_SWEPT

    @property
    def num_tenants(self) -> int:
        """Of whom something is remembered."""
        return len(self._accounts)

    def take_places(self, tenant: Tenant, num_requests: int, at_most: int) -> "Places":
        """Those that a tenant has left of ``max_concurrent``, for requests that take turns.

        Raises QuotaExceededError: there is none, or the tenant cannot make so many requests now.
        """
        now_s = self._clock()
        account = self._account(tenant, now_s)
        num_places = self._room(account, at_most)
        self._check(Quota.REQUESTS, account.requests, num_requests, now_s)
        return Places(account, num_places)

    def admit(self, tenant: Tenant, at_least_tokens: int) -> "Admitted":
        """One request more, which will reserve so many tokens or more.

        Raises QuotaExceededError.
        """
        now_s = self._clock()
        account = self._account(tenant, now_s)
        num_places = self._room(account, 1)
        self._check(Quota.REQUESTS, account.requests, 1, now_s)
        self._check(Quota.TOKENS, account.tokens, at_least_tokens, now_s)
        if account.requests is not None:
            account.requests.take(1)
        return Admitted(account, Places(account, num_places), self._reserve)

    def admit_all(self, tenant: Tenant, num_tokens: Sequence[int]) -> "Sequence[Admitted]":
        """Requests on their tenant's ``Places``: all of them, with all their tokens, or none.

        ``num_tokens`` is what each reserves. Raises QuotaExceededError.
        """
        now_s = self._clock()
        account = self._account(tenant, now_s)
        self._check(Quota.REQUESTS, account.requests, len(num_tokens), now_s)
        self._check(Quota.TOKENS, account.tokens, sum(num_tokens), now_s)
        if account.requests is not None:
            account.requests.take(len(num_tokens))
        if account.tokens is not None:
            account.tokens.take(sum(num_tokens))
        return [Admitted(account, Places(account, 0), self._reserve, each) for each in num_tokens]

    def _room(self, account: _Account, at_most: int) -> int:
        limit = account.limits.max_concurrent
        if limit is None:
            return at_most
        if account.is_full:
            expected_s = max(RETRY_LATER_S, account.departures.next_in_s())
            raise self._error(Quota.CONCURRENT, limit, comeback_s(expected_s, self._chance))
        return min(at_most, limit - account.num_open)

    def _reserve(self, account: _Account, num_tokens: int) -> None:
        self._check(Quota.TOKENS, account.tokens, num_tokens, self._clock())
        if account.tokens is not None:
            account.tokens.take(num_tokens)

    def _check(self, quota: Quota, bucket: MinuteBucket | None, amount: int, now_s: float) -> None:
        if bucket is None:
            return
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0:
            raise self._error(quota, bucket.per_minute, wait_s)

    def _error(self, quota: Quota, limit: int, retry_after_s: float) -> QuotaExceededError:
        self._refused(quota.value)
        return QuotaExceededError(
            f"{quota.value}: the tenant's quota of {limit} is used up",
            retry_after_s=retry_after_s,
            quota=quota.value,
        )

    def _account(self, tenant: Tenant, now_s: float) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            self._sweep(now_s)
            departures = Departures(self._clock, self._chance)
            account = self._accounts[tenant.name] = _Account(departures)
        account.limit(tenant.limits.over(self._defaults), now_s)
        return account

    def _sweep(self, now_s: float) -> None:
        """Forget who is idle, so rarely that it costs little for each tenant that comes."""
        if len(self._accounts) < self._sweep_at:
            return
        kept = {name: each for name, each in self._accounts.items() if not each.is_idle(now_s)}
        self._accounts = kept
        self._sweep_at = max(_LEAST_SWEPT, 2 * len(kept))


class Places:
    """So many of what a tenant may have open at once; its owner calls ``leave``."""

    def __init__(self, account: _Account, num: int) -> None:
        self._account = account
        self.num = num
        """Those that were not left yet."""
        account.num_open += num

    def leave_one(self) -> None:
        """Another may have it."""
        self._account.leave(1)
        self.num -= 1

    def leave(self) -> None:
        """Others may have what is left of them. Idempotent."""
        self._account.leave(self.num)
        self.num = 0


class Admitted:
    """One request that was admitted; its owner calls ``leave`` once."""

    def __init__(
        self,
        account: _Account,
        places: Places,
        reserve: Callable[[_Account, int], None],
        num_reserved: int | None = None,
    ) -> None:
        self._account = account
        self._places = places
        self._reserve = reserve
        self._num_reserved = num_reserved
        # Those it took from: another limit may hold by the time that it leaves.
        self._requests = account.requests
        self._tokens = None if num_reserved is None else account.tokens
        self._has_left = self._has_answer = False
        self._num_used = 0
        self._counts = True  # as a request

    def reserve(self, num_tokens: int) -> None:
        """All that the request may come to, unless that was done. Raises QuotaExceededError."""
        if self._num_reserved is not None:
            return
        try:
            self._reserve(self._account, num_tokens)
        except QuotaExceededError:
            self._uncount()
            raise
        self._num_reserved, self._tokens = num_tokens, self._account.tokens

    def leave(self, num_used_tokens: int, *, has_answer: bool | None = None) -> None:
        """It ended, and used so many of the tokens; ``has_answer``: some are an answer's, None: if
        any are used.
        """
        self._places.leave()
        self._has_left = True
        self._has_answer = num_used_tokens > 0 if has_answer is None else has_answer
        if self._tokens is not None:
            num_reserved = self._num_reserved or 0
            self._num_used = min(num_used_tokens, num_reserved)
            self._tokens.give_back(num_reserved - self._num_used)

    def withdraw(self) -> None:
        """In place of ``leave``: it was never begun, or there was no room, and took nothing."""
        self.leave(0)
        self.uncount()

    def uncount(self) -> None:
        """If it has left without an answer: it is no request, and used nothing. Idempotent."""
        if not self._has_left or self._has_answer:
            return
        self._uncount()
        num_used, self._num_used = self._num_used, 0
        if self._tokens is not None:
            self._tokens.give_back(num_used)

    def _uncount(self) -> None:
        if self._counts:
            self._counts = False
            if self._requests is not None:
                self._requests.give_back(1)


def _changed(bucket: MinuteBucket | None, limit: int | None, now_s: float) -> MinuteBucket | None:
    if limit is None:
        return bucket
    if bucket is None:
        return MinuteBucket(limit, now_s)
    bucket.change(limit, now_s)
    return bucket
