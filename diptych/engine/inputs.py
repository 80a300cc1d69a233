"""A step's plan as tensors.

Built once per step, in vectorised form, and shared by all layers. Rows of the
flat batch are reordered: single tokens first (they attend through one batched
kernel), then longer chunks. Knows the KV layout's block size, not its memory.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.device_copies import Send, on_device
from diptych.engine.scheduling.step import StepPlan


@dataclass(frozen=True)
class DecodeBatch:
    """The first rows of a step: one token of one sequence each."""

    # [num_rows, max_num_blocks] int64, padded with the row's last block. On the host until
    # somebody asks for ``block_tables``, or where they are used already.
    tables: NDArray[np.int64] | Tensor
    context_lens: Tensor  # [num_rows] int64, the token itself included
    num_blocks: NDArray[np.int64] | None = None  # [num_rows], each row's own; of tables on the host

    @cached_property
    def block_tables(self) -> Tensor:
        """The tables where they are used."""
        return self.sent_by(partial(on_device, device=self.context_lens.device))

    def sent_by(self, send: Send) -> Tensor:
        """The same, sent in that way unless they are there."""
        return self.tables if isinstance(self.tables, Tensor) else send(self.tables)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows ``begin`` to ``begin + num_tokens``: consecutive tokens of one sequence."""

    begin: int
    num_tokens: int
    start: int  # position of the first token
    block_ids: Tensor  # [num_blocks] int64, logical order

    @property
    def end(self) -> int:
        """Context length of the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything the model needs for one step. N tokens in all."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64, block_id * block_size + offset: where the token's KV goes
    decodes: DecodeBatch | None
    prefills: tuple[PrefillChunk, ...]
    last_rows: NDArray[np.int64]  # [num_chunks] row of each chunk's last token, in plan order

    @property
    def num_decodes(self) -> int:
        return 0 if self.decodes is None else len(self.decodes.context_lens)

    def sent_by(self, send: Send) -> "StepInputs":
        """The same where they are used, of a plan that was laid out on the host."""

        def sent(x: Tensor) -> Tensor:
            return send(x.numpy())

        batch = self.decodes
        return replace(
            self,
            token_ids=sent(self.token_ids),
            positions=sent(self.positions),
            slots=sent(self.slots),
            decodes=batch and replace(batch, context_lens=sent(batch.context_lens)),
            prefills=tuple(
                replace(chunk, block_ids=sent(chunk.block_ids)) for chunk in self.prefills
            ),
        )


def build_inputs(plan: StepPlan, block_size: int, send: Send = torch.from_numpy) -> StepInputs:
    """Lay out a plan. Tokens that follow a chunk of the plan before it are left UNKNOWN.

    send: copies them to where they are used.

    Raises:
        ValueError: a chunk is empty or its block table too short.
    """
    chunks = plan.chunks
    lengths = np.fromiter((len(chunk.token_ids) for chunk in chunks), np.int64, len(chunks))
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    num_blocks = np.fromiter((len(chunk.block_table) for chunk in chunks), np.int64, len(chunks))
    if not len(chunks) or lengths.min() < 1 or (num_blocks * block_size < starts + lengths).any():
        raise ValueError("a step needs chunks, each with tokens and blocks for them")

    order = np.argsort(lengths > 1, kind="stable")
    ordered = [chunks[index] for index in order]
    lengths, starts, num_blocks = lengths[order], starts[order], num_blocks[order]
    row_ends = np.cumsum(lengths)
    num_tokens = int(row_ends[-1])
    within = np.arange(num_tokens) - np.repeat(row_ends - lengths, lengths)
    positions = np.repeat(starts, lengths) + within
    token_ids = np.fromiter(
        chain.from_iterable(chunk.token_ids for chunk in ordered), np.int64, num_tokens
    )
    # An array's ids are copied as they lie, without a Python object for each.
    block_ids = np.concatenate([np.asarray(chunk.block_table, np.int64) for chunk in ordered])
    table_begins = np.cumsum(num_blocks) - num_blocks
    block_of = block_ids[np.repeat(table_begins, lengths) + positions // block_size]
    last_rows = np.empty(len(chunks), np.int64)
    last_rows[order] = row_ends - 1

    num_decodes = int((lengths == 1).sum())
    context_lens = starts + lengths
    used_blocks = -(-context_lens // block_size)
    return StepInputs(
        token_ids=send(token_ids),
        positions=send(positions),
        slots=send(block_of * block_size + positions % block_size),
        decodes=_decode_batch(
            block_ids,
            table_begins[:num_decodes],
            used_blocks[:num_decodes],
            context_lens[:num_decodes],
            send,
        ),
        prefills=tuple(
            PrefillChunk(
                begin=int(row_ends[i] - lengths[i]),
                num_tokens=int(lengths[i]),
                start=int(starts[i]),
                block_ids=send(block_ids[table_begins[i] : table_begins[i] + used_blocks[i]]),
            )
            for i in range(num_decodes, len(chunks))
        ),
        last_rows=last_rows,
    )


def _decode_batch(
    block_ids: NDArray[np.int64],
    table_begins: NDArray[np.int64],
    used_blocks: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    send: Send,
) -> DecodeBatch | None:
    if not len(context_lens):
        return None
    columns = np.minimum(np.arange(used_blocks.max()), used_blocks[:, None] - 1)
    return DecodeBatch(
        tables=block_ids[table_begins[:, None] + columns],
        context_lens=send(context_lens),
        num_blocks=used_blocks,
    )
