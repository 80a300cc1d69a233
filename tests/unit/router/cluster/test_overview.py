"""What people are told of workers: what they said last, each pair that is ours, within bounds."""

from types import SimpleNamespace
from typing import cast

from diptych.v1 import worker_pb2
from router.cluster.decode_link import DecodeLink
from router.cluster.member import DecodeMember, PrefillMember
from router.cluster.overview import MAX_PAIRS, MAX_WORKERS, overview
from router.cluster.watch import WorkerWatch
from router.generation.cluster_report import BlockReport, PairReport, WorkerReport

READY = worker_pb2.SERVING_STATE_READY


def watch(address: str, state: worker_pb2.WorkerState | None) -> WorkerWatch:
    return cast(WorkerWatch, SimpleNamespace(address=address, state=state, worker=None))


def prefill(address: str, state: worker_pb2.WorkerState | None) -> PrefillMember:
    return PrefillMember(watch(address, state), max_pending_tokens=1)


def decode(address: str, state: worker_pb2.WorkerState | None) -> DecodeMember:
    link = SimpleNamespace(watch=watch(address, state), worker=None)
    return DecodeMember(cast(DecodeLink, link))


def pair(source: str, num_pulls: int = 0) -> worker_pb2.Pair:
    made = worker_pb2.Pair(
        source_address=source,
        state=worker_pb2.PAIR_STATE_PROVEN,
        transport="nixl",
        bytes_per_s=2e9,
    )
    made.transfer.num_pulls = num_pulls
    return made


def test_a_worker_is_as_it_said_last() -> None:
    blocks = worker_pb2.BlockCounts(
        total=21, free=1, cached=2, running=3, reserved=4, leased=5, quarantined=6
    )
    state = worker_pb2.WorkerState(
        state=READY, blocks=blocks, num_running=7, num_waiting=8, max_num_seqs=9,
        num_pending_prefill_tokens=10, prefill_tokens_per_s=11.0, decode_step_s=0.5,
        message="x" * 1000,
    )  # fmt: skip
    (told,) = overview([prefill("p:1", state)], []).prefill
    assert told == WorkerReport(
        address="p:1", state="ready", message="x" * 200, is_used=False,
        blocks=BlockReport(
            total=21, free=1, cached=2, running=3, reserved=4, leased=5, quarantined=6
        ),
        num_running=7, num_waiting=8, max_num_seqs=9, num_pending_prefill_tokens=10,
        prefill_tokens_per_s=11.0, decode_step_s=0.5,
    )  # fmt: skip
    owners = [told.blocks.free, told.blocks.cached, told.blocks.running, told.blocks.reserved]
    assert sum(owners) + told.blocks.leased + told.blocks.quarantined == told.blocks.total


def test_one_that_says_nothing_and_one_of_a_later_version() -> None:
    later = worker_pb2.WorkerState(state=99)  # type: ignore[arg-type]
    told = overview([], [decode("b:1", later), decode("a:1", None)]).decode
    assert [(each.address, each.state) for each in told] == [
        ("a:1", "unreachable"),
        ("b:1", "unknown"),
    ]


def test_pairs_with_workers_of_other_routers_are_not_told() -> None:
    state = worker_pb2.WorkerState(state=READY, pairs=[pair("p:1", 3), pair("elsewhere:1")])
    told = overview([prefill("p:1", None)], [decode("d:1", state)])
    assert told.pairs == (
        PairReport(
            prefill="p:1", decode="d:1", state="proven", transport="nixl", bytes_per_s=2e9,
            num_pulls=3,
        ),
    )  # fmt: skip
    assert told.num_pairs == 1


def test_there_is_a_bound_and_the_counts_are_of_all() -> None:
    assert MAX_PAIRS < 4 * (MAX_WORKERS + 1)
    addresses = [f"p{index}:1" for index in range(MAX_WORKERS + 1)]
    state = worker_pb2.WorkerState(state=READY, pairs=[pair(address) for address in addresses])
    told = overview(
        [prefill(address, None) for address in addresses],
        [decode(f"d{index}:1", state) for index in range(4)],
    )
    assert (len(told.prefill), told.num_prefill) == (MAX_WORKERS, MAX_WORKERS + 1)
    assert (len(told.pairs), told.num_pairs) == (MAX_PAIRS, 4 * (MAX_WORKERS + 1))
