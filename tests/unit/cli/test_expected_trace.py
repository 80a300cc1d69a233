"""``diptych generate --expect-trace``: what its verdict is made of."""

from collections.abc import Sequence
from http.client import BadStatusLine, HTTPException, IncompleteRead
from typing import NoReturn
from urllib.request import OpenerDirector

import pytest
from prometheus_client import generate_latest

from diptych.cli.expected_trace import Counts, ExpectedTrace, SpanCounts, counts_of
from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig
from diptych.service_host import ServiceHost
from diptych.telemetry.tracing import extract_metadata, trace_id
from diptych.v1 import inference_pb2
from soft_worker.config import SoftWorkerConfig

HANDED_OFF = inference_pb2.Timing(prefill_worker="p:1", decode_worker="d:2")


class Processes:
    """Tells these counts, one after the other and then the last; counts how often it slept."""

    def __init__(self, *counts: Counts, read_s: float = 0.0) -> None:
        self._counts = list(counts)
        self._read_s = read_s
        self.num_slept = 0
        self.now_s = 100.0

    async def read(self, addresses: Sequence[str]) -> Counts:
        self.now_s += self._read_s
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]

    async def sleep(self, pause_s: float) -> None:
        self.num_slept += 1
        self.now_s += pause_s

    def clock(self) -> float:
        return self.now_s


async def verdict(processes: Processes, timing: inference_pb2.Timing | None = HANDED_OFF) -> bool:
    trace = ExpectedTrace("a:9100,b:9100", processes.read, processes.sleep, processes.clock)
    await trace.begin()
    return await trace.was_sent(timing)


def sent(**by_role: int) -> Counts:
    """Of one process of each."""
    return {role: SpanCounts(role, True, number) for role, number in by_role.items()}


def prefill(**by_url: int) -> Counts:
    """Of these prefill workers, and of one that decodes and a router that have sent."""
    counts = {url: SpanCounts("prefill", True, number) for url, number in by_url.items()}
    return {**sent(router=sum(by_url.values()), decode=sum(by_url.values())), **counts}


async def test_it_waits_until_each_role_that_served_has_sent() -> None:
    processes = Processes(
        sent(router=5, prefill=5, decode=5),
        sent(router=9, prefill=5, decode=5),
        sent(router=9, prefill=5, decode=6),
        sent(router=9, prefill=7, decode=6),
    )
    assert await verdict(processes)
    assert processes.num_slept == 2


async def test_a_role_that_sends_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = sent(router=5, prefill=5, decode=5)
    after = {**sent(router=6, prefill=6), "decode": SpanCounts("decode", True, 5, num_unsent=3)}
    processes = Processes(before, after)
    assert not await verdict(processes)
    assert processes.num_slept == 39
    assert "no spans were sent within 20 s by decode (3 failed)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "now", "is_sent"),
    [
        ({"a": 500, "b": 400}, {"b": 405}, True),  # one was scaled away, the other sent it
        ({"a": 500, "b": 400}, {"b": 400}, False),
        ({"a": 500}, {"a": 500, "b": 2}, True),  # one came
        ({"a": 500}, {"a": 500, "b": 0}, False),
        ({"a": 500}, {"a": 2}, True),  # it began anew
        ({"a": 500}, {"a": 0}, False),
        ({"a": 500}, {}, False),
    ],
)
async def test_pods_may_come_and_go_meanwhile(
    before: dict[str, int], now: dict[str, int], is_sent: bool
) -> None:
    """A sum over them would fall, and a healthy cluster be said to send nothing."""
    after = {**prefill(**now), **sent(router=2000, decode=2000)}
    assert await verdict(Processes(prefill(**before), after)) is is_sent


async def test_an_address_of_another_role_now_is_another_process() -> None:
    before = sent(router=5, prefill=5, decode=5)
    after: dict[str, SpanCounts] = {**sent(router=6, decode=6)}
    after["prefill"] = SpanCounts("decode", True, 90)
    assert not await verdict(Processes(before, after))
    after["new"] = SpanCounts("prefill", True, 1)
    assert await verdict(Processes(before, after))
    del after["decode"]
    after["prefill"] = SpanCounts("decode", True, 5)
    assert await verdict(Processes(before, after)), "all five are of the process that is new there"


async def test_it_ends_by_the_clock_however_long_a_look_takes() -> None:
    processes = Processes(sent(router=5, prefill=5, decode=5), read_s=5.0)
    assert not await verdict(processes)
    assert processes.num_slept == 3
    assert processes.now_s <= 100 + 5 + 20 + 5, "before the request, then 20 s, of which one look"


async def test_who_did_not_serve_need_not_send() -> None:
    processes = Processes(sent(router=5, prefill=5, decode=5), sent(router=6, prefill=5, decode=6))
    assert await verdict(processes, inference_pb2.Timing(decode_worker="d:2"))


@pytest.mark.parametrize(
    ("now", "is_sent"),
    [
        ({"router": 6, "worker": 6}, True),
        ({"router": 6, "worker": 5}, False),
        ({"router": 5, "worker": 6}, False),
    ],
)
async def test_a_worker_of_both_roles_sends_for_either(now: dict[str, int], is_sent: bool) -> None:
    assert SoftWorkerConfig.role == "worker"
    assert await verdict(Processes(sent(router=5, worker=5), sent(**now))) is is_sent


async def test_a_worker_of_both_roles_may_be_beside_one_of_a_role() -> None:
    before = sent(router=5, prefill=5, worker=5)
    assert await verdict(Processes(before, sent(router=6, prefill=6, worker=6)))
    assert not await verdict(Processes(before, sent(router=6, prefill=6, worker=5)))


async def test_what_a_worker_of_both_roles_failed_to_send_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    after = {**sent(router=6), "worker": SpanCounts("worker", True, 5, num_unsent=3)}
    assert not await verdict(Processes(sent(router=5, worker=5), after))
    assert "by prefill (3 failed), decode (3 failed)" in capsys.readouterr().err


async def test_where_nothing_is_traced_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    processes = Processes({role: SpanCounts(role) for role in ("router", "prefill", "decode")})
    assert await verdict(processes)
    said = capsys.readouterr().err
    assert "no trace was looked for: router, prefill, decode send none" in said


async def test_metrics_that_cannot_be_read_are_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert not await verdict(Processes(sent(router=5, decode=5)))
    assert "no metrics of prefill could be read" in capsys.readouterr().err


async def test_processes_tell_their_role_and_whether_they_trace() -> None:
    told_by = []
    for config in (ProcessConfig(otlp_endpoint="http://127.0.0.1:1"), ProcessConfig()):
        async with ServiceHost(config) as host:
            told_by.append(generate_latest(host.registry).decode())
    role = ProcessConfig().role
    traced, untraced = told_by
    assert counts_of({"a": untraced}) == {"a": SpanCounts(role)}
    found = {"a": SpanCounts(role), "b": SpanCounts(role, True)}
    assert counts_of({"a": untraced, "b": traced}) == found
    told = traced.replace("diptych_trace_spans_sent 0.0", "diptych_trace_spans_sent 2.0")
    found = {"a": SpanCounts(role, True, 2.0), "b": SpanCounts(role), "c": found["b"]}
    assert counts_of({"a": told, "b": untraced, "c": traced}) == found
    others = ("", "<html>no metrics</html>", "up{ 1", "process_open_fds 4.0\n")
    texts = {f"http://{number}": text for number, text in enumerate([*others, told])}
    assert counts_of(texts) == {"http://4": SpanCounts(role, True, 2.0)}


async def test_the_request_asks_for_its_trace() -> None:
    trace = ExpectedTrace("a:9100")
    context = extract_metadata(trace.metadata)
    assert trace_id(context) == trace.trace_id
    ((_, parent),) = trace.metadata
    assert parent.endswith("-01"), "sampled"


@pytest.mark.parametrize("addresses", ["", "a", "a:", "a:b", "a:9100,", "a:0", ":9100", "a:65536"])
def test_an_address_that_is_none_is_refused(addresses: str) -> None:
    with pytest.raises(ConfigurationError, match="--expect-trace: expected host:port"):
        ExpectedTrace(addresses)


@pytest.mark.parametrize("what", [BadStatusLine("\0\0\x18\4"), IncompleteRead(b"# HELP")])
async def test_who_does_not_speak_http_tells_no_metrics(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: HTTPException
) -> None:
    """As the port of gRPC, which is the router's other one."""

    def answer(*_: object, **__: object) -> NoReturn:
        raise what

    monkeypatch.setattr(OpenerDirector, "open", answer)
    trace = ExpectedTrace("127.0.0.1:50051,a..b:9100")
    await trace.begin()
    assert not await trace.was_sent(HANDED_OFF)
    told = "diptych generate: no metrics of router, prefill, decode could be read\n"
    assert capsys.readouterr().err == told
