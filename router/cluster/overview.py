"""What the workers said last, as plain data for people. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from diptych.v1 import worker_pb2
from diptych.wire_names import PAIR_STATE_NAMES
from router.cluster.member import (
    BYTES_PER_S,
    STEP_S,
    TOKENS_PER_S,
    DecodeMember,
    PrefillMember,
    measured,
)
from router.generation.cluster_report import BlockReport, PairReport, WorkerReport

MAX_WORKERS: Final = 64  # of one pool that are told of: a report is written in milliseconds
MAX_PAIRS: Final = 256  # likewise; no more are looked at
MAX_MESSAGE_CHARACTERS: Final = 200
UNREACHABLE: Final = "unreachable"

_STATES: Final[Mapping[int, str]] = {
    worker_pb2.SERVING_STATE_STARTING: "starting",
    worker_pb2.SERVING_STATE_READY: "ready",
    worker_pb2.SERVING_STATE_DRAINING: "draining",
    worker_pb2.SERVING_STATE_FAILED: "failed",
}
_UNKNOWN: Final = "unknown"  # what a newer worker says


class Overview(NamedTuple):
    """The workers of both pools, and the ways between those that this router knows."""

    num_prefill: int
    num_decode: int
    num_pairs: int
    prefill: tuple[WorkerReport, ...]
    decode: tuple[WorkerReport, ...]
    pairs: tuple[PairReport, ...]


def overview(prefill: Iterable[PrefillMember], decode: Iterable[DecodeMember]) -> Overview:
    """By address; of each kind no more than the bounds above."""
    sources = sorted(prefill, key=_address)
    sinks = sorted(decode, key=_address)
    pairs = (pair for sink in sinks for pair in _pairs(sink))
    return Overview(
        num_prefill=len(sources),
        num_decode=len(sinks),
        num_pairs=sum(len(sink.own_pairs) for sink in sinks),
        prefill=tuple(map(_worker, sources[:MAX_WORKERS])),
        decode=tuple(map(_worker, sinks[:MAX_WORKERS])),
        pairs=tuple(islice(pairs, MAX_PAIRS)),
    )


def _address(member: PrefillMember | DecodeMember) -> str:
    return member.watch.address


def _worker(member: PrefillMember | DecodeMember) -> WorkerReport:
    state = member.watch.state
    if state is None:
        return WorkerReport(address=_address(member), state=UNREACHABLE)
    blocks = state.blocks
    return WorkerReport(
        address=_address(member),
        state=_STATES.get(state.state, _UNKNOWN),
        message=state.message[:MAX_MESSAGE_CHARACTERS],
        is_used=member.view is not None,
        blocks=BlockReport(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            running=blocks.running,
            reserved=blocks.reserved,
            leased=blocks.leased,
            quarantined=blocks.quarantined,
        ),
        num_running=state.num_running,
        num_waiting=state.num_waiting,
        max_num_seqs=state.max_num_seqs,
        num_pending_prefill_tokens=state.num_pending_prefill_tokens,
        prefill_tokens_per_s=measured(state.prefill_tokens_per_s, TOKENS_PER_S),
        decode_step_s=measured(state.decode_step_s, STEP_S),
    )


def _pairs(member: DecodeMember) -> Iterator[PairReport]:
    """Of this router's own prefill workers: a worker may know others by other routers."""
    state = member.watch.state
    if state is None:
        return
    for pair in (state.pairs[place] for place in member.own_pairs if place < len(state.pairs)):
        yield PairReport(
            prefill=pair.source_address,
            decode=_address(member),
            state=PAIR_STATE_NAMES.get(pair.state, _UNKNOWN),
            transport=pair.transport[:MAX_MESSAGE_CHARACTERS],
            bytes_per_s=measured(pair.bytes_per_s, BYTES_PER_S),
            num_pulls=pair.transfer.num_pulls,
            way=pair.way[:MAX_MESSAGE_CHARACTERS],
        )
