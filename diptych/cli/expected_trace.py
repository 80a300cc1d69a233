"""Whether a request's spans reached their collector, as the processes that served it count them.

The counts are among what they tell Prometheus; who tells of none traces nothing.
"""

import asyncio
import secrets
import socket
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from diptych.errors import ConfigurationError
from diptych.v1 import inference_pb2

_ROLE_OF, _SENT, _UNSENT = (
    f"diptych_{name}" for name in ("build_info", "trace_spans_sent", "trace_spans_unsent")
)
_READ_S = 5.0
_LOOK_EVERY_S = 0.5
_NUM_LOOKS = 40


class SpanCounts(NamedTuple):
    """Of all processes of one role that could be asked."""

    is_traced: bool = False
    num_sent: float = 0.0
    num_unsent: float = 0.0


Counts: TypeAlias = Mapping[str, SpanCounts]  # by role
Read: TypeAlias = Callable[[Sequence[str]], Awaitable[Counts]]
Sleep: TypeAlias = Callable[[float], Awaitable[None]]


class ExpectedTrace:
    """One request that is to be traced: what it is sent with, and whether its spans were sent."""

    def __init__(
        self, addresses: str, read: Read | None = None, sleep: Sleep = asyncio.sleep
    ) -> None:
        """``addresses`` are host:port of processes' metrics, with commas; of a name all are asked.

        Raises ConfigurationError: an address is none.
        """
        self.trace_id = secrets.token_hex(16)
        self._addresses = tuple(_host_and_port(each) for each in addresses.split(","))
        self._read, self._sleep = read or _read, sleep
        self._before: Counts = {}

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The W3C context of a client that wants its request traced."""
        return (("traceparent", f"00-{self.trace_id}-{secrets.token_hex(8)}-01"),)

    async def begin(self) -> None:
        """Take the counts before the request."""
        self._before = await self._read(self._addresses)

    async def was_sent(self, timing: inference_pb2.Timing | None) -> bool:
        """Wait until each role that served the request has sent spans; says what came of it.

        True as well where none of them traces anything. Others' requests count too: what is
        shown is that spans reach the collector, and whose.
        """
        roles = _roles(timing)
        unread = [role for role in roles if role not in self._before]
        if unread:
            return _say(f"no metrics of {', '.join(unread)} could be read", is_well=False)
        traced = [role for role in roles if self._before[role].is_traced]
        if not traced:
            return _say(f"no trace was looked for: {', '.join(roles)} send none", is_well=True)
        silent = traced
        for number in range(_NUM_LOOKS):
            if number:
                await self._sleep(_LOOK_EVERY_S)
            now = await self._read(self._addresses)
            silent = [role for role in traced if not _has_sent(self._before[role], now.get(role))]
            if not silent:
                return _say(
                    f"{', '.join(traced)} sent spans of trace {self.trace_id}", is_well=True
                )
        unsent = [f"{role} ({_num_failed(self._before, now, role):.0f} failed)" for role in silent]
        within_s = _NUM_LOOKS * _LOOK_EVERY_S
        return _say(
            f"no spans were sent within {within_s:.0f} s by {', '.join(unsent)}", is_well=False
        )


def counts_of(texts: Iterable[str]) -> Counts:
    """The counts in what processes tell Prometheus; who is none of the cluster's is left out."""
    found: dict[str, SpanCounts] = {}
    for text in texts:
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError:
            continue
        samples = {each.name: each for family in families for each in family.samples}
        if _ROLE_OF not in samples:
            continue
        role = samples[_ROLE_OF].labels["role"]
        old = found.get(role, SpanCounts())
        if _SENT in samples:
            sent, unsent = samples[_SENT].value, samples[_UNSENT].value
            old = SpanCounts(True, old.num_sent + sent, old.num_unsent + unsent)
        found[role] = old
    return found


def _roles(timing: inference_pb2.Timing | None) -> list[str]:
    """Who served the request."""
    if timing is None:
        return ["router"]
    workers = {"prefill": timing.prefill_worker, "decode": timing.decode_worker}
    return ["router", *(role for role, address in workers.items() if address)]


def _has_sent(before: SpanCounts, now: SpanCounts | None) -> bool:
    return now is not None and now.num_sent > before.num_sent


def _num_failed(before: Counts, now: Counts, role: str) -> float:
    return now.get(role, SpanCounts()).num_unsent - before[role].num_unsent


def _say(what: str, *, is_well: bool) -> bool:
    print(f"diptych generate: {what}", file=sys.stderr)  # noqa: T201
    return is_well


def _host_and_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--expect-trace: expected host:port (got {address!r})")
    return address


async def _read(addresses: Sequence[str]) -> Counts:
    """Ask all processes at once; those that do not answer are left out."""
    async with asyncio.TaskGroup() as tasks:
        names = [tasks.create_task(asyncio.to_thread(_places, each)) for each in addresses]
    urls = {url for name in names for url in name.result()}
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(asyncio.to_thread(_text, url)) for url in urls]
    return counts_of(text for each in asked if (text := each.result()) is not None)


def _places(address: str) -> list[str]:
    """The metrics of all processes behind a name; none where nobody knows it."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = {str(place[0]) for *_, place in found}
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics" for host in hosts]


def _text(url: str) -> str | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_READ_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):
        return None
