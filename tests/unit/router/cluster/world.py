"""A cluster as the router sees it, without sockets: its workers say what a test makes them say."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from diptych.v1 import common_pb2, decode_pb2, worker_pb2
from router.cluster.decode_link import DecodeLink, ReservationListener
from router.cluster.members import Cluster
from router.cluster.watch import WorkerWatch
from router.config import RouterConfig
from router.discovery.source import Targets
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.views import WorkerId
from tests.unit.router.cluster.last_words import LastWords

READY = worker_pb2.SERVING_STATE_READY


class FakeChannel:
    async def close(self, grace: float | None) -> None:
        pass


def targets(prefill: Sequence[str], decode: Sequence[str]) -> Targets:
    return Targets(prefill=frozenset(prefill), decode=frozenset(decode))


class World:
    """A cluster whose workers say what a test makes them say."""

    def __init__(self, *, prefill: int = 0, decode: int = 0) -> None:
        self.num_changes = 0
        self.on_change: Callable[[], object] = lambda: None
        self.links: list[DecodeLink] = []
        self.sequence_ids: list[list[int]] = []  # by link
        self._next_id = itertools.count(1)
        self._now_s = time.monotonic()
        self.policy = LeastLoaded(
            CacheIndex(1000), local_below_tokens=0, allow_local=True, allow_recompute=True
        )
        self.cluster = Cluster(
            RouterConfig(model="m"),
            self.policy,
            incarnation="r1",
            text_digest="text",
            on_change=self._changed,
        )
        self.prefill = [f"p{i}:1" for i in range(prefill)]
        self.decode = [f"d{i}:1" for i in range(decode)]
        self.cluster.set_members(targets(self.prefill, self.decode))
        for address in [*self.prefill, *self.decode]:
            self.says(address)
        for address in self.decode:
            self.links.append(self.link(address))
            self.sequence_ids.append([])

    def _changed(self) -> None:
        self.num_changes += 1
        self.on_change()

    def reserve(
        self,
        worker: WorkerId,
        *,
        num_tokens: int = 0,
        to_pull: bool = False,
        payer: bytes = b"somebody",
        is_started: bool = False,
        is_heard: bool = True,
        tpot_s: float = 0.0,
        num_expected: int = 0,
        listener: ReservationListener | None = None,
    ) -> int:
        """One sequence of ours on ``worker``, which answers at once; what it is called."""
        index = self.decode.index(worker.address)
        sequence_id = next(self._next_id)
        spec = common_pb2.SequenceSpec(
            token_ids=range(num_tokens),
            num_prompt_tokens=num_tokens,
            payer=payer,
            tpot_s=tpot_s,
            num_expected_tokens=num_expected,
        )
        reserve = decode_pb2.Reserve(sequence_id=sequence_id, spec=spec, to_pull=to_pull)
        assert self.links[index].reserve(reserve, listener or LastWords())
        self.sequence_ids[index].append(sequence_id)
        if is_heard:
            self.answers(worker.address, sequence_id)
        if is_started:
            self.links[index].start(decode_pb2.Start(sequence_id=sequence_id))
        return sequence_id

    def answers(self, address: str, sequence_id: int) -> None:
        """The worker has blocks for it."""
        reserved = decode_pb2.Reserved(sequence_id=sequence_id)
        self.links[self.decode.index(address)]._handle(decode_pb2.DecodeEvent(reserved=reserved))

    def passes(self, seconds: float) -> None:
        """All watches look at one clock, which goes on by so much."""
        self._now_s += seconds
        for watch in self.cluster._watches.values():
            watch._clock = partial(float, self._now_s)

    def draws(self, address: str, sequence_id: int) -> None:
        """A token of it comes."""
        tokens = decode_pb2.SequenceTokens(sequence_id=sequence_id, token_ids=[5])
        step = decode_pb2.StepTokens(sequences=[tokens])
        self.links[self.decode.index(address)]._handle(decode_pb2.DecodeEvent(step=step))

    def ends(self, address: str, sequence_id: int) -> None:
        """It is over."""
        ended = decode_pb2.Ended(sequence_id=sequence_id)
        self.links[self.decode.index(address)]._handle(decode_pb2.DecodeEvent(ended=ended))

    def says(self, address: str, **changes: object) -> None:
        """The worker at ``address`` sends a state: ready, all its pairs proven, no load."""
        is_prefill = address.startswith("p")
        state = worker_pb2.WorkerState(
            incarnation=f"{address}-1",
            role=worker_pb2.WORKER_ROLE_PREFILL if is_prefill else worker_pb2.WORKER_ROLE_DECODE,
            state=READY,
            layout=common_pb2.KVLayout(block_size=16, model_digest="m", block_bytes=1600),
            text_digest="text",
            max_model_len=1000,
            max_num_seqs=4,
            pairs_version=0 if is_prefill else 1,
            local_prefill=True,
        )
        if not is_prefill:
            state.pairs.extend(proven(source) for source in self.prefill)
        if "model_digest" in changes:
            state.layout.model_digest = str(changes.pop("model_digest"))
        state.MergeFrom(worker_pb2.WorkerState(**changes))  # type: ignore[arg-type]
        self.watch(address)._update(state)

    def watch(self, address: str) -> WorkerWatch:
        return next(m.watch for m in self.cluster._members() if m.watch.address == address)

    def link(self, address: str) -> DecodeLink:
        """The stream to a decode worker, which is up from now on."""
        link = next(m.link for m in self.cluster._decode.values() if m.watch.address == address)
        welcome = decode_pb2.Welcome(incarnation=f"{address}-1")
        link._handle(decode_pb2.DecodeEvent(welcome=welcome))
        return link


def proven(source: str) -> worker_pb2.Pair:
    return worker_pb2.Pair(
        source_address=source,
        source_incarnation=f"{source}-1",
        state=worker_pb2.PAIR_STATE_PROVEN,
        bytes_per_s=2e9,
    )


def placeable(world: World) -> tuple[set[str], set[str]]:
    """Addresses of the prefill and the decode workers that a snapshot has."""
    snapshot = world.cluster.snapshot()
    return (
        {view.worker.address for view in snapshot.prefill},
        {view.worker.address for view in snapshot.decode},
    )


def welcome(incarnation: str) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(welcome=decode_pb2.Welcome(incarnation=incarnation))
