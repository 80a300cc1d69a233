"""Every way a hand-off can go wrong: no wrong token, the documented outcome, one count each.

Each case is done many times to one running cluster: a rule for each request breaks it once,
other requests beside it are not touched. The counters of the three processes must then have
grown by exactly so many.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.v1 import common_pb2, kv_source_pb2, kv_source_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.chaos.fault_rig import (
    COMPUTED,
    FAILED,
    PATIENT_ROUTER,
    PULLED,
    REFUSED,
    RETRIED,
    Counters,
    Prompts,
    Rule,
    breakable_cluster,
    check_untouched,
    report,
    set_rules,
)
from tests.cluster import Cluster, Process, another_router
from tests.transports import TRANSPORTS

NUM_AT_ONCE = 20
LONG_FACTOR = 10


class Case(NamedTuple):
    """A fault and what must be counted for it: at the reader, and at the source."""

    rule: Rule
    failed: str = ""  # the pull's failure; empty: it succeeds all the same
    refused: str = ""  # the source's reason
    at_source: bool = False  # the source's script, not the reader's


def unproven(at: str, do: str, **more: object) -> Case:
    return Case({"at": at, "do": do, **more}, "UNPROVEN")


def harmless(at: str, do: str, **more: object) -> Case:
    return Case({"at": at, "do": do, **more})


def bad_ticket(at: str, do: str, *, at_source: bool = False, **more: object) -> Case:
    return Case({"at": at, "do": do, **more}, "TICKET_INVALID", "TICKET_INVALID", at_source)


def invalid(at: str, do: str, **more: object) -> Case:
    return Case({"at": at, "do": do, **more}, "TRANSPORT", "REQUEST_INVALID")


# 20 of each; 200 in the long form.
NAMED = {
    "unknown ticket": bad_ticket("open", "corrupt"),
    "revoked ticket": bad_ticket("open", "revoke", at_source=True),
    "superseded ticket": bad_ticket("range", "revoke", at_source=True),
    "ended lease": Case({"at": "open", "do": "replay"}, "TICKET_INVALID", "LEASE_EXPIRED"),
    "wrong reader": bad_ticket("open", "corrupt", field="reader_incarnation"),
    "beyond the prompt": invalid("open", "corrupt", field="first_token"),
    "truncated range": unproven("read", "truncate"),
    "bit-flipped range": unproven("read", "corrupt"),
    "reordered range": unproven("read", "reorder"),
    "late range": unproven("read", "drop"),  # said to be there before it is
}
# Every kind of fault at every message and read: 5 of each; 50 in the long form.
MATRIX = {
    f"{case.rule['do']} {case.rule['at']} {case.rule.get('field', '')}".strip(): case
    for case in (
        harmless("open", "delay", seconds=0.05),
        invalid("open", "duplicate"),
        bad_ticket("open", "truncate"),
        invalid("open", "reorder"),
        invalid("open", "corrupt", field="transport"),
        unproven("opened", "drop"),
        harmless("opened", "delay", seconds=0.05),
        unproven("opened", "duplicate"),
        unproven("opened", "corrupt"),
        unproven("opened", "corrupt", field="prompt_digest"),
        unproven("opened", "truncate"),
        unproven("opened", "reorder"),
        unproven("range", "drop"),
        unproven("range", "drop", nth=2),
        harmless("range", "delay", seconds=0.05),
        unproven("range", "duplicate"),
        *(
            unproven("range", "corrupt", field=field)
            for field in ("first_token", "num_tokens", "digests", "last")
        ),
        harmless("range", "corrupt", field="generations"),  # the source knows its own
        *(
            unproven("range", "truncate", field=field)
            for field in ("num_tokens", "block_ids", "digests", "generations")
        ),
        unproven("range", "reorder"),
        Case({"at": "confirm", "do": "drop"}, "UNPROVEN"),
        harmless("confirm", "delay", seconds=0.05),
        harmless("confirm", "duplicate"),
        Case({"at": "confirm", "do": "corrupt"}, "UNPROVEN", "KV_UNPROVEN"),
        Case({"at": "confirm", "do": "truncate"}, "UNPROVEN", "KV_UNPROVEN"),
        unproven("confirmed", "drop"),
        harmless("confirmed", "delay", seconds=0.05),
        harmless("confirmed", "duplicate"),
        harmless("read", "delay", seconds=0.1),
        harmless("read", "linger", seconds=0.1),
        harmless("read", "duplicate"),
    )
}
ONLY_INLINE = {
    f"{case.rule['do']} data": case
    for case in (
        unproven("data", "drop"),
        harmless("data", "delay", seconds=0.05),
        unproven("data", "duplicate"),
        unproven("data", "corrupt"),
        unproven("data", "truncate"),
        unproven("data", "reorder"),
    )
}
ONLY_AGENTS = {"corrupt range block_ids": unproven("range", "corrupt", field="block_ids")}


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(
    transport: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    work = tmp_path_factory.mktemp("faults")
    with breakable_cluster(work, tiny_model, transport) as running:
        yield running


async def play(
    cluster: Cluster, name: str, case: Case, num: int, prompts: Prompts, step_s: float
) -> None:
    """Break ``num`` hand-offs, each once, among others that are left alone."""
    script = cluster.prefill[0] if case.at_source else cluster.decode[0]
    lengths = [len(ids) for ids in prompts.token_ids]
    async with open_channel(cluster.router.address) as channel:
        while num:
            broken = min(num, NUM_AT_ONCE)
            num -= broken
            await set_rules(script, [{**case.rule, "num_tokens": n} for n in lengths[:broken]])
            before = Counters.of(cluster)
            prompts.check(await prompts.ask(channel), name)
            after = Counters.of(cluster)
            fired = list((await report(script)).num_fired)
            assert fired == [1] * broken, f"{name}: {fired}"
            failed = after.grown(before, FAILED)
            assert failed == ({case.failed: broken} if case.failed else {}), name
            refused = {case.refused: broken} if case.refused else {}
            assert after.grown(before, REFUSED) == refused, name
            rebound = {"rebind": broken} if case.failed else {}
            assert after.grown(before, RETRIED) == rebound, name
            alarms = after.grown(before, "diptych_kv_unproven_total").get("", 0)
            assert alarms == after.grown(before, FAILED).get("UNPROVEN", 0), name
    await set_rules(script, [])
    await check_untouched(cluster, step_s)


@pytest.mark.timeout(1800)
async def test_named_faults(cluster: Cluster, step_s: float, chaos_long: bool) -> None:
    await cluster.wait_ready()
    num = NUM_AT_ONCE * (LONG_FACTOR if chaos_long else 1)
    prompts = Prompts(NUM_AT_ONCE + 2)
    async with open_channel(cluster.router.address) as channel:
        await prompts.learn(channel)
    for name, case in NAMED.items():
        await play(cluster, name, case, num, prompts, step_s)


@pytest.mark.timeout(1800)
async def test_every_message_and_read(
    cluster: Cluster, transport: str, step_s: float, chaos_long: bool
) -> None:
    await cluster.wait_ready()
    prompts = Prompts(6)
    async with open_channel(cluster.router.address) as channel:
        await prompts.learn(channel)
    own = ONLY_INLINE if transport == "inline" else ONLY_AGENTS
    for name, case in {**MATRIX, **own}.items():
        await play(cluster, name, case, 5, prompts, step_s)
        if chaos_long:
            for _ in range(LONG_FACTOR - 1):
                await play(cluster, name, case, 5, prompts, step_s)


@pytest.mark.timeout(1800)
async def test_faults_that_outlast_the_rebind(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, step_s: float, chaos_long: bool
) -> None:
    """The second pull fails too: computed where it is or, where that is forbidden, prefilled again.

    Each is counted once.
    """
    await cluster.wait_ready()
    no_recompute = {**PATIENT_ROUTER, "no-allow-recompute": ""}
    prompts = Prompts(7)
    async with open_channel(cluster.router.address) as channel:
        await prompts.learn(channel)
    with another_router(cluster, tmp_path, tiny_model, no_recompute) as strict:
        await strict.wait_ready()
        for number in range(2 * (LONG_FACTOR if chaos_long else 1)):
            routed, last = ((cluster, "recompute"), (strict, "prefill_again"))[number % 2]
            await outlast(routed, last, prompts)
        await set_rules(cluster.decode[0], [])
    await check_untouched(cluster, step_s)


async def outlast(cluster: Cluster, last: str, prompts: Prompts) -> None:
    """Break the first two pulls of all but two requests: ``last`` is what helps them."""
    broken = [len(ids) for ids in prompts.token_ids[:-2]]
    rule = {"at": "read", "do": "corrupt", "times": 2}
    await set_rules(cluster.decode[0], [{**rule, "num_tokens": n} for n in broken])
    before = Counters.of(cluster)
    async with open_channel(cluster.router.address) as channel:
        prompts.check(await prompts.ask(channel), last)
    after = Counters.of(cluster)
    assert list((await report(cluster.decode[0])).num_fired) == [2] * len(broken)
    assert after.grown(before, FAILED) == {"UNPROVEN": 2 * len(broken)}
    assert after.grown(before, "diptych_kv_unproven_total") == {"": 2 * len(broken)}
    assert after.grown(before, RETRIED) == {"rebind": len(broken), last: len(broken)}
    computed = {"recompute": len(broken)} if last == "recompute" else {}
    assert after.grown(before, COMPUTED) == computed


@pytest.mark.timeout(1800)
async def test_swapped_tickets_of_equal_prompts(
    cluster: Cluster, step_s: float, chaos_long: bool
) -> None:
    """Two prompts of one length, each pulled with the other's ticket: neither is used.

    The first to notice binds again, which may revoke the other's ticket before it has noticed.
    """
    await cluster.wait_ready()
    decode = cluster.decode[0]
    prompts = Prompts(2, equally_long=True)
    async with open_channel(cluster.router.address) as channel:
        await prompts.learn(channel)
        for _ in range(NUM_AT_ONCE // 2 * (LONG_FACTOR if chaos_long else 1)):
            await set_rules(decode, [{"at": "open", "do": "swap", "times": 2}])
            before = Counters.of(cluster)
            prompts.check(await prompts.ask(channel), "swapped")
            after = Counters.of(cluster)
            assert list((await report(decode)).num_fired) == [2]
            failed = after.grown(before, FAILED)
            assert failed["UNPROVEN"] >= 1
            assert sum(failed.values()) == 2
            assert after.grown(before, RETRIED) == {"rebind": 2}
            assert after.grown(before, "diptych_kv_unproven_total") == {"": failed["UNPROVEN"]}
    await set_rules(decode, [])
    await check_untouched(cluster, step_s)


# These take the pair down for a moment, and with it whatever else goes over it.
COSTLY: list[Rule] = [
    {"at": "open", "do": "drop"},
    {"at": "open", "do": "corrupt", "field": "source_incarnation"},
    {"at": "read", "do": "fail"},
]


@pytest.mark.timeout(600)
async def test_faults_that_lose_the_pair(cluster: Cluster, step_s: float, chaos_long: bool) -> None:
    await cluster.wait_ready()
    prompts = Prompts(4)
    async with open_channel(cluster.router.address) as channel:
        await prompts.learn(channel)
        for rule in COSTLY * (LONG_FACTOR if chaos_long else 1):
            before = Counters.of(cluster)
            named = {**rule, "num_tokens": len(prompts.token_ids[0])}
            await set_rules(cluster.decode[0], [named])
            prompts.check(await prompts.ask(channel), str(rule))
            assert list((await report(cluster.decode[0])).num_fired) == [1]
            assert sum(Counters.of(cluster).grown(before, FAILED).values()) >= 1
            await cluster.wait_ready()
    await check_untouched(cluster, step_s)


@pytest.mark.timeout(1800)
async def test_each_difference_of_layouts_is_refused_and_counted(
    cluster: Cluster, step_s: float, chaos_long: bool
) -> None:
    """A reader whose fingerprint differs in one field: the error names it and both values.

    Requests run beside it: each is answered rightly, by the reader whose layout fits.
    """
    await cluster.wait_ready()
    prompts = Prompts(2)
    async with open_channel(cluster.router.address) as channel:
        await prompts.learn(channel)
    source = cluster.prefill[0]
    true_layout = (await first_state(source)).layout
    fields = [field.name for field in common_pb2.KVLayout.DESCRIPTOR.fields]
    async with (
        open_channel(cluster.router.address) as channel,
        open_channel(source.address) as to_source,
    ):
        stub: kv_source_pb2_grpc.KVSourceAsyncStub = kv_source_pb2_grpc.KVSourceStub(to_source)
        for field in [*fields, "transports"]:
            num = NUM_AT_ONCE * (LONG_FACTOR if chaos_long else 1)
            request = kv_source_pb2.ConnectRequest(
                reader_incarnation="stranger",
                layout=true_layout,
                transports=["inline", "nixl", "ucxx"],
            )
            if field == "transports":
                request.transports[:] = ["pigeon"]
            elif field == "groups":
                request.layout.groups.add()
            elif field == "tensor_parallel_size":
                request.layout.tensor_parallel_size = 3  # of two heads nobody has a third
            else:
                value = getattr(true_layout, field)
                changed = value + "x" if isinstance(value, str) else value + 1
                setattr(request.layout, field, changed)
            before = Counters.of(cluster)
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(prompts.ask(channel))
                for _ in range(num):
                    with pytest.raises(grpc.aio.AioRpcError) as excinfo:
                        await stub.Connect(request)
                    error = from_rpc_error(excinfo.value)
                    assert error.reason == "KV_LAYOUT_MISMATCH"
                    assert error.message.startswith(f"{field}: the reader has ")
            prompts.check(asked.result(), f"beside another {field}")
            after = Counters.of(cluster)
            assert after.grown(before, REFUSED) == {"KV_LAYOUT_MISMATCH": num}
            assert after.grown(before, RETRIED) == {}
            assert sum(after.grown(before, PULLED).values()) == len(prompts.token_ids)
    await check_untouched(cluster, step_s)


async def first_state(worker: Process) -> worker_pb2.WorkerState:
    async with open_channel(worker.address) as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        async for state in stub.Watch(worker_pb2.WatchRequest()):
            return state
    raise AssertionError("Watch ended")


async def test_a_worker_that_allows_faults_says_so(cluster: Cluster) -> None:
    await cluster.wait_ready()
    for worker in cluster.workers:
        assert (await first_state(worker)).faults_allowed
        assert worker.metric("diptych_faults_allowed") == 1
        assert "FAULTS MAY BE INJECTED" in worker.log_path.read_text()
