"""The CPU: torch, and compiled loops (numba) wherever they work and give torch's results."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from diptych.engine.backends.base import ForwardPass, Mark
from diptych.engine.backends.cpu.huge_pages import HugePages
from diptych.engine.backends.cpu.int8_linear import make_int8_linear
from diptych.engine.backends.cpu.linear import make_linear, takes_compact
from diptych.engine.backends.cpu.workspace import StepMemory
from diptych.engine.backends.torch.backend import TorchBackend, check_quantization
from diptych.engine.backends.torch.int8_linear import quantise_weight
from diptych.engine.backends.torch.layer_ops import TorchLayerOps
from diptych.engine.device_copies import Send
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import HostKVMemory, KVMemory
from diptych.engine.model.compact import CompactWeight, Weight
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder, EagerPass
from diptych.engine.model.parts import Attention, LayerOps, Linear, WeightStore
from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.sampling.logit_edits import Unseen
from diptych.engine.sampling.sampler import Largest, sample
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import LogitsError
from diptych.formats import Quantization
from diptych.models.compact import row_bytes


class CpuBackend:
    """Implements ``Backend``. Compiled parts are imported when they are made: numba is optional."""

    memory = None
    steps_in_flight = 1
    decode_sizes = (1, 2, 16)
    mixed_sizes = ()

    def __init__(self) -> None:
        self._torch = TorchBackend(torch.device("cpu"))

    @property
    def device(self) -> torch.device:
        return self._torch.device

    def auto_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self._torch.auto_dtype(stored)

    def weights(
        self, dtype: torch.dtype, quantization: Quantization, *, compact: bool = True
    ) -> WeightStore:
        check_quantization(quantization, dtype)
        if quantization == "int8":
            return _PackedStore(dtype, make_int8_linear)
        if quantization == "int8-weights":
            return _PackedStore(dtype, _make_rounded_linear)
        if quantization == "fp8":
            return self._torch.weights(dtype, quantization)
        if dtype is torch.float32:
            return _HugePageStore(compact)
        return _PackedStore(dtype, make_linear)

    def layer_ops(self, config: ModelConfig, dtype: torch.dtype) -> LayerOps:
        """The first compiled ones of a machine take seconds to make."""
        plain = TorchLayerOps(config, dtype)
        if dtype is not torch.float32 or not has_compiler():
            return plain
        from diptych.engine.backends.cpu import layer_ops

        compiled = layer_ops.CompiledLayerOps(config)
        return compiled if layer_ops.agree(compiled, plain, config) else plain

    def kv_memory(self, num_bytes: int, rank: int = 0) -> KVMemory:
        return HostKVMemory(num_bytes)

    def attention(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> Attention:
        if not has_compiler():
            return self._torch.attention(config, kv_cache, dtype)
        from diptych.engine.backends.cpu.attention import CompiledAttention

        return CompiledAttention(config, kv_cache, dtype)

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass:
        attention = self.attention(model.config, kv_cache, model.dtype)
        each = EagerPass(model, attention, StepMemory(model.dtype).take)
        if not has_compiler():
            return each
        from diptych.engine.backends.cpu.decode_program import DecodePrograms

        return DecodePrograms.of(model, kv_cache, each) or each

    def begin_step(self) -> Send:
        return self._torch.begin_step()

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> list[SampledToken | LogitsError]:
        return sample(logits, specs, positions, _find_largest)

    def draw(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        unseen: Unseen | None = None,
    ) -> DeviceDraws:
        return DeviceDraws.of(logits, specs, positions, unseen)

    def mark(self) -> Mark:
        return self._torch.mark()

    def synchronise(self) -> None:
        """Every operation has been completed when it returns."""


def has_compiler() -> bool:
    """Whether loops can be compiled here."""
    return find_spec("numba") is not None


def _find_largest(logits: Tensor) -> Largest:
    """numpy's is several times as fast as torch's."""
    token_ids = logits.numpy().argmax(axis=1)
    return Largest(token_ids, logits.gather(1, torch.from_numpy(token_ids)[:, None]))


class _HugePageStore:
    """float32 weights as loaded, or compact ones, on huge pages. Implements ``WeightStore``."""

    dtype, device = torch.float32, torch.device("cpu")
    grouped = fp8 = None

    def __init__(self, compact: bool) -> None:
        self._takes_compact = compact
        self._pages = HugePages()

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        space = self._pages.empty(num_rows * num_columns * self.dtype.itemsize)
        return space.view(self.dtype).view(num_rows, num_columns)

    def allocate_compact(
        self, num_rows: int, num_columns: int, block_size: int
    ) -> CompactWeight | None:
        if not self._takes_compact or not takes_compact(num_rows, num_columns):
            return None
        num_bytes = row_bytes(num_columns, block_size)
        space = self._pages.empty(num_rows * num_bytes)
        return CompactWeight(space.view(num_rows, num_bytes), block_size)

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return make_linear(weight, bias)

    def tied_head(self, embedding: Weight) -> Linear:
        return make_linear(embedding, None)


class _PackedStore:
    """Weights packed, of another element type or into int8. Implements ``WeightStore``."""

    device = torch.device("cpu")
    grouped = fp8 = None

    def __init__(self, dtype: torch.dtype, pack: Callable[[Tensor, Tensor | None], Linear]) -> None:
        self.dtype, self._pack = dtype, pack

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        return torch.empty(num_rows, num_columns, dtype=self.dtype)

    def allocate_compact(self, num_rows: int, num_columns: int, block_size: int) -> None:
        """Packed from float weights only."""

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        assert isinstance(weight, Tensor)
        return self._pack(weight, bias)

    def tied_head(self, embedding: Weight) -> Linear:
        return self.linear(embedding, None)


def _make_rounded_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Of what the weight stands for once it is rounded to int8; that takes no less memory."""
    return make_linear(quantise_weight(weight).widened().to(weight.dtype), bias)
