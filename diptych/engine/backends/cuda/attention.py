"""Attention over the paged cache of a device, in Triton kernels that read blocks where they lie.

All tokens of a step are written by one launch for each layer, single tokens attend by one, or by
two where they are few (parts of their contexts, and their merge), the chunks of all prompts by one.
"""

from typing import Protocol

import torch
import triton
from torch import Tensor

from diptych.engine.backends.cuda.flashinfer_prefill import FlashInferPrefill
from diptych.engine.backends.cuda.kernels import decode, heads, prefill, score_forms
from diptych.engine.backends.cuda.layer_place import LayerPlace
from diptych.engine.backends.cuda.query_tiles import QueryTiles, TileShape
from diptych.engine.device_copies import Send
from diptych.engine.inputs import DecodeBatch, StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.parts import AttentionStep, Rows

_MAX_PARTS = 64  # of a context
_FEW_PARTS = 8  # that a merge of its own is compiled for
_MIN_GROUP = 16  # rows of a product
_HEADS_WRITTEN = 32  # of tokens' keys and values, by one program


class PagedAttention:
    """Implements ``Attention``."""

    def __init__(
        self,
        config: ModelConfig,
        kv_cache: KVCache,
        num_processors: int,
        tile_shape: TileShape,
        send: Send = torch.from_numpy,
        flashinfer: FlashInferPrefill | None = None,
    ) -> None:
        """num_processors: the device's, that a decode step is to keep busy.

        tile_shape: for kernels of ours.

        flashinfer: attends for chunks, instead of a kernel of ours.
        """
        self._flashinfer = flashinfer
        self._config, self._kv_cache, self._num_processors = config, kv_cache, num_processors
        self._tile_shape, self._send = tile_shape, send

    def begin_step(self, inputs: StepInputs) -> AttentionStep:
        prefills: _Prefills | None = None
        if inputs.prefills and self._flashinfer is not None:
            prefills = self._flashinfer.begin_step(inputs)
        elif inputs.prefills:
            prefills = _OwnPrefills(
                self._config, self._kv_cache, inputs, self._tile_shape, self._send
            )
        return _PagedStep(
            self._config,
            self._kv_cache,
            inputs,
            prefills,
            self._num_processors,
            self._tile_shape.num_single_keys,
            self._send,
        )


class _Prefills(Protocol):
    """A step's chunks: the other rows."""

    def attend(
        self, place: LayerPlace, window: int, q: Tensor, out: Tensor, rows: Rows | None
    ) -> None:
        """Of q and out [N, num_heads, head_dim] those of chunks that are among the rows.

        Others of chunks may be attended too. window: 0 for none. rows: None for all.
        """
        ...


class _PagedStep:
    """Implements ``AttentionStep``."""

    def __init__(
        self,
        config: ModelConfig,
        kv_cache: KVCache,
        inputs: StepInputs,
        prefills: _Prefills | None,
        num_processors: int,
        num_single_keys: int,
        send: Send,
    ) -> None:
        self._config, self._kv_cache, self._prefills = config, kv_cache, prefills
        self._slots = inputs.slots
        self._decodes = None
        if inputs.decodes is not None:
            self._decodes = _Decodes(
                config, kv_cache.block_size, inputs.decodes, num_processors, num_single_keys, send
            )

    def __call__(
        self, layer: int, q: Tensor, kv: Tensor, out: Tensor, rows: Rows | None = None
    ) -> None:
        config, place = self._config, LayerPlace.of(self._kv_cache, layer)
        num_heads = kv.shape[:3].numel()
        heads.write[(triton.cdiv(num_heads, _HEADS_WRITTEN),)](
            kv,
            self._slots,
            place.blocks,
            place.scales,
            len(kv),
            *place.strides,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self._kv_cache.block_size,
            width=_HEADS_WRITTEN,
            head_width=triton.next_power_of_2(config.head_dim),
            num_warps=4,
        )
        window = config.layers[layer].sliding_window or 0
        if self._decodes is not None:
            self._decodes.attend(place, window, q, out)
        if self._prefills is not None:
            self._prefills.attend(place, window, q, out, rows)


class _Decodes:
    """A step's single tokens: the first rows of its batch."""

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        batch: DecodeBatch,
        num_processors: int,
        tile: int,
        send: Send,
    ) -> None:
        """tile: tokens that are multiplied at a time."""
        self._config, self._block_size = config, block_size
        self._tables, self._context_lens = batch.sent_by(send), batch.context_lens
        num_rows, table_size = self._tables.shape
        self._tile = tile
        self._num_parts = num_parts(
            num_rows * config.num_kv_heads, table_size * block_size, tile, num_processors
        )
        if self._num_parts > 1:
            shape = (num_rows, config.num_heads, self._num_parts)
            self._logs = torch.empty(shape, device=batch.context_lens.device)
            self._parts = self._logs.new_empty(*shape, config.head_dim)

    def attend(self, place: LayerPlace, window: int, q: Tensor, out: Tensor) -> None:
        """Of the first rows of q and out: [N, num_heads, head_dim]."""
        if self._num_parts == 1:
            self._attend_parts(place, window, q, out, None)
        else:
            self._attend_parts(place, window, q, self._parts, self._logs)
            self._merge_parts(out)

    def _attend_parts(
        self,
        place: LayerPlace,
        window: int,
        q: Tensor,
        out: Tensor,
        logs: Tensor | None,
    ) -> None:
        config = self._config
        num_rows, table_size = self._tables.shape
        group = config.num_heads // config.num_kv_heads
        decode.attend_parts[(num_rows, config.num_kv_heads, self._num_parts)](
            q,
            place.blocks,
            place.scales,
            self._tables,
            self._context_lens,
            out,
            logs,
            table_size,
            *place.strides,
            _score_scale(config),
            group=group,
            group_width=max(_MIN_GROUP, triton.next_power_of_2(group)),
            head_dim=config.head_dim,
            head_width=triton.next_power_of_2(config.head_dim),
            block_size=self._block_size,
            window=window,
            softcap=config.score_softcap,
            tile=self._tile,
            num_warps=4,
            num_stages=2,
        )

    def _merge_parts(self, out: Tensor) -> None:
        config = self._config
        decode.merge_parts[(len(self._tables), config.num_heads)](
            self._parts,
            self._logs,
            out,
            self._num_parts,
            width=_FEW_PARTS if self._num_parts <= _FEW_PARTS else _MAX_PARTS,
            head_dim=config.head_dim,
            head_width=triton.next_power_of_2(config.head_dim),
            num_warps=1 if self._num_parts <= _FEW_PARTS else 8,
        )


class _OwnPrefills:
    """Those of a kernel of ours. Implements ``_Prefills``."""

    def __init__(
        self,
        config: ModelConfig,
        kv_cache: KVCache,
        inputs: StepInputs,
        tile_shape: TileShape,
        send: Send,
    ) -> None:
        self._config, self._block_size, self._send = config, kv_cache.block_size, send
        self._block_ids = torch.cat([chunk.block_ids for chunk in inputs.prefills])
        self._tile_shape = tile_shape
        self._tiles = QueryTiles.of(inputs.prefills, tile_shape.num_queries)
        self._all = send(self._tiles.fields)

    def attend(
        self, place: LayerPlace, window: int, q: Tensor, out: Tensor, rows: Rows | None
    ) -> None:
        """Those tiles that hold one of the rows."""
        config = self._config
        tiles = self._all if rows is None else self._send(self._tiles.holding(rows).fields)
        if not len(tiles):
            return
        shape, is_masked = self._tile_shape, window or config.score_softcap is not None
        prefill.attend_tiles[(len(tiles), config.num_heads)](
            q,
            place.blocks,
            place.scales,
            tiles,
            self._block_ids,
            out,
            *place.strides,
            _score_scale(config),
            group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
            head_width=triton.next_power_of_2(config.head_dim),
            block_size=self._block_size,
            window=window,
            softcap=config.score_softcap,
            tile_queries=shape.num_queries,
            tile_keys=shape.num_masked_keys if is_masked else shape.num_keys,
            num_warps=8,
            num_stages=2,
        )


def num_parts(num_programs: int, max_len: int, tile: int, num_processors: int) -> int:
    """Into how many parts contexts are cut: a power of two.

    So many that all processors have two programs to do where there are few rows, but
    none that would be empty for the longest context of max_len tokens.
    """
    wanted = min(2 * num_processors // num_programs, -(-max_len // tile), _MAX_PARTS)
    return 1 << max(wanted, 1).bit_length() - 1


def _score_scale(config: ModelConfig) -> float:
    """What products are multiplied with to be scores with the logarithm of e to base 2."""
    log2_e: float = score_forms.LOG2_E.value
    return config.attention_scale * log2_e
