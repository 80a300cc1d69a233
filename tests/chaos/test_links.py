"""Each link between two processes breaks in each way while one request is on it, and no other.

The links are the streams Prefill and Decode (router to worker), Fetch (decode to prefill
worker) and Watch. Only one worker of each role is there and nothing else may compute a
prompt, so what a broken link leaves behind on the other side is seen at once: the request
waits in the router, and nobody holds anything for it. Where the source of a Fetch is killed or
stopped, the router is kept from noticing that itself: the decode worker has to. Over nixl, whose
reads do not go through the Fetch stream, the same is asked where its source is killed, stopped
or answers an error. Its wire is cut where it reads over TCP, as on one machine it reads memory.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grpc
import pytest

from diptych.rpc.channel import open_channel
from tests.call import Answer, generate, token_request
from tests.chaos.breakable_links import ANY_PORT, Proxy, Wires, wires
from tests.chaos.load import STEP_S
from tests.chaos.survivors import Survivors
from tests.cluster import UNBALANCED, Cluster, Process, as_args
from tests.golden_rule import check_exact
from tests.notes import Note
from tests.tiny_model import write_tiny_model
from tests.waiting import until

PROMPT = [3 + (17 * position + position * position) % 470 for position in range(1500)]
MAX_TOKENS, BLOCK_SIZE = 8, 16
ATTEMPT_BLOCKS = (len(PROMPT) + MAX_TOKENS) // BLOCK_SIZE + 2
AT_ONCE_S, SILENT_S = 1.0, 5.0  # a broken connection is noticed; a silent peer is lost
FREE_S = 1.0 + STEP_S
UCX_ENDS_S = 10.0  # a read whose wire was cut, its agent, and the next agent's start
RECOVERY_S = 0.5  # from the notice to the next try: the router's pause and jitter
WORKER_FLAGS = {
    "num-blocks": "256",
    "max-model-len": "2048",
    "max-batched-tokens": "4",  # the prompt must still be computed when the fault has begun
    "max-num-seqs": "4",
    "num-threads": "1",
}
ROUTER_FLAGS = {**UNBALANCED, "no-allow-local-prefill": "", "no-allow-recompute": ""}
LINKS, FAULTS = ("prefill", "decode", "fetch"), ("refused", "killed", "stopped", "cut")
METHODS = {"prefill": "Prefill", "decode": "Decode", "fetch": "Fetch", "watch": "Watch"}
CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
COMMON_CODES = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL]
EVERY_CODE_LINK = "fetch"  # in the short form; the others answer the common ones
BREAKS = [
    *(("inline", link, fault) for link in LINKS for fault in FAULTS),
    *(("nixl", "fetch", fault) for fault in ("killed", "stopped")),
    ("nixl-tcp", "fetch", "cut"),
]
TRANSPORT_FLAGS = {
    "inline": {"transfer.transports": "inline"},
    "nixl": {"transfer.transports": "nixl"},
    "nixl-tcp": {
        "transfer.transports": "nixl",
        "transfer.ucx-tls": "tcp,cuda_copy",
        "transfer.ucx-net-devices": "fetch",  # the wire of that name
        "transfer.allow-faults": "",
        "transfer.allow-nixl-tcp": "",
    },
}

NO_NAMESPACES = f"needs network namespaces: root on Linux may, uid {os.getuid()} may not"
_salts = itertools.count()


@dataclass
class Rig:
    """Two workers and two routers: one straight to them, one through proxies."""

    straight: Cluster
    proxied: Cluster
    proxies: dict[str, Proxy]
    wires: Wires | None
    free_s: float  # as long as it may take that nobody holds anything for a broken attempt
    want: Answer | None = None

    def worker(self, role: str) -> Process:
        workers: list[Process] = getattr(self.straight, role)
        return workers[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every code on every link only in the long form."""
    if "code" not in metafunc.fixturenames:
        return
    is_long = metafunc.config.getoption("--chaos-long")
    chosen = [
        ("inline", link, code)
        for link in METHODS
        for code in (CODES if is_long or link == EVERY_CODE_LINK else COMMON_CODES)
    ]
    chosen += [("nixl", "fetch", code) for code in (CODES if is_long else COMMON_CODES)]
    ids = [f"{transport}-{link}-{code.name}" for transport, link, code in chosen]
    metafunc.parametrize(("rig", "link", "code"), chosen, indirect=["rig"], ids=ids)


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Rig]]:
    """One over each transport that is asked for."""
    with ExitStack() as undo:
        yield cache(
            lambda transport: undo.enter_context(
                open_rig(tmp_path_factory.mktemp(transport), transport)
            )
        )


@pytest.fixture
def rig(request: pytest.FixtureRequest, rigs: Callable[[str], Rig]) -> Rig:
    return rigs(request.param)


@contextmanager
def open_rig(work: Path, transport: str) -> Iterator[Rig]:
    flags = {**WORKER_FLAGS, **TRANSPORT_FLAGS[transport]}
    model = write_tiny_model(work / "tiny", max_position=2048)
    with ExitStack() as undo:
        laid = undo.enter_context(wires()) if transport != "nixl" else None
        if transport == "nixl-tcp" and laid is None:
            pytest.skip(NO_NAMESPACES)
        workers: dict[str, Process] = {}
        for role in ("prefill", "decode"):
            prefix = laid.prefix(role) if laid is not None else []
            worker = Process(
                f"{role}_worker", role, work, as_args({"model": str(model), **flags}), prefix
            )
            worker.start(f"{laid.addresses[role]}:0" if laid is not None else ANY_PORT)
            undo.callback(worker.stop)
            workers[role] = worker
        proxies = {}
        for role, worker in workers.items():
            worker.wait_listening()
            host = laid.own_address if laid is not None else "127.0.0.1"
            proxies[role] = Proxy(worker.address, host)
            proxies[role].listen()
            undo.callback(proxies[role].close)
        routers = []
        for name, at in (("router", workers), ("router-proxied", proxies)):
            addresses = {role: at[role].address for role in workers}
            router = Process(
                "router", name, work, as_args({"model": str(model), **ROUTER_FLAGS, **addresses})
            )
            router.start()
            undo.callback(router.stop)
            routers.append(router)
        for router in routers:
            router.wait_listening()
        straight, proxied = (
            Cluster(router, [workers["prefill"]], [workers["decode"]]) for router in routers
        )
        free_s = FREE_S + (UCX_ENDS_S if transport == "nixl-tcp" else 0)
        yield Rig(straight, proxied, proxies, laid, free_s)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("rig", "link", "fault"), BREAKS, indirect=["rig"])
async def test_a_broken_link(rig: Rig, link: str, fault: str, note: Note) -> None:
    if rig.wires is None and (fault == "cut" or (link, fault) == ("fetch", "refused")):
        pytest.skip(NO_NAMESPACES)
    broken = break_link(rig, link, fault)
    cluster = rig.proxied if broken.is_proxied else rig.straight
    others = [
        worker for worker in cluster.workers if worker.name != link and worker is not broken.victim
    ]
    survivors = [process for process in cluster.processes if process is not broken.victim]
    still_there = Survivors(survivors)
    async with request(rig, cluster) as task:
        before, num_lost_before = num_noticed(cluster, link), num_lost(cluster)
        begin = time.monotonic()
        broken.begin()
        try:
            limit_s = AT_ONCE_S if fault in ("refused", "killed") else SILENT_S
            await until(lambda: num_noticed(cluster, link) != before, limit_s, "it is noticed")
            noticed_s = time.monotonic() - begin
            await until(
                lambda: is_waiting(cluster), RECOVERY_S, "the request waits for another try"
            )
            recovering_s = time.monotonic() - begin
            if link != "fetch":
                await until(lambda: num_lost(cluster) > num_lost_before, limit_s, "Watch ended too")
            await until(
                lambda: not any(worker.held() for worker in others),
                rig.free_s,
                "the other side is free",
            )
            free_s = time.monotonic() - begin
            assert not task.done()
        except AssertionError as error:
            error.add_note("\n".join(process.log_tail(20) for process in cluster.processes))
            raise
        finally:
            await asyncio.to_thread(broken.end)
        answer = await task
    note(
        f"{link} {fault}: noticed after {noticed_s:.2f} s, next try due after {recovering_s:.2f} s,"
        f" the other side free after {free_s:.2f} s"
    )
    check(rig, answer)
    await cluster.wait_baseline(within_s=SILENT_S + FREE_S if fault == "stopped" else FREE_S)
    still_there.check()


@pytest.mark.timeout(120)
async def test_a_link_that_answers_an_error(
    rig: Rig, link: str, code: grpc.StatusCode, note: Note
) -> None:
    """In the middle of the stream, and again when it is next opened."""
    cluster, method = rig.proxied, METHODS[link]
    proxy = rig.proxies["decode" if link == "decode" else "prefill"]
    async with request(rig, cluster) as task:
        assert proxy.num_open(method)
        before = num_noticed(cluster, link)
        begin = time.monotonic()
        proxy.answer(method, code)
        try:
            await until(
                lambda: task.done() or num_noticed(cluster, link) != before,
                AT_ONCE_S,
                "it is noticed",
            )
            noticed_s = time.monotonic() - begin
            await until(
                lambda: all(worker.num_held <= ATTEMPT_BLOCKS for worker in cluster.workers),
                FREE_S,
                "no block is held for the attempt that failed",
            )
            answer = await task
        finally:
            proxy.obey()
    note(f"{link} {code.name}: noticed after {noticed_s:.2f} s")
    check(rig, answer)
    await cluster.wait_baseline(within_s=FREE_S)


@dataclass
class Break:
    """A fault, how it ends, and the process that is hit."""

    begin: Callable[[], None]
    end: Callable[[], None]
    victim: Process | None = None
    is_proxied: bool = False  # it needs the proxies


def break_link(rig: Rig, link: str, fault: str) -> Break:
    if fault in ("killed", "stopped"):
        return break_process(rig, link, fault)
    wires = rig.wires
    if fault == "refused" and link != "fetch":
        return Break(rig.proxies[link].refuse, rig.proxies[link].listen, is_proxied=True)
    assert wires is not None
    if fault == "refused":
        return Break(wires.refuse_fetch, wires.accept_fetch)
    return Break(lambda: wires.cut(link), lambda: wires.mend(link))


def break_process(rig: Rig, link: str, fault: str) -> Break:
    """The worker at the far end of ``link``."""
    worker, proxy = rig.worker("decode" if link == "decode" else "prefill"), rig.proxies["prefill"]

    def begin() -> None:
        if link == "fetch":
            proxy.mute(METHODS["prefill"], METHODS["watch"])
        if fault == "killed":
            worker.kill()
        else:
            worker.signal(signal.SIGSTOP)

    def end() -> None:
        if fault == "killed":
            worker.start(worker.address)
            worker.wait_listening()
        else:
            worker.signal(signal.SIGCONT)
        proxy.obey()

    return Break(begin, end, worker, is_proxied=link == "fetch")


@asynccontextmanager
async def request(rig: Rig, cluster: Cluster) -> AsyncIterator[asyncio.Task[Answer]]:
    """A request that has just begun to be computed and pulled, on all three links."""
    await cluster.wait_ready()
    await cluster.wait_baseline(within_s=FREE_S)
    async with open_channel(cluster.router.address) as channel:
        if rig.want is None:
            rig.want = await ask(channel)
            assert rig.want.error is None, rig.want.error
            await cluster.wait_baseline(within_s=FREE_S)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(ask(channel))
            await until(lambda: is_on_all_legs(cluster), 10, "it is computed and pulled")
            yield task


async def ask(channel: grpc.aio.Channel) -> Answer:
    """The same request each time, in nobody's cache."""
    salt = str(next(_salts))
    return await generate(
        channel, token_request(PROMPT, max_tokens=MAX_TOKENS, salt=salt), timeout_s=60
    )


def check(rig: Rig, answer: Answer) -> None:
    """It has the undisturbed one's tokens."""
    assert answer.error is None, answer.error
    assert rig.want is not None
    check_exact(answer.token_ids, rig.want.token_ids, rig.want.margins, "the answer")
    assert answer.finish_reason == rig.want.finish_reason


def num_noticed(cluster: Cluster, link: str) -> float:
    """Changes when the side that the link starts from has noticed."""
    if link == "fetch":
        return cluster.decode[0].metric("diptych_kv_pulls_failed_total")
    if link == "watch":
        return num_lost(cluster)
    metrics = cluster.router.metrics()
    return metrics["diptych_router_requests_waiting"] + sum(
        value for key, value in metrics.items() if key.startswith("diptych_retries_total")
    )


def num_lost(cluster: Cluster) -> int:
    """How often the router has lost a Watch."""
    return cluster.router.log_path.read_text().count('"worker lost"')


def is_waiting(cluster: Cluster) -> bool:
    return cluster.router.metric("diptych_router_requests_waiting") > 0


def is_on_all_legs(cluster: Cluster) -> bool:
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    return bool(prefill.metric("diptych_kv_fetches_open") and prefill.num_held and decode.num_held)
