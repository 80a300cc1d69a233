"""Whether a request's spans reached their collector, as the processes that served it count them.

The counts are among what they tell Prometheus; who tells of none traces nothing.
"""

import asyncio
import secrets
import socket
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http.client import HTTPException
from typing import NamedTuple, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from diptych.errors import ConfigurationError
from diptych.v1 import inference_pb2

_ROLE_OF, _SENT, _UNSENT = (
    f"diptych_{name}" for name in ("build_info", "trace_spans_sent", "trace_spans_unsent")
)
_OF_BOTH = "worker"  # as which a worker of both roles is known, whichever it has now
_READ_S = 5.0
_LOOK_EVERY_S = 0.5
_LOOK_FOR_S = 20.0  # no look begins later


class SpanCounts(NamedTuple):
    """Of one process, since its start."""

    role: str
    is_traced: bool = False
    num_sent: float = 0.0
    num_unsent: float = 0.0

    @property
    def roles(self) -> tuple[str, ...]:
        """In which it may serve a request."""
        return ("prefill", "decode") if self.role == _OF_BOTH else (self.role,)

    def since(self, before: "SpanCounts | None") -> "SpanCounts":
        """Without what it had counted ``before``, unless that was another process."""
        if before is None or before.role != self.role:
            return self
        sent, unsent = self.num_sent - before.num_sent, self.num_unsent - before.num_unsent
        if sent < 0 or unsent < 0:  # its counts began anew
            return self
        return self._replace(num_sent=sent, num_unsent=unsent)


Counts: TypeAlias = Mapping[str, SpanCounts]  # by URL, of those that could be asked
Read: TypeAlias = Callable[[Sequence[str]], Awaitable[Counts]]
Sleep: TypeAlias = Callable[[float], Awaitable[None]]
Clock: TypeAlias = Callable[[], float]


class ExpectedTrace:
    """One request that is to be traced: what it is sent with, and whether its spans were sent."""

    def __init__(
        self,
        addresses: str,
        read: Read | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        """``addresses`` are host:port of processes' metrics, with commas; of a name all are asked.

        ``clock`` is monotonic, s.
        Raises ConfigurationError: an address is none.
        """
        self.trace_id = secrets.token_hex(16)
        self._addresses = tuple(_host_and_port(each) for each in addresses.split(","))
        self._read, self._sleep, self._clock = read or _read, sleep, clock
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
        known = {role for each in self._before.values() for role in each.roles}
        unread = [role for role in roles if role not in known]
        if unread:
            return _say(f"no metrics of {', '.join(unread)} could be read", is_well=False)
        tracing = {role for each in self._before.values() if each.is_traced for role in each.roles}
        traced = [role for role in roles if role in tracing]
        if not traced:
            return _say(f"no trace was looked for: {', '.join(roles)} send none", is_well=True)
        until_s = self._clock() + _LOOK_FOR_S
        while True:
            since = _since(self._before, await self._read(self._addresses))
            silent = [role for role in traced if not _num_sent(since, role)]
            if not silent:
                return _say(
                    f"{', '.join(traced)} sent spans of trace {self.trace_id}", is_well=True
                )
            if self._clock() + _LOOK_EVERY_S >= until_s:
                break
            await self._sleep(_LOOK_EVERY_S)
        unsent = [f"{role} ({_num_failed(since, role):.0f} failed)" for role in silent]
        return _say(
            f"no spans were sent within {_LOOK_FOR_S:.0f} s by {', '.join(unsent)}", is_well=False
        )


def counts_of(texts: Mapping[str, str]) -> Counts:
    """The counts in what processes tell Prometheus; who is none of the cluster's is left out.

    ``texts`` are by URL.
    """
    found: dict[str, SpanCounts] = {}
    for url, text in texts.items():
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError:
            continue
        samples = {each.name: each for family in families for each in family.samples}
        if _ROLE_OF not in samples:
            continue
        role = samples[_ROLE_OF].labels["role"]
        found[url] = SpanCounts(role)
        if _SENT in samples:
            found[url] = SpanCounts(role, True, samples[_SENT].value, samples[_UNSENT].value)
    return found


def _roles(timing: inference_pb2.Timing | None) -> list[str]:
    """Who served the request."""
    if timing is None:
        return ["router"]
    workers = {"prefill": timing.prefill_worker, "decode": timing.decode_worker}
    return ["router", *(role for role, address in workers.items() if address)]


def _since(before: Counts, now: Counts) -> list[SpanCounts]:
    """What each process that is there now did meanwhile: others may have come and gone."""
    return [each.since(before.get(url)) for url, each in now.items()]


def _num_sent(since: Sequence[SpanCounts], role: str) -> float:
    return sum(each.num_sent for each in since if role in each.roles)


def _num_failed(since: Sequence[SpanCounts], role: str) -> float:
    return sum(each.num_unsent for each in since if role in each.roles)


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
        asked = {url: tasks.create_task(asyncio.to_thread(_text, url)) for url in urls}
    texts = {url: each.result() for url, each in asked.items()}
    return counts_of({url: text for url, text in texts.items() if text is not None})


def _places(address: str) -> list[str]:
    """The metrics of all processes behind a name; none where nobody knows it."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # of a name that none can be
        return []
    hosts = {str(place[0]) for *_, place in found}
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics" for host in hosts]


def _text(url: str) -> str | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_READ_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError, HTTPException):  # what answers may be another port, as of gRPC
        return None
