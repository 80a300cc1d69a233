"""A decode worker that only pretends: each sequence gets a token a step, all at once.

It says how it is as often as a real one that is busy.

Those of requests whose id begins with ``bad`` get a few tokens of a thousand characters.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import grpc

from diptych.rpc.server import Context
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, decode_pb2_grpc, worker_pb2
from diptych.worker.status import LOAD_GAP_S
from tests.bench.bare_streams import STEP_S, next_step
from tests.integration.fake_workers import FakeWorker

LONG_ID = 401  # the token with the long text
_LETTERS = range(66, 80)  # a to n, of the tokenizer that the router has
_LONG_PER_STEP = 4
_HEARTBEAT_S = Timers().heartbeat_s


@dataclass(slots=True)
class _Sequence:
    request_id: str
    position: int
    end: int  # the position behind its last token
    is_started: bool = False

    def next_ids(self) -> list[int]:
        if self.request_id.startswith("bad"):
            return _LONG_PER_STEP * [LONG_ID]
        return [_LETTERS[self.position % len(_LETTERS)]]


class PacedDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """Any number of routers' sequences; each stream has its own. ``num_sequences``: of the last.

    ``sent_s`` has the moment of each token by its request's id, on the monotonic clock.
    """

    role = worker_pb2.WORKER_ROLE_DECODE
    watch_gap_s = LOAD_GAP_S

    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__()
        self.num_sequences = 0
        self._step_s = step_s
        self._sent_s: defaultdict[str, list[float]] = defaultdict(list)

    @property
    def sent_s(self) -> Mapping[str, list[float]]:
        return self._sent_s

    def add_services(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        welcome = decode_pb2.Welcome(incarnation=self.incarnation)
        events = asyncio.Queue[decode_pb2.DecodeEvent]()
        events.put_nowait(decode_pb2.DecodeEvent(welcome=welcome))
        sequences: dict[int, _Sequence] = {}
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(_write(events, context)),
                tasks.create_task(self._step(sequences, events)),
                tasks.create_task(self._beat(events)),
            ]
            async for command in request_iterator:
                _handle(command, sequences, events)
            for other in others:
                other.cancel()
        return
        yield

    async def _step(
        self, sequences: dict[int, _Sequence], events: "asyncio.Queue[decode_pb2.DecodeEvent]"
    ) -> None:
        while True:
            await next_step(self._step_s)
            self.num_sequences = len(sequences)
            step, ended, now = decode_pb2.StepTokens(), [], time.monotonic()
            for sequence_id, each in sequences.items():
                if each.is_started:
                    new = each.next_ids()
                    step.sequences.add(
                        sequence_id=sequence_id, position=each.position, token_ids=new
                    )
                    self._sent_s[each.request_id].append(now)
                    each.position += len(new)
                    if each.position >= each.end:
                        ended.append(sequence_id)
            if step.sequences:
                events.put_nowait(decode_pb2.DecodeEvent(step=step))
            for sequence_id in ended:
                del sequences[sequence_id]
                end = decode_pb2.Ended(
                    sequence_id=sequence_id, finish_reason=common_pb2.FINISH_REASON_LENGTH
                )
                events.put_nowait(decode_pb2.DecodeEvent(ended=end))

    async def _beat(self, events: "asyncio.Queue[decode_pb2.DecodeEvent]") -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            heartbeat = common_pb2.Heartbeat(progress=self.progress())
            events.put_nowait(decode_pb2.DecodeEvent(heartbeat=heartbeat))


def _handle(
    command: decode_pb2.DecodeCommand,
    sequences: dict[int, _Sequence],
    events: "asyncio.Queue[decode_pb2.DecodeEvent]",
) -> None:
    match command.WhichOneof("command"):
        case "reserve":
            reserve = command.reserve
            spec = reserve.spec
            end = spec.num_prompt_tokens + spec.sampling.max_tokens
            sequences[reserve.sequence_id] = _Sequence(reserve.request_id, len(spec.token_ids), end)
            reserved = decode_pb2.Reserved(sequence_id=reserve.sequence_id)
            events.put_nowait(decode_pb2.DecodeEvent(reserved=reserved))
        case "start":
            sequences[command.start.sequence_id].is_started = True
        case "release":
            if sequences.pop(command.release.sequence_id, None) is not None:
                ended = decode_pb2.Ended(sequence_id=command.release.sequence_id)
                events.put_nowait(decode_pb2.DecodeEvent(ended=ended))


async def _write(events: "asyncio.Queue[decode_pb2.DecodeEvent]", context: Context) -> None:
    while True:
        await context.write(await events.get())
