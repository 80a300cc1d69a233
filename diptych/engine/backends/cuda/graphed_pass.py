"""Steps of single tokens as graphs: one for each number of rows, others rounded up.

A graph reads its inputs where they were when it was captured, so each step puts its own there. The
rows that a step lacks have no context and no slot: they read and write nothing of the KV pool.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.engine.backends.base import ForwardPass
from diptych.engine.backends.cuda.device_tables import DeviceTables
from diptych.engine.backends.cuda.graphs import GraphDevice, Replay
from diptych.engine.device_copies import Send
from diptych.engine.inputs import DecodeBatch, StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Attention, Rows

BUCKETS: Final[tuple[int, ...]] = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
)  # rows of which there are graphs
_NOWHERE = -1  # no slot


class GraphedPass:
    """Of one model on one KV cache. Implements ``ForwardPass``.

    A graph is captured when it is first needed: warming up needs all of them.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        attention: Attention,
        otherwise: ForwardPass,
        graphs: GraphDevice,
        send: Send = torch.from_numpy,
    ) -> None:
        """attention: on that cache. ``otherwise`` does steps with prompts, or of more rows."""
        self._model, self._attention = model, attention
        self._otherwise, self._graphs, self._send = otherwise, graphs, send
        max_rows, device = BUCKETS[-1], model.weights.embedding.device
        longest = -(-model.config.max_position // kv_cache.block_size)
        num_columns = min(longest, kv_cache.num_blocks)
        self._tables = DeviceTables(max_rows, num_columns, device, send)
        zeros = partial(torch.zeros, max_rows, dtype=torch.int64, device=device)
        self._inputs = StepInputs(
            token_ids=zeros(),
            positions=zeros(),
            slots=zeros().fill_(_NOWHERE),
            decodes=DecodeBatch(self._tables.tensor, zeros()),
            prefills=(),
            last_rows=np.zeros(0, np.int64),
        )
        self._replays: dict[int, Replay] = {}

    def __call__(self, inputs: StepInputs, rows: Rows) -> Tensor:
        batch, num_rows = inputs.decodes, len(inputs.token_ids)
        if batch is None or inputs.prefills or not self._tables.have_room_for(batch.tables.shape):
            return self._otherwise(inputs, rows)
        bucket = BUCKETS[bisect_left(BUCKETS, num_rows)]
        self._put(inputs, batch, bucket)
        replay = self._replays.get(bucket)
        if replay is None:
            launch = partial(self._model.forward, self._first(bucket), self._attention)
            replay = self._replays[bucket] = self._graphs.capture(launch)
        replay.run()
        return replay.out.index_select(0, self._send(rows))

    def _put(self, inputs: StepInputs, batch: DecodeBatch, bucket: int) -> None:
        """Where the graph of so many rows reads."""
        num_rows = len(inputs.token_ids)
        own = self._first(bucket)
        assert own.decodes is not None, "single tokens"
        assert isinstance(batch.tables, np.ndarray), "a plan's are on the host"
        assert batch.num_blocks is not None, "as is how long they are"
        self._tables.update(batch.tables, batch.num_blocks)
        own.token_ids[:num_rows].copy_(inputs.token_ids)
        own.positions[:num_rows].copy_(inputs.positions)
        own.slots[:num_rows].copy_(inputs.slots)
        own.decodes.context_lens[:num_rows].copy_(batch.context_lens)
        own.slots[num_rows:].fill_(_NOWHERE)
        own.decodes.context_lens[num_rows:].zero_()

    def _first(self, num_rows: int) -> StepInputs:
        """Of the memory that stays, so many rows."""
        own, batch = self._inputs, self._inputs.decodes
        assert batch is not None, "single tokens"
        return replace(
            own,
            token_ids=own.token_ids[:num_rows],
            positions=own.positions[:num_rows],
            slots=own.slots[:num_rows],
            decodes=DecodeBatch(self._tables.tensor[:num_rows], batch.context_lens[:num_rows]),
        )
