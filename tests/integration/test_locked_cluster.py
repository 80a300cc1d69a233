"""A cluster whose ports are locked: who gets in, who does not, and certificates that change."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from diptych.errors import DiptychError, PeerNotAllowedError
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.client_stream import ClientStream
from diptych.rpc.identity import Identity, PeerRole
from diptych.rpc.peer_channel import Dialer
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import (
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.authority import Authority, flags
from tests.call import generate, token_request
from tests.call_ends import told
from tests.cluster import Cluster, Process, running_cluster

REQUEST = token_request(range(3, 67), max_tokens=40)

METHODS_OF: Mapping[str, set[str]] = {
    "prefill": {
        "/diptych.v1.Prefill/Prefill",
        "/diptych.v1.KVSource/Connect",
        "/diptych.v1.KVSource/Fetch",
        "/diptych.v1.Worker/Watch",
        "/grpc.health.v1.Health/Check",
    },
    "decode": {
        "/diptych.v1.Decode/Decode",
        "/diptych.v1.Worker/Watch",
        "/grpc.health.v1.Health/Check",
    },
}
METHODS = sorted(METHODS_OF["prefill"] | METHODS_OF["decode"])


class Locked(NamedTuple):
    cluster: Cluster
    folders: Mapping[str, Path]  # by role: where its processes have their certificate
    work: Path
    authority: Authority  # whom they believe


@pytest.fixture
def locked(tiny_llama: Path, tmp_path: Path) -> Iterator[Locked]:
    authority = Authority(tmp_path / "tls")
    folders = {role: authority.issue(role) for role in ("router", "prefill", "decode")}
    with running_cluster(
        tmp_path,
        str(tiny_llama),
        worker_flags={"num-blocks": "128", "max-model-len": "512"},
        prefill_flags=flags(folders["prefill"]),
        decode_flags=flags(folders["decode"]),
        router_flags={"local-prefill-below-tokens": "0", **flags(folders["router"])},
    ) as cluster:
        yield Locked(cluster, folders, tmp_path / "tls", authority)


async def answered(cluster: Cluster) -> list[int]:
    """The tokens of an answer whose KV was handed over."""
    async with open_channel(cluster.router.address) as channel:
        answer = await generate(channel, REQUEST)
    assert answer.error is None, answer.error
    assert answer.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
    return answer.token_ids


@asynccontextmanager
async def dialled(folder: Path, address: str, role: PeerRole) -> AsyncIterator[grpc.aio.Channel]:
    """What somebody with that certificate gets of a process."""
    identity = Identity(
        folder / "certificate.pem", folder / "key.pem", folder / "ca.pem", "diptych"
    )
    async with Dialer(Timers(), identity).open(address, role) as channel:
        yield channel


async def refusal_of_prefill(channel: grpc.aio.Channel) -> DiptychError:
    """How a stream that nobody may open ends."""
    call = prefill_pb2_grpc.PrefillStub(channel).Prefill(iter([prefill_pb2.PrefillCommand()]))
    return await ClientStream(call, Timers(), progress=lambda event: None).run(lambda event: None)


async def first_state(channel: grpc.aio.Channel) -> worker_pb2.WorkerState:
    """What Watch tells. Raises DiptychError."""
    call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest(), timeout=10)
    try:
        async for state in call:
            return state
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    raise AssertionError("nothing came")


# Why a handshake fails, as the called process logs it.
EXPIRED, STRANGER = "certificate has expired", "unable to get local issuer certificate"
MISSING, PLAIN = "PEER_DID_NOT_RETURN_A_CERTIFICATE", "WRONG_VERSION_NUMBER"


async def codes(channel: grpc.aio.Channel) -> dict[str, grpc.StatusCode]:
    """How calls of all internal services end that send one empty message."""
    ends = {}
    for method in METHODS:
        stream = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        ends[method] = await code_of(stream(iter([b""]), timeout=20))
    return ends


async def code_of(call: Any) -> grpc.StatusCode:
    """By the called process's word: our write may fail as it refuses."""
    try:
        async with told(CallEnd(call)):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def strangers(locked: Locked) -> Mapping[str, Path | None]:
    """Folders of those who get in nowhere, by why they do not; None: who speaks no TLS."""
    foreign = Authority(locked.work / "theirs").issue("router")
    locked.authority.trust(foreign)
    expired = locked.authority.issue("router", folder="expired", days=-1)
    return {EXPIRED: expired, STRANGER: foreign, PLAIN: None}


async def check_shut(locked: Locked, worker: Process, role: PeerRole) -> None:
    """Without a good certificate there is no connection; with a client's, nothing to call."""
    for why, folder in strangers(locked).items():
        opened = open_channel(worker.address) if folder is None else None
        async with opened or dialled(folder or locked.work, worker.address, role) as channel:
            assert set((await codes(channel)).values()) == {grpc.StatusCode.UNAVAILABLE}, why
    trust = grpc.ssl_channel_credentials((locked.folders[role] / "ca.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", f"{role}.diptych")]
    async with grpc.aio.secure_channel(worker.address, trust, options=options) as channel:
        assert set((await codes(channel)).values()) == {grpc.StatusCode.UNAVAILABLE}
    client = locked.authority.issue("client")
    async with dialled(client, worker.address, role) as channel:
        ends = await codes(channel)
    has = {name for name, code in ends.items() if code is grpc.StatusCode.PERMISSION_DENIED}
    assert has == METHODS_OF[role]
    absent = {code for name, code in ends.items() if name not in has}
    assert absent == {grpc.StatusCode.UNIMPLEMENTED}
    log = worker.log_path.read_text()
    assert all(why in log for why in (EXPIRED, STRANGER, MISSING, PLAIN, "caller refused"))
    assert "is for router.diptych; the certificate is of client.diptych" in log


async def test_only_who_has_a_role_gets_in(locked: Locked) -> None:
    cluster = locked.cluster
    await cluster.wait_ready()
    await answered(cluster)
    prefill = cluster.prefill[0].address
    async with dialled(locked.folders["decode"], prefill, "prefill") as channel:
        assert isinstance(await refusal_of_prefill(channel), PeerNotAllowedError)
        with pytest.raises(PeerNotAllowedError):
            await first_state(channel)
    async with dialled(locked.folders["router"], prefill, "prefill") as channel:
        assert (await first_state(channel)).role == worker_pb2.WORKER_ROLE_PREFILL
    log = cluster.prefill[0].log_path.read_text()
    assert "caller refused" in log
    assert "diptych.v1.Prefill is for router.diptych" in log
    await check_shut(locked, cluster.prefill[0], "prefill")
    await check_shut(locked, cluster.decode[0], "decode")
    await answered(cluster)


async def test_new_certificates_under_load_drop_nothing(locked: Locked) -> None:
    """Every file is another authority's, and a process that is new after it is let in by them."""
    cluster = locked.cluster
    await cluster.wait_ready()
    expected = await answered(cluster)
    stop = asyncio.Event()

    async def ask() -> int:
        num_answers = 0
        while not stop.is_set():
            assert await answered(cluster) == expected
            num_answers += 1
        return num_answers

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask()) for _ in range(2)]
        await asyncio.sleep(0.5)
        successor = Authority(locked.work)
        for role in locked.folders:
            successor.issue(role)
        await asyncio.sleep(0.5)
        stop.set()
    assert all(task.result() > 0 for task in asking)

    for worker in cluster.workers:  # whoever comes back is met with the new ones alone
        address = worker.address
        worker.kill()
        worker.start(address)
        worker.wait_listening()
        await cluster.eventually(
            lambda: cluster.num_proven_pairs() == 0, within_s=10, what="the pair is lost"
        )
        await cluster.eventually(
            lambda: cluster.num_proven_pairs() == 1, within_s=30, what="the pair is proven again"
        )
    assert await answered(cluster) == expected
    await cluster.wait_baseline(within_s=5)
