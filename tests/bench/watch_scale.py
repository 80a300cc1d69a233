"""What Watch and WatchCache cost a router with 100 prefill and 100 decode workers. No sockets.

Feeds a cluster the messages of busy workers, counts what they made it do, and says what
share of a core they take at the rate at which busy workers send: those of Watch and, apart,
those that tell of full caches in which each new block takes the place of one. Decoding the
messages is in it; gRPC's own work on them is not.

    python -m tests.bench.watch_scale
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import NamedTuple

from diptych.cache_change import CacheChange
from diptych.cache_log import CacheLog
from diptych.v1 import cache_pb2, common_pb2, decode_pb2, worker_pb2
from router.cluster.members import Cluster
from router.config import RouterConfig
from router.discovery.source import Targets
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.query import Query

NUM_WORKERS = 100  # of each kind
MESSAGES_PER_S = 4  # of one busy worker: so often it tells what changes with each step
_NUM_ROUNDS = 20
_CACHED_BLOCKS = 4096
_BLOCKS_BETWEEN = 32  # that are computed between two messages: 2,048 tokens/s of one worker
_PREFILL = [f"10.0.{i}.17:50051" for i in range(NUM_WORKERS)]
_DECODE = [f"10.1.{i}.17:50052" for i in range(NUM_WORKERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCost:
    """Times in seconds of one core."""

    num_messages: int
    num_changes: int  # of them, those after which a placement may have become possible
    decode_message_bytes: int
    message_s: float
    snapshot_s: float
    place_s: float
    busy_ratio: float  # of a core, at MESSAGES_PER_S from every worker
    cache_message_s: float
    cache_message_bytes: int
    cache_busy_ratio: float  # likewise, beside the other


class _CacheCost(NamedTuple):
    message_s: float
    message_bytes: int


class _Cache:
    """A full one, in which the oldest goes first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seq: int | None = None
        self._random = random.Random(name)
        self._keys: dict[bytes, None] = {}
        self._log = CacheLog(self._keys.keys(), _CACHED_BLOCKS)
        for _ in range(_CACHED_BLOCKS):
            self._add()

    def turn_over(self) -> None:
        for _ in range(_BLOCKS_BETWEEN):
            oldest = next(iter(self._keys))
            del self._keys[oldest]
            self._log.left(oldest)
            self._add()

    def tell(self) -> list[bytes]:
        changes = list(self._log.since(self._seq))
        self._seq = changes[-1].to_seq
        return [change.to_proto(self.name).SerializeToString() for change in changes]

    def _add(self) -> None:
        key = self._random.randbytes(16)
        self._keys[key] = None
        self._log.entered(key)


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def measure() -> WatchCost:
    """Feed every worker's messages, look at the result, place one request each round."""
    counter = _Counter()
    policy = LeastLoaded(
        CacheIndex(65_536), local_below_tokens=64, allow_local=True, allow_recompute=True
    )
    config = RouterConfig(model="none", prefill=_PREFILL, decode=_DECODE)
    cluster = Cluster(config, policy, incarnation="r", text_digest="t", on_change=counter)
    cluster.set_members(Targets(prefill=frozenset(_PREFILL), decode=frozenset(_DECODE)))
    _feed(cluster, _messages(0))
    for member in cluster._decode.values():
        welcome = decode_pb2.Welcome(incarnation=_incarnation(member.watch.address))
        member.link._handle(decode_pb2.DecodeEvent(welcome=welcome))
    assert cluster.num_proven_pairs == NUM_WORKERS**2
    counter.count, message_s, snapshot_s, place_s = 0, 0.0, 0.0, 0.0
    query = Query(num_tokens=2000, num_max_tokens=2100)
    for number in range(1, _NUM_ROUNDS + 1):
        sent = _messages(number)
        began = time.process_time()
        _feed(cluster, sent)
        fed = time.process_time()
        snapshot = cluster.snapshot()
        seen = time.process_time()
        assert policy.place(query, snapshot) is not None
        message_s, snapshot_s = message_s + fed - began, snapshot_s + seen - fed
        place_s += time.process_time() - seen
    num_messages = _NUM_ROUNDS * 2 * NUM_WORKERS
    caches = _follow_caches(policy.cache)
    return WatchCost(
        num_messages=num_messages,
        num_changes=counter.count,
        decode_message_bytes=len(sent[_DECODE[-1]]),
        message_s=message_s / num_messages,
        snapshot_s=snapshot_s / _NUM_ROUNDS,
        place_s=place_s / _NUM_ROUNDS,
        busy_ratio=message_s / num_messages * 2 * NUM_WORKERS * MESSAGES_PER_S,
        cache_message_s=caches.message_s,
        cache_message_bytes=caches.message_bytes,
        cache_busy_ratio=caches.message_s * 2 * NUM_WORKERS * MESSAGES_PER_S,
    )


def _follow_caches(index: CacheIndex) -> _CacheCost:
    """Each worker tells of what its cache has, then again and again of what became other."""
    caches = [_Cache(_incarnation(address)) for address in [*_PREFILL, *_DECODE]]
    for cache in caches:
        _hear(index, cache.name, cache.tell())
    taken_s, sent = 0.0, b""
    for _ in range(_NUM_ROUNDS):
        for cache in caches:
            cache.turn_over()
            (sent,) = cache.tell()
            began_s = time.process_time()
            _hear(index, cache.name, [sent])
            taken_s += time.process_time() - began_s
    assert index.num_blocks == len(caches) * _CACHED_BLOCKS
    return _CacheCost(taken_s / (_NUM_ROUNDS * len(caches)), len(sent))


def _hear(index: CacheIndex, name: str, sent: list[bytes]) -> None:
    for message in sent:
        told = cache_pb2.CacheChange.FromString(message)
        assert index.told(name, CacheChange.from_proto(told))


def _messages(load: int) -> dict[str, bytes]:
    """What every worker sends, by its address."""
    return {address: _state(address, load).SerializeToString() for address in [*_PREFILL, *_DECODE]}


def _feed(cluster: Cluster, messages: dict[str, bytes]) -> None:
    for member in cluster._members():
        state = worker_pb2.WorkerState.FromString(messages[member.watch.address])
        member.watch._update(state)


def _incarnation(address: str) -> str:
    return address.replace(".", "").replace(":", "").rjust(32, "0")


def _state(address: str, load: int) -> worker_pb2.WorkerState:
    is_prefill = address in _PREFILL
    state = worker_pb2.WorkerState(
        incarnation=_incarnation(address),
        role=worker_pb2.WORKER_ROLE_PREFILL if is_prefill else worker_pb2.WORKER_ROLE_DECODE,
        state=worker_pb2.SERVING_STATE_READY,
        layout=common_pb2.KVLayout(block_size=16, model_digest="m", block_bytes=720896),
        text_digest="t",
        max_model_len=4096,
        max_num_seqs=64,
        progress=common_pb2.EngineProgress(num_steps=load, step_due=True, predicted_step_s=0.05),
        blocks=worker_pb2.BlockCounts(total=4096, free=4000 - load, cached=96 + load),
        num_running=load,
        local_prefill=True,
        pairs_version=0 if is_prefill else 1,
    )
    if not is_prefill:
        state.pairs.extend(
            worker_pb2.Pair(
                source_address=source,
                source_incarnation=_incarnation(source),
                state=worker_pb2.PAIR_STATE_PROVEN,
                transport="nixl",
                bytes_per_s=1e9,
            )
            for source in sorted(_PREFILL)
        )
    return state


async def _main() -> None:
    json.dump(asdict(measure()), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    asyncio.run(_main())
