"""Agents' processes come, go and are replaced; a read ends with its word or with its process."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.wire import Kind, Message, ReadCommand, pack_error
from kvtransfer.config import TransferConfig
from kvtransfer.errors import AgentLostError, AgentTakenError, SourceLostError, TransportError
from kvtransfer.memory import HostMemory
from kvtransfer.transports import child
from kvtransfer.transports.agent_process import AgentOwner, SharedPool
from kvtransfer.transports.child import ChildCopy, ChildPeer, ChildTransport
from kvtransfer.transports.lanes import nixl_lanes


class Process:
    """An AgentProcess that does nothing by itself."""

    pids = itertools.count(1)

    def __init__(self, owner: AgentOwner) -> None:
        self.pid = next(self.pids)
        self.owner = owner
        self.reads: list[int] = []  # told to do, not answered
        self.killed = ""
        self.is_gone = False

    def send(self, message: Message) -> None:
        if message.kind is Kind.READ:
            ReadCommand.unpacked(message.payload)
            self.reads.append(message.id)

    def kill(self, why: str) -> None:
        self.killed = self.killed or why

    def close(self) -> None:
        if not self.is_gone:
            self.kill("closed")
            self.end()

    def end(self) -> None:
        """The system says that it is gone."""
        self.is_gone = True
        self.owner.on_end(self.killed or "signal 11")

    def say(self, kind: Kind, id_: int = 0, payload: bytes = b"") -> None:
        self.owner.on_message(Message(kind, id_, payload))


class Thread:
    """Jobs for later, done when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, job: Callable[[], None]) -> None:
        self.jobs.append((delay_s, job))

    def pass_time(self) -> None:
        """All that is due by now; not what that begins."""
        jobs, self.jobs = self.jobs, []
        for _, job in jobs:
            job()


class Rig:
    """A transport whose processes are stand-ins."""

    def __init__(self, ucx_net_devices: str = "lo", *, read_only: bool = False) -> None:
        self.thread = Thread()
        self.processes: list[Process] = []
        self.pools: list[SharedPool] = []  # as each process maps it
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(child, "AgentProcess", self._start)
        memory = HostMemory(bytearray(64), 16, shared_fd=0)
        self.transport = ChildTransport(
            "nixl",
            nixl_lanes,
            TransferConfig(ucx_net_devices=ucx_net_devices),
            "reader",
            memory,
            cast(Any, self.thread),
            lambda: None,
            read_only=read_only,
        )

    def _start(self, *arguments: Any) -> Process:
        self.pools.append(arguments[2])
        self.processes.append(Process(arguments[3]))
        return self.processes[-1]

    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.is_gone]

    def ready(self) -> Process:
        """The newest process is up."""
        self.processes[-1].say(Kind.READY, 4096, b"metadata")
        return self.processes[-1]

    def connect(self) -> ChildPeer:
        descriptor = kv_source_pb2.MemoryDescriptor()
        descriptor.CopyFrom(self.transport.descriptor())
        return self.transport.connect(descriptor)

    def post(self, peer: ChildPeer) -> ChildCopy:
        copy = peer.read((0, 1), (2, 3))
        assert not copy.post()
        return copy


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.patch.undo()


@pytest.mark.parametrize(
    ("devices", "read_only", "is_so"),
    [("lo", True, True), ("lo", False, False), ("mlx5_0:1", True, False)],
)
def test_who_is_only_read_cannot_write_but_where_devices_ask_for_it(
    devices: str, read_only: bool, is_so: bool
) -> None:
    rig = Rig(devices, read_only=read_only)
    rig.patch.undo()
    (pool,) = rig.pools
    assert pool.read_only is is_so


def test_the_next_agent_is_there_before_the_first_ends_and_other_reads_finish(rig: Rig) -> None:
    first = rig.ready()
    peer = rig.connect()
    stuck, healthy = rig.post(peer), rig.post(peer)
    rig.transport.rebuild()
    rig.transport.rebuild()  # asked again meanwhile
    assert len(rig.processes) == 2
    assert rig.transport.ready
    assert rig.transport.retiring
    later = rig.post(peer)  # the next one is not ready yet
    second = rig.ready()
    assert rig.transport.pid == second.pid
    assert not peer.usable
    with pytest.raises(AgentLostError):
        peer.read((0,), (1,)).post()
    assert rig.connect().usable
    assert not first.killed
    for read_id in first.reads[1:]:
        first.say(Kind.DONE, read_id, b"\1")
    assert healthy.poll()
    assert later.poll()
    assert not first.killed
    rig.thread.pass_time()
    assert first.killed
    assert not stuck.poll(), "it may write until the system says that the process is gone"
    first.end()
    with pytest.raises(AgentLostError):
        stuck.poll()
    assert not rig.transport.retiring
    assert rig.transport.pid == second.pid
    assert len(rig.processes) == 2


def test_a_broken_read_ends_with_its_agent_as_soon_as_the_others_have(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    first = rig.ready()
    peer = rig.connect()
    broken, healthy = rig.post(peer), rig.post(peer)
    first.say(Kind.BROKEN, first.reads[0], pack_error(SourceLostError("gone")))
    assert "its agent is replaced" in caplog.text
    assert not broken.poll()
    rig.ready()
    assert not first.killed
    first.say(Kind.DONE, first.reads[1], b"\0")
    assert healthy.poll()
    assert first.killed
    assert not broken.poll()
    first.end()
    with pytest.raises(SourceLostError, match="gone") as caught:
        broken.poll()
    assert caught.value.broke_agent


def test_an_agent_whose_successor_takes_too_long_ends_all_the_same(rig: Rig) -> None:
    first = rig.ready()
    peer = rig.connect()
    copy = rig.post(peer)
    rig.transport.rebuild()
    rig.thread.pass_time()
    assert not peer.usable
    assert not rig.transport.ready
    with pytest.raises(AgentLostError):
        peer.read((0,), (0,)).post()
    rig.thread.pass_time()
    assert first.killed
    first.end()
    with pytest.raises(AgentLostError):
        copy.poll()
    assert len(rig.processes) == 2
    rig.ready()
    assert rig.transport.ready


def test_a_successor_that_dies_is_followed_by_another(rig: Rig) -> None:
    first = rig.ready()
    rig.transport.rebuild()
    rig.processes[1].end()
    assert rig.transport.ready, "the first one serves on"
    rig.thread.pass_time()  # the first one's, too
    assert first.killed
    assert len(rig.alive()) == 2, "even if the system takes its time to end the first"
    rig.ready()
    first.end()
    rig.thread.pass_time()
    assert rig.transport.ready
    assert len(rig.alive()) == 1


@pytest.mark.parametrize("failed_after_s", [2.0, 12.0, 29.0])
def test_an_agent_that_cannot_start_is_left_alone_for_a_while_however_long_it_took_to_fail(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, failed_after_s: float
) -> None:
    """To register a large pool takes long, and costs CPU."""
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    rig.thread.jobs.clear()
    now_s += failed_after_s
    rig.processes[-1].say(Kind.UNABLE, 0, pack_error(TransportError("no memory may be locked")))
    rig.processes[-1].end()
    assert [delay_s for delay_s, _ in rig.thread.jobs] == [TransferConfig().reprove_s]
    rig.thread.pass_time()
    rig.ready()
    now_s += 60.0  # and one that served for long is followed at once
    rig.processes[-1].end()
    assert [delay_s for delay_s, _ in rig.thread.jobs] == [0.0]


@pytest.mark.parametrize("has_read", [True, False])
def test_an_agent_that_ends_as_it_connects_a_source_blames_that_one_alone(
    rig: Rig, has_read: bool
) -> None:
    """Whether it hangs, and is killed, or crashes; and whether its reads were posted by then."""
    process = rig.ready()
    healthy, silent = rig.connect(), rig.connect()
    for peer in (healthy, silent):
        process.say(Kind.CONNECTING, peer.id)
        if peer is healthy:
            process.say(Kind.CONNECTING)
    posted = [(peer, rig.post(peer)) for peer in (healthy, silent) if has_read]
    process.end()
    for peer, copy in posted:
        with pytest.raises(AgentTakenError if peer is silent else AgentLostError):
            copy.poll()
    with pytest.raises(AgentLostError):
        healthy.read((0,), (1,)).post()
    with pytest.raises(AgentTakenError, match="as it connected the source: signal 11"):
        silent.read((0,), (1,)).post()


def test_an_agent_that_was_to_end_as_it_connected_a_source_blames_nobody(rig: Rig) -> None:
    process = rig.ready()
    peer = rig.connect()
    copy = rig.post(peer)
    process.say(Kind.CONNECTING, peer.id)
    rig.transport.rebuild()
    rig.ready()
    with pytest.raises(AgentLostError):
        peer.read((0,), (1,)).post()
    process.end()
    with pytest.raises(AgentLostError):
        copy.poll()


def test_a_block_that_the_source_does_not_have_is_not_read(rig: Rig) -> None:
    rig.ready()
    for block_id in (4, -1):
        with pytest.raises(TransportError, match="4 blocks"):
            rig.connect().read((0, block_id), (1, 2))


class Replacing(RuleBasedStateMachine):
    """Whatever happens to the processes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.copies: dict[tuple[int, int], ChildCopy] = {}  # by process and read
        self.done: set[tuple[int, int]] = set()  # said to be over

    def teardown(self) -> None:
        self.rig.patch.undo()
        self.rig.transport.close()
        assert not self.rig.alive()
        for copy in self.copies.values():
            assert copy.has_ended

    @precondition(lambda self: self.rig.transport._starting is not None)
    @rule()
    def get_ready(self) -> None:
        if not self.rig.processes[-1].is_gone:
            self.rig.ready()

    @rule()
    def rebuild(self) -> None:
        self.rig.transport.rebuild()

    @precondition(lambda self: self.rig.transport.ready)
    @rule()
    def post(self) -> None:
        (process,) = [p for p in self.rig.alive() if p.pid == self.rig.transport.pid]
        copy = self.rig.post(self.rig.connect())
        self.copies[process.pid, process.reads[-1]] = copy

    @precondition(lambda self: self.copies)
    @rule(
        data=st.data(),
        kind=st.sampled_from([Kind.DONE, Kind.FAILED, Kind.BROKEN]),
    )
    def answer(self, data: st.DataObject, kind: Kind) -> None:
        open_ = [(p, read_id) for p in self.rig.alive() for read_id in p.reads]
        if not open_:
            return
        process, read_id = data.draw(st.sampled_from(open_))
        process.reads.remove(read_id)
        if kind is not Kind.BROKEN:
            self.done.add((process.pid, read_id))
        process.say(kind, read_id, pack_error(TransportError("x")))

    @rule(data=st.data())
    def process_ends(self, data: st.DataObject) -> None:
        alive = self.rig.alive()
        if alive:
            data.draw(st.sampled_from(alive)).end()

    @rule()
    def killed_ones_end(self) -> None:
        for process in self.rig.alive():
            if process.killed:
                process.end()

    @rule()
    def time_passes(self) -> None:
        self.rig.thread.pass_time()

    @invariant()
    def a_read_has_ended_by_word_or_with_its_process(self) -> None:
        gone = {process.pid for process in self.rig.processes if process.is_gone}
        for (pid, read_id), copy in self.copies.items():
            assert copy.has_ended is (pid in gone or (pid, read_id) in self.done)

    @invariant()
    def there_is_an_agent_or_one_to_come(self) -> None:
        transport = self.rig.transport
        assert transport.ready or transport._starting is not None or self.rig.thread.jobs

    @invariant()
    def no_more_than_needed_are_alive(self) -> None:
        transport = self.rig.transport
        known = len(transport._retiring | {transport._serving, transport._starting} - {None})
        assert len(self.rig.alive()) == known


TestReplacing = Replacing.TestCase
TestReplacing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
