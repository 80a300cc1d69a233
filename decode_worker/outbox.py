"""What a decode stream still has to send: bounded, first in first out, tokens coalesced. Pure."""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from diptych.errors import SlowClientError
from diptych.rpc.channel import MAX_MESSAGE_BYTES
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2, decode_pb2

_FULL_BYTES: Final = MAX_MESSAGE_BYTES // 8  # of a StepTokens, as counted here: the next one begins
_TOKEN_BYTES: Final = 64  # of a token at the most, with all that may stand beside it but
_LIKELY_BYTES: Final = 9  # each of the likeliest: its id, and a float


class NewToken(NamedTuple):
    """One sampled token on its way to the router."""

    sequence_id: int
    position: int  # in the sequence
    token_id: int
    margin: float | None  # None unless asked for
    logprobs: TokenLogprobs | None = None  # None unless asked for

    @property
    def num_bytes(self) -> int:
        """On the wire, at the most."""
        found = self.logprobs
        return _TOKEN_BYTES + _LIKELY_BYTES * (0 if found is None else len(found.top_token_ids))


class Outbox:
    """Unsent events of one router's stream, in order.

    While tokens wait, later ones join the same StepTokens: a slow stream gets
    fewer, larger messages, none of which is too large to be sent, and hardly a
    longer queue. That keeps every sequence's order, because tokens only move forward
    and nothing of a sequence but its Ended may follow its first token. Other events are
    bounded by ``max_events``.
    """

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._queue: deque[decode_pb2.DecodeEvent] = deque()
        self._step: decode_pb2.DecodeEvent | None = None  # the last one in the queue
        self._by_id: dict[int, decode_pb2.SequenceTokens] = {}  # entries of _step
        self._num_bytes = 0  # of _step, at the most
        self._heartbeat: decode_pb2.DecodeEvent | None = None  # the one in the queue

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, event: decode_pb2.DecodeEvent) -> None:
        """Add an event that stands for itself. Raises SlowClientError when full."""
        if len(self._queue) >= self._max_events:
            raise SlowClientError(f"{self._max_events} events are unsent")
        self._queue.append(event)

    def put_tokens(self, tokens: Iterable[NewToken]) -> None:
        """Add one step's tokens to the unsent StepTokens, or to another where that is full."""
        for token in tokens:
            if self._step is None or self._num_bytes >= _FULL_BYTES:
                self._leave_step()
                self._step = decode_pb2.DecodeEvent(step=decode_pb2.StepTokens())
                self._queue.append(self._step)
            self._num_bytes += token.num_bytes
            entry = self._by_id.get(token.sequence_id)
            if entry is None:
                entry = self._step.step.sequences.add(
                    sequence_id=token.sequence_id, position=token.position
                )
                self._by_id[token.sequence_id] = entry
            entry.token_ids.append(token.token_id)
            if token.margin is not None:
                entry.margins.append(token.margin)
            if token.logprobs is not None:
                entry.logprobs.append(token.logprobs.to_proto())

    def put_heartbeat(self, progress: common_pb2.EngineProgress | None) -> None:
        """Add a heartbeat, or bring the unsent one up to date. None: no engine yet."""
        if self._heartbeat is None:
            self._heartbeat = decode_pb2.DecodeEvent(heartbeat=common_pb2.Heartbeat())
            self._queue.append(self._heartbeat)
        if progress is not None:
            self._heartbeat.heartbeat.progress.CopyFrom(progress)

    def take(self) -> decode_pb2.DecodeEvent | None:
        """Remove the oldest event; None when all is sent."""
        if not self._queue:
            return None
        event = self._queue.popleft()
        if event is self._heartbeat:
            self._heartbeat = None
        elif event is self._step:
            self._leave_step()
        return event

    def _leave_step(self) -> None:
        """Nothing more joins it."""
        self._step, self._num_bytes = None, 0
        self._by_id.clear()
