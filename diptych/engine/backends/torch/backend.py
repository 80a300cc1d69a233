"""Plain torch on any device: slow and right. What other backends are compared with."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from diptych.engine.backends.base import DeviceMemory, ForwardPass, Mark
from diptych.engine.backends.torch.attention import TorchAttention
from diptych.engine.backends.torch.fp8_linear import Fp8Weights
from diptych.engine.backends.torch.int8_linear import PlainInt8Linear, quantise_weight
from diptych.engine.backends.torch.layer_ops import TorchLayerOps
from diptych.engine.backends.torch.linear import PlainLinear
from diptych.engine.backends.torch.marks import EventMark, HostMark
from diptych.engine.backends.torch.memory import TorchDeviceMemory
from diptych.engine.device_copies import Send, on_device
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import DeviceKVMemory, HostKVMemory, KVMemory, wait_for
from diptych.engine.model.compact import Weight
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder, EagerPass
from diptych.engine.model.parts import Attention, LayerOps, Linear, WeightStore
from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.sampling.logit_edits import Unseen
from diptych.engine.sampling.sampler import sample
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import ConfigurationError, LogitsError
from diptych.formats import Quantization


class TorchBackend:
    """Implements ``Backend``."""

    steps_in_flight = 1
    decode_sizes: tuple[int, ...] = (1, 2, 16)
    mixed_sizes: tuple[int, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None  # of marks
        self.memory: DeviceMemory | None = None
        if device.type not in ("cpu", "meta"):
            self.memory = TorchDeviceMemory(device, torch.get_device_module(device))

    @property
    def device(self) -> torch.device:
        return self._device

    def auto_dtype(self, stored: torch.dtype) -> torch.dtype:
        # Half precision is not computed with; bfloat16 would round it, float32 has it exactly.
        is_host = self._device.type == "cpu"
        return stored if stored is torch.bfloat16 and not is_host else torch.float32

    def weights(
        self, dtype: torch.dtype, quantization: Quantization, *, compact: bool = True
    ) -> WeightStore:
        check_quantization(quantization, dtype)
        return _PlainStore(self._device, dtype, quantization)

    def layer_ops(self, config: ModelConfig, dtype: torch.dtype) -> LayerOps:
        return TorchLayerOps(config, dtype)

    def kv_memory(self, num_bytes: int, rank: int = 0) -> KVMemory:
        if self._device.type == "cpu":
            return HostKVMemory(num_bytes)
        return DeviceKVMemory(num_bytes, of_rank(self._device, rank))

    def attention(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> Attention:
        return TorchAttention(config, kv_cache, dtype)

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass:
        return EagerPass(model, self.attention(model.config, kv_cache, model.dtype))

    def begin_step(self) -> Send:
        return partial(on_device, device=self._device)

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> list[SampledToken | LogitsError]:
        return sample(logits, specs, positions)

    def draw(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        unseen: Unseen | None = None,
    ) -> DeviceDraws:
        return DeviceDraws.of(logits, specs, positions, unseen)

    def mark(self) -> Mark:
        if self._device.type != "cuda":
            return HostMark()
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return EventMark(self._device, self._side)

    def synchronise(self) -> None:
        if self._device.type != "cpu":
            wait_for(self._device)


def of_rank(first: torch.device, rank: int) -> torch.device:
    """A rank's device: they are one after another. first: rank 0's."""
    return first if not rank else torch.device(first.type, (first.index or 0) + rank)


def check_quantization(quantization: Quantization, dtype: torch.dtype) -> None:
    """Int8 layers take float32. Raises ConfigurationError: another combination."""
    if quantization == "int8" and dtype is not torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ConfigurationError(f"quantization int8 needs dtype float32 (got {name})")


class _PlainStore:
    """Implements ``WeightStore``."""

    grouped = None

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization
    ) -> None:
        self.device, self.dtype, self._quantization = device, dtype, quantization
        self.fp8 = Fp8Weights(device, dtype) if quantization == "fp8" else None

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        return torch.empty(num_rows, num_columns, dtype=self.dtype, device=self.device)

    def allocate_compact(self, num_rows: int, num_columns: int, block_size: int) -> None:
        """Only float weights are computed with here."""

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        assert isinstance(weight, Tensor)
        if self._quantization == "int8":
            return PlainInt8Linear(quantise_weight(weight), bias)
        if self._quantization == "int8-weights":
            return PlainLinear(quantise_weight(weight).widened().to(self.dtype), bias)
        if self.fp8 is not None:
            return self.fp8.linear(self.fp8.rounded(weight), bias)
        return PlainLinear(weight, bias)

    def tied_head(self, embedding: Weight) -> Linear:
        return self.linear(embedding, None)
