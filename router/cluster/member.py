"""What placement sees of one worker: a view, made anew only when something of it changed."""

from collections.abc import Container, Mapping, Sequence
from typing import Final, NamedTuple

from diptych.block_needs import ShippedBytes
from diptych.paced import Paced, from_proto
from diptych.step_model import StepWork
from diptych.v1 import worker_pb2
from router.cluster.decode_link import DecodeLink
from router.cluster.watch import NO_ROLES, WorkerWatch, able_roles_of, roles_of
from router.placement.forecast import computes_none_s
from router.placement.place import NOWHERE, Place
from router.placement.prefill_load import OwnPrompts, PrefillLoad
from router.placement.runway import Runway
from router.placement.takes import NO_DECODE, NO_PREFILL, decode_takes, is_more
from router.placement.views import DecodeView, EngineView, PrefillView, WorkerId


class Limits(NamedTuple):
    """Of what can be measured at all: beyond them sums with it are no numbers any more."""

    least: float
    most: float


TOKENS_PER_S: Final = Limits(1e-3, 1e9)
STEP_S: Final = Limits(1e-6, 1e6)
BYTES_PER_S: Final = Limits(1.0, 1e15)
_TIME_RATIO: Final = Limits(0.0, 1.0)
_AGE_S: Final = Limits(-100.0, 1e6)


class Gate(NamedTuple):
    """What decides whether a worker may be used at all, load aside.

    While it stays the same, no placement becomes possible that was not, no other peers
    have to be told, and no length or model has to be booked.
    """

    worker: WorkerId | None
    state: int
    model_digest: str
    text_digest: str
    max_model_len: int
    local_prefill: bool
    pairs_version: int
    roles: frozenset[int]  # of which it takes new work
    able_roles: frozenset[int]  # that it could take


def gate_of(watch: WorkerWatch) -> Gate:
    """The gate of the worker that ``watch`` looks at."""
    state = watch.state
    if state is None:
        return Gate(None, 0, "", "", 0, False, 0, NO_ROLES, NO_ROLES)
    return Gate(
        WorkerId(watch.address, state.incarnation),
        state.state,
        state.layout.model_digest,
        state.text_digest,
        state.max_model_len,
        state.local_prefill,
        state.pairs_version,
        roles_of(state),
        able_roles_of(state),
    )


class PrefillMember:
    """A worker as one that computes prompts: what placement sees of it while it does.

    After ``told`` and ``loaded`` comes ``refresh``, also of the member that is beside it.
    """

    role = worker_pb2.WORKER_ROLE_PREFILL

    def __init__(self, watch: WorkerWatch, runway: Runway) -> None:
        self.watch = watch
        self.gate = gate_of(watch)
        self.is_placeable = False  # it is ready, has this role and the model that is served
        self.beside: DecodeMember | None = None  # the same worker, as one that decodes
        self.found_at = NOWHERE  # where its discovery says that it is
        self._load = PrefillLoad(runway)
        self._took = NO_PREFILL
        self._view: PrefillView | None = None

    def told(self, own: OwnPrompts) -> None:
        """The worker said how it is, or is gone; what of ours is there."""
        state = self.watch.state
        if state is not None:
            self._load.told(
                state.num_pending_prefill_tokens,
                measured(state.prefill_tokens_per_s, TOKENS_PER_S),
                own,
                computes_none_s(_engine(self.watch, 0)),
            )

    def loaded(self, own: OwnPrompts) -> None:
        """So much of ours waits there now."""
        self._load.loaded(own, self.watch.now_s - self.watch.heard_s)

    @property
    def view(self) -> PrefillView | None:
        """As of now; None while it may not be used."""
        state, worker = self.watch.state, self.watch.worker
        if not self.is_placeable or state is None or worker is None:
            return None
        if self._view is None:
            load, takes = self._load, self._load.takes(self._num_beside_tokens)
            self._view = PrefillView(
                worker=worker,
                num_pending_tokens=load.num_pending_tokens + self._num_beside_tokens,
                max_model_len=state.max_model_len,
                has_runway=takes.has_runway,
                is_open_beyond=takes.is_open_beyond,
                num_own_tokens=load.own.num_tokens,
                own_payers=load.own.payers,
                num_available_blocks=_num_available_blocks(state),
                tokens_per_s=measured(state.prefill_tokens_per_s, TOKENS_PER_S),
                place=_place(state).over(self.found_at),
                engine=_engine(
                    self.watch,
                    self.num_sent_tokens + self._num_beside_tokens,
                    self.num_computed_tokens,
                    num_ended_rows=0 if self.beside is None else self.beside.num_ended_rows,
                ),
            )
        return self._view

    @property
    def num_sent_tokens(self) -> int:
        """Of prompts of ours, since the worker told how it is."""
        return self._load.own.num_sent_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Of ours that it had when it told, those that it has no more."""
        return self._load.num_computed_tokens

    @property
    def _num_beside_tokens(self) -> int:
        """Of prompts of ours that it computes for sequences of its own, since it told."""
        return 0 if self.beside is None else self.beside.num_sent_tokens

    def refresh(self) -> bool:
        """Something of it may be another than before; whether it may take more."""
        self._view = None
        is_usable = self.is_placeable and self.watch.state is not None
        takes = self._load.takes(self._num_beside_tokens) if is_usable else NO_PREFILL
        took, self._took = self._took, takes
        return is_more(takes, took)


class DecodeMember:
    """A worker as one that decodes: what placement sees of it while it does.

    After ``told``, and a change of its link, comes ``refresh``, also of the member beside it.
    """

    role = worker_pb2.WORKER_ROLE_DECODE

    def __init__(self, link: DecodeLink) -> None:
        self.link = link
        self.watch = link.watch
        self.gate = gate_of(link.watch)
        self.is_placeable = False  # it is ready, has this role and the model that is served
        self.beside: PrefillMember | None = None  # the same worker, as one that computes prompts
        self.found_at = NOWHERE  # where its discovery says that it is
        self.own_pairs: Sequence[int] = ()  # where, among those it told, pairs of this router are
        self._pairs: Mapping[WorkerId, float] = {}  # proven ones, to bytes/s
        self._bytes_per_s: Mapping[str, float] = {}  # of those, to sources that we know
        self._proven: frozenset[str] = frozenset()
        self._failed: frozenset[WorkerId] = frozenset()  # sources that it told it cannot pull from
        self._unreadable: frozenset[str] = frozenset()  # of those, such as we know
        self._took = NO_DECODE
        self._view: DecodeView | None = None

    def told(self) -> None:
        """The worker said how it is, or is gone."""
        state = self.watch.state
        if state is not None:
            num_sequences = state.num_running + state.num_waiting + state.num_reserved
            self.link.load.told(num_sequences, _paced(state), self.watch.heard_s)

    def read_pairs(self) -> None:
        """Its pairs may be others than before; ``set_sources`` follows."""
        state = self.watch.state
        self._pairs = {} if state is None else _proven_pairs(state)
        self._failed = frozenset() if state is None else _failed_pairs(state)

    def find_own_pairs(self, addresses: Container[str]) -> None:
        """Its pairs, or the ``addresses`` of this router's prefill workers, may be others.

        Here, once for each such change, so that who tells people of pairs need not look at
        every pair of every worker each time.
        """
        pairs = () if self.watch.state is None else self.watch.state.pairs
        self.own_pairs = [
            place for place, pair in enumerate(pairs) if pair.source_address in addresses
        ]

    def set_sources(self, sources: frozenset[WorkerId]) -> bool:
        """Only pairs with these count: another router's address of a worker proves nothing.

        True if there are pairs that were not proven before, or had not failed.
        """
        self._bytes_per_s = {
            source.incarnation: bytes_per_s
            for source, bytes_per_s in self._pairs.items()
            if source in sources
        }
        before = self._proven, self._unreadable
        self._proven = frozenset(self._bytes_per_s)
        self._unreadable = frozenset(each.incarnation for each in self._failed & sources)
        self._view = None
        return not (self._proven <= before[0] and self._unreadable <= before[1])

    @property
    def view(self) -> DecodeView | None:
        """As of now; None while it may not be used."""
        state, worker = self.watch.state, self.link.worker
        if not self.is_placeable or state is None or worker is None or not self._is_up:
            return None
        if self._view is None:
            load, num_sent = self.link.load, self.num_sent_tokens + self._num_leased_tokens
            self._view = DecodeView(
                worker=worker,
                num_sequences=load.num_sequences,
                max_model_len=state.max_model_len,
                local_prefill=state.local_prefill,
                proven=self._proven,
                unreadable=self._unreadable,
                max_num_seqs=state.max_num_seqs or None,
                own_shares=load.shares,
                promised=load.promised,
                num_pending_tokens=state.num_pending_prefill_tokens + num_sent,
                num_available_blocks=_num_available_blocks(state),
                num_blocks=state.blocks.total,
                num_giving_way=state.num_giving_way,
                num_giving_way_blocks=state.num_giving_way_blocks,
                step_s=measured(state.decode_step_s, STEP_S),
                prefill_time_ratio=measured(state.prefill_time_ratio, _TIME_RATIO)
                if self._leases
                else 0.0,
                shipped=ShippedBytes.told(state.layout),
                bytes_per_s=self._bytes_per_s,
                place=_place(state).over(self.found_at),
                engine=_engine(
                    self.watch,
                    num_sent,
                    0 if self.beside is None else self.beside.num_computed_tokens,
                    load.paced,
                    load.num_ended_rows,
                ),
            )
        return self._view

    @property
    def num_sent_tokens(self) -> int:
        """Of prompts of ours that it computes itself, since the worker told how it is."""
        return self.link.load.num_sent_tokens

    @property
    def num_ended_rows(self) -> int:
        """Of ours, that decoded when the worker told."""
        return self.link.load.num_ended_rows

    @property
    def _leases(self) -> bool:
        """Whether it takes prompts to lease, so that what those took of late will go on."""
        return self.beside is not None and self.beside.role in self.gate.roles

    @property
    def _num_leased_tokens(self) -> int:
        """Of prompts that were sent there since, to be leased."""
        return 0 if self.beside is None else self.beside.num_sent_tokens

    @property
    def _is_up(self) -> bool:
        """Whether watch and stream are of the same process."""
        return self.link.worker is not None and self.link.worker == self.watch.worker

    def refresh(self) -> bool:
        """Something of it may be another than before; whether it may take more."""
        self._view = None
        took, self._took = self._took, decode_takes(self.view)
        return is_more(self._took, took)


def measured(value: float, limits: Limits) -> float:
    """What a worker says that it measured; 0, as if it had not, of what cannot be."""
    return value if limits.least <= value <= limits.most else 0.0


def _place(state: worker_pb2.WorkerState) -> Place:
    return Place(state.zone, state.nvlink_domain)


def _paced(state: worker_pb2.WorkerState) -> tuple[Paced, ...] | None:
    """None: it is older."""
    return from_proto(state.tightest_paced) if state.HasField("num_paced") else None


def _engine(
    watch: WorkerWatch,
    num_departed_tokens: int,
    num_computed_tokens: int = 0,
    paced: tuple[Paced, ...] | None = None,
    num_ended_rows: int = 0,
) -> EngineView | None:
    state, model = watch.state, watch.step_model
    if state is None or model is None:
        return None
    return EngineView(
        model=model,
        max_batched_tokens=state.max_batched_tokens,
        work=StepWork(
            num_decode_rows=state.num_decoding,
            num_context_tokens=state.num_context_tokens,
            num_prefill_tokens=state.num_pending_prefill_tokens,
            num_attention_pairs=state.num_pending_attention_pairs,
        ),
        num_departed_tokens=num_departed_tokens,
        num_computed_tokens=num_computed_tokens,
        num_ended_rows=num_ended_rows,
        paced=paced,
        prefill_age_s=_prefill_age_s(state),
        heard_s=watch.heard_s,
        prefill_time_ratio=measured(state.prefill_time_ratio, _TIME_RATIO),
    )


def _prefill_age_s(state: worker_pb2.WorkerState) -> float | None:
    age_s = state.prefill_age_s
    is_told = state.HasField("prefill_age_s") and _AGE_S.least <= age_s <= _AGE_S.most
    return age_s if is_told else None


def _num_available_blocks(state: worker_pb2.WorkerState) -> int | None:
    blocks = state.blocks
    return blocks.free + blocks.cached if blocks.total else None


def _proven_pairs(state: worker_pb2.WorkerState) -> dict[WorkerId, float]:
    return {
        WorkerId(pair.source_address, pair.source_incarnation): measured(
            pair.bytes_per_s, BYTES_PER_S
        )
        for pair in state.pairs
        if pair.state == worker_pb2.PAIR_STATE_PROVEN
    }


def _failed_pairs(state: worker_pb2.WorkerState) -> frozenset[WorkerId]:
    return frozenset(
        WorkerId(pair.source_address, pair.source_incarnation)
        for pair in state.pairs
        if pair.state == worker_pb2.PAIR_STATE_FAILED
    )
