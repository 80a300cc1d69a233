"""A model whose KV is checkable: each slot holds a hash of all tokens up to its own.

A token is read off the slot before it, so wrong KV gives a wrong token.
"""

from collections.abc import Collection, Sequence
from functools import cache
from hashlib import blake2b

from diptych.engine.scheduling.sequence import Sequence as EngineSequence
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.v1 import common_pb2
from tests.protocol.invariants import Invariant, Watch

VOCAB = 8
STOP_TOKEN = 5
SLOT_BYTES = 8
_ROOT = bytes(SLOT_BYTES)
_POISON = b"\xee" * SLOT_BYTES


@cache
def next_slot(before: bytes, token_id: int) -> bytes:
    return blake2b(before + bytes([token_id]), digest_size=SLOT_BYTES).digest()


def slots_of(token_ids: Sequence[int]) -> list[bytes]:
    """What the slots of these tokens must hold."""
    slots, before = [], _ROOT
    for token_id in token_ids:
        before = next_slot(before, token_id)
        slots.append(before)
    return slots


def answer(prompt: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
    """The one right output, and why it ends."""
    tokens = list(prompt)
    while True:
        tokens.append(slots_of(tokens)[-1][0] % VOCAB)
        if tokens[-1] == STOP_TOKEN:
            return tokens[len(prompt) :], common_pb2.FINISH_REASON_STOP
        if len(tokens) - len(prompt) == max_tokens:
            return tokens[len(prompt) :], common_pb2.FINISH_REASON_LENGTH


class Memory:
    """The KV of one process, and the runner on it."""

    def __init__(self, num_blocks: int, block_size: int, watch: Watch) -> None:
        self._watch = watch
        self.block_size = block_size
        self.blocks = [bytearray(block_size * SLOT_BYTES) for _ in range(num_blocks)]

    def slot(self, block_id: int, offset: int) -> bytes:
        begin = offset * SLOT_BYTES
        return bytes(self.blocks[block_id][begin : begin + SLOT_BYTES])

    def written_by(self, plan: StepPlan) -> list[int]:
        """Blocks that the step writes."""
        return [
            block_id
            for chunk in plan.chunks
            for block_id in chunk.block_table[
                chunk.start // self.block_size : -(-chunk.end // self.block_size)
            ]
        ]

    def begin(self, plan: StepPlan, sequences: Collection[EngineSequence]) -> None:
        """From here until ``execute`` what the step writes is unreadable.

        ``sequences`` own the plan's chunks, in order; here and below.
        """
        self._check_attended(plan, sequences)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                self._write(chunk.block_table, position, _POISON)

    def execute(self, plan: StepPlan, sequences: Collection[EngineSequence]) -> StepOutput:
        self._check_attended(plan, sequences)
        sampled = []
        for chunk in plan.chunks:
            slot = self._read(chunk.block_table, chunk.start - 1) if chunk.start else _ROOT
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                slot = next_slot(slot, token_id)
                self._write(chunk.block_table, position, slot)
            sampled.append(
                SampledToken(slot[0] % VOCAB, float("nan")) if chunk.sample is not None else None
            )
        return StepOutput(tokens=tuple(sampled), duration_s=0.001)

    def _check_attended(self, plan: StepPlan, sequences: Collection[EngineSequence]) -> None:
        for seq, chunk in zip(sequences, plan.chunks, strict=True):
            for position, slot in enumerate(slots_of(seq.token_ids[: chunk.start])):
                found = self._read(chunk.block_table, position)
                if found != slot:
                    self._watch.broken(Invariant.ATTENDED, f"wrong KV at {position} of {seq.key}")

    def holds(self, table: Sequence[int], token_ids: Sequence[int], first: int) -> bool:
        """Whether the slots of these tokens, from the ``first`` on, are as they must be."""
        slots = slots_of(token_ids)
        return all(self._read(table, at) == slots[at] for at in range(first, len(slots)))

    def _read(self, table: Sequence[int], position: int) -> bytes:
        index, offset = divmod(position, self.block_size)
        return self.slot(table[index], offset)

    def _write(self, table: Sequence[int], position: int, slot: bytes) -> None:
        index, offset = divmod(position, self.block_size)
        begin = offset * SLOT_BYTES
        self.blocks[table[index]][begin : begin + SLOT_BYTES] = slot
