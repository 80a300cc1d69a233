"""A model whose KV is checkable: each slot holds a hash of all tokens up to its own.

It has two groups of layers, of which the second sees the last WINDOW tokens alone; a block
holds its tokens' slots once for each. A token is read off the slot before it, so wrong KV
gives a wrong token.
"""

from collections.abc import Collection, Sequence
from functools import cache
from hashlib import blake2b

from diptych.block_needs import BlockNeeds, GroupExtent
from diptych.engine.scheduling.sequence import Sequence as EngineSequence
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.v1 import common_pb2
from tests.protocol.invariants import Invariant, Watch

VOCAB = 8
STOP_TOKEN = 5
SLOT_BYTES = 8
WINDOW = 3
WINDOWS = (None, WINDOW)
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
        group = block_size * SLOT_BYTES
        self.needs = BlockNeeds(block_size, [GroupExtent(window, group) for window in WINDOWS])
        self.blocks = [bytearray(len(WINDOWS) * group) for _ in range(num_blocks)]

    def slot(self, block_id: int, offset: int, group: int = 0) -> bytes:
        begin = (group * self.block_size + offset) * SLOT_BYTES
        return bytes(self.blocks[block_id][begin : begin + SLOT_BYTES])

    def slots(self, block_id: int, group: int) -> bytes:
        """All of a block in one group."""
        num_bytes = self.block_size * SLOT_BYTES
        return bytes(self.blocks[block_id][group * num_bytes : (group + 1) * num_bytes])

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
                self.write(chunk.block_table, position, _POISON)

    def execute(self, plan: StepPlan, sequences: Collection[EngineSequence]) -> StepOutput:
        self._check_attended(plan, sequences)
        sampled = []
        for chunk in plan.chunks:
            slot = self._read(chunk.block_table, chunk.start - 1) if chunk.start else _ROOT
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                slot = next_slot(slot, token_id)
                self.write(chunk.block_table, position, slot)
            sampled.append(
                SampledToken(slot[0] % VOCAB, float("nan")) if chunk.sample is not None else None
            )
        return StepOutput(tokens=tuple(sampled), duration_s=0.001)

    def _check_attended(self, plan: StepPlan, sequences: Collection[EngineSequence]) -> None:
        for seq, chunk in zip(sequences, plan.chunks, strict=True):
            slots = slots_of(seq.token_ids[: chunk.start])
            for group, window in enumerate(WINDOWS):
                first = 0 if window is None else max(0, chunk.start - window + 1)
                for position in range(first, chunk.start):
                    if self._read(chunk.block_table, position, group) != slots[position]:
                        what = f"wrong KV at {position} of {seq.key}"
                        self._watch.broken(Invariant.ATTENDED, what)

    def holds(self, table: Sequence[int], token_ids: Sequence[int], first: int) -> bool:
        """Whether what a sequence of these tokens needs, from the ``first`` on, is right."""
        slots, last_block = slots_of(token_ids), (len(token_ids) - 1) // self.block_size
        return all(
            self._read(table, at, group) == slots[at]
            for at in range(first, len(slots))
            for group in range(self.needs.num_groups_of(at // self.block_size, last_block))
        )

    def spoil(self, block_id: int) -> None:
        """Somebody is about to write it."""
        self.blocks[block_id][:] = _POISON * (len(self.blocks[block_id]) // SLOT_BYTES)

    def _read(self, table: Sequence[int], position: int, group: int = 0) -> bytes:
        index, offset = divmod(position, self.block_size)
        return self.slot(table[index], offset, group)

    def write(self, table: Sequence[int], position: int, slot: bytes) -> None:
        """The slot of the sequence with that table, in both groups."""
        index, offset = divmod(position, self.block_size)
        for group in range(len(WINDOWS)):
            begin = (group * self.block_size + offset) * SLOT_BYTES
            self.blocks[table[index]][begin : begin + SLOT_BYTES] = slot
