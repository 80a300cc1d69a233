"""``diptych generate --expect-trace``: what its verdict is made of."""

from collections.abc import Sequence

import pytest
from prometheus_client import generate_latest

from diptych.cli.expected_trace import Counts, ExpectedTrace, SpanCounts, counts_of
from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig
from diptych.service_host import ServiceHost
from diptych.telemetry.tracing import extract_metadata, trace_id
from diptych.v1 import inference_pb2

HANDED_OFF = inference_pb2.Timing(prefill_worker="p:1", decode_worker="d:2")


class Processes:
    """Tells these counts, one after the other and then the last; counts how often it slept."""

    def __init__(self, *counts: Counts) -> None:
        self._counts = list(counts)
        self.num_slept = 0

    async def read(self, addresses: Sequence[str]) -> Counts:
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]

    async def sleep(self, _: float) -> None:
        self.num_slept += 1


async def verdict(processes: Processes, timing: inference_pb2.Timing | None = HANDED_OFF) -> bool:
    trace = ExpectedTrace("a:9100,b:9100", processes.read, processes.sleep)
    await trace.begin()
    return await trace.was_sent(timing)


def sent(**by_role: int) -> Counts:
    return {role: SpanCounts(True, number) for role, number in by_role.items()}


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
    after = {**sent(router=6, prefill=6), "decode": SpanCounts(True, 5, num_unsent=3)}
    processes = Processes(before, after)
    assert not await verdict(processes)
    assert processes.num_slept == 39
    assert "no spans were sent within 20 s by decode (3 failed)" in capsys.readouterr().err


async def test_who_did_not_serve_need_not_send() -> None:
    processes = Processes(sent(router=5, prefill=5, decode=5), sent(router=6, prefill=5, decode=6))
    assert await verdict(processes, inference_pb2.Timing(decode_worker="d:2"))


async def test_where_nothing_is_traced_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    processes = Processes(dict.fromkeys(("router", "prefill", "decode"), SpanCounts()))
    assert await verdict(processes)
    said = capsys.readouterr().err
    assert "no trace was looked for: router, prefill, decode send none" in said


async def test_metrics_that_cannot_be_read_are_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert not await verdict(Processes(sent(router=5, decode=5)))
    assert "no metrics of prefill could be read" in capsys.readouterr().err


async def test_processes_tell_their_role_and_whether_they_trace() -> None:
    texts = []
    for config in (ProcessConfig(otlp_endpoint="http://127.0.0.1:1"), ProcessConfig()):
        async with ServiceHost(config) as host:
            texts.append(generate_latest(host.registry).decode())
    role = ProcessConfig().role
    traced, untraced = texts
    assert counts_of([untraced]) == {role: SpanCounts()}
    assert counts_of([untraced, traced]) == {role: SpanCounts(True)}
    told = traced.replace("diptych_trace_spans_sent 0.0", "diptych_trace_spans_sent 2.0")
    assert counts_of([told, untraced, told]) == {role: SpanCounts(True, 4.0)}
    others = ("", "<html>no metrics</html>", "up{ 1", "process_open_fds 4.0\n")
    assert counts_of([*others, told]) == {role: SpanCounts(True, 2.0)}


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
