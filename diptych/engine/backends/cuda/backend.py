"""An NVIDIA device: products by torch's libraries, all else by Triton kernels."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.backends.base import DeviceMemory, ForwardPass, Mark
from diptych.engine.backends.cuda.attention import PagedAttention
from diptych.engine.backends.cuda.flashinfer_prefill import FlashInferPrefill
from diptych.engine.backends.cuda.fp8_linear import DeviceFp8Weights
from diptych.engine.backends.cuda.graphed_pass import BUCKETS, GraphedPass
from diptych.engine.backends.cuda.graphs import GraphDevice
from diptych.engine.backends.cuda.kv_memory import CudaKVMemory
from diptych.engine.backends.cuda.layer_ops import TritonLayerOps
from diptych.engine.backends.cuda.pinned_copies import PinnedCopies, TorchCopyMemory
from diptych.engine.backends.cuda.query_tiles import TileShape
from diptych.engine.backends.cuda.sampler import draw, sample
from diptych.engine.backends.cuda.weight_store import DeviceStore
from diptych.engine.backends.torch import fp8_linear
from diptych.engine.backends.torch.backend import TorchBackend, of_rank
from diptych.engine.device_copies import Send, on_device
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import KVMemory
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder, EagerPass
from diptych.engine.model.parts import Attention, LayerOps, WeightStore
from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.sampling.logit_edits import Unseen
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import ConfigurationError, LogitsError
from diptych.formats import Quantization

_FP8_CAPABILITY = (9, 0)  # the first whose products take a scale for each row
_INTERPRETED_PROCESSORS = 8  # what a decode step on the host is cut up for


class CudaBackend:
    """Implements ``Backend``. Importing it needs triton.

    A host's device serves for tests alone, where triton interprets its kernels.
    """

    steps_in_flight = 2
    decode_sizes: tuple[int, ...] = BUCKETS
    mixed_sizes: tuple[int, ...] = (16, 64, 80)  # of products by few, some and many rows

    def __init__(
        self,
        device: torch.device,
        graphs: GraphDevice | None = None,
        copies: PinnedCopies | None = None,
        flashinfer: Any = None,
    ) -> None:
        """flashinfer: the module, if it is to attend for prompts.

        graphs: of that device; without them all is launched operation by operation.

        copies: to that device; without them a GPU has its own, and a host needs none.
        """
        self._torch = TorchBackend(device)
        self._graphs, self._flashinfer = graphs, flashinfer
        if copies is None and device.type == "cuda":
            copies = PinnedCopies(TorchCopyMemory(device, self.mark), self.steps_in_flight)
        self._copies = copies
        if graphs is None:
            self.decode_sizes = self._torch.decode_sizes

    @property
    def device(self) -> torch.device:
        return self._torch.device

    @property
    def memory(self) -> DeviceMemory | None:
        return self._torch.memory

    def auto_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self._torch.auto_dtype(stored)

    def weights(
        self, dtype: torch.dtype, quantization: Quantization, *, compact: bool = True
    ) -> WeightStore:
        if quantization == "int8":
            raise ConfigurationError(
                "quantization int8 needs device cpu (got cuda, which has int8-weights)"
            )
        if quantization == "fp8" and self.device.type == "cuda":
            self._check_fp8(dtype)
        plain = self._torch.weights(dtype, "none")
        return DeviceStore(plain, self._num_processors(), quantization)

    def _check_fp8(self, dtype: torch.dtype) -> None:
        """Raises ConfigurationError: no products of 8-bit floats with scales by rows."""
        capability = torch.cuda.get_device_capability(self.device)
        if capability < _FP8_CAPABILITY:
            raise ConfigurationError(
                f"quantization fp8 needs a GPU of compute capability {_FP8_CAPABILITY} or later "
                f"(got {capability})"
            )
        if dtype is not torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"quantization fp8 needs dtype bfloat16 on device cuda (got {name})"
            )
        if not fp8_linear.works(self.device, dtype):
            raise ConfigurationError("quantization fp8: this torch multiplies no such weights here")
        DeviceFp8Weights(self.device, dtype, self._num_processors()).check()

    def layer_ops(self, config: ModelConfig, dtype: torch.dtype) -> LayerOps:
        return TritonLayerOps(config)

    def kv_memory(self, num_bytes: int, rank: int = 0) -> KVMemory:
        if self.device.type != "cuda":
            return self._torch.kv_memory(num_bytes, rank)
        return CudaKVMemory(num_bytes, of_rank(self.device, rank))

    def attention(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> Attention:
        flashinfer = None
        if self._flashinfer is not None:
            flashinfer = FlashInferPrefill(
                self._flashinfer, config, kv_cache, dtype, self.steps_in_flight
            )
        shape = TileShape.of(config.head_dim, dtype, kv_cache.dtype, self._max_shared_bytes())
        return PagedAttention(
            config, kv_cache, self._num_processors(), shape, self._send, flashinfer
        )

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass:
        attention = self.attention(model.config, kv_cache, model.dtype)
        eager = EagerPass(model, attention)
        if self._graphs is None:
            return eager
        return GraphedPass(model, kv_cache, attention, eager, self._graphs, self._send)

    def begin_step(self) -> Send:
        if self._copies is None:
            return self._torch.begin_step()
        self._copies.begin_step()
        return self._copies.send

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
        return draw(logits, specs, positions, unseen)

    def mark(self) -> Mark:
        return self._torch.mark()

    def synchronise(self) -> None:
        self._torch.synchronise()

    def _send(self, values: NDArray[Any]) -> Tensor:
        """Within a step."""
        if self._copies is None:
            return on_device(values, self.device)
        return self._copies.send(values)

    def _num_processors(self) -> int:
        if self.device.type != "cuda":
            return _INTERPRETED_PROCESSORS
        count: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        return count

    def _max_shared_bytes(self) -> int:
        """Of a program. A host's kernels are interpreted, and have all that they want."""
        if self.device.type != "cuda":
            return sys.maxsize
        properties: Any = torch.cuda.get_device_properties(self.device)  # no stub has the limit
        num_bytes: int = properties.shared_memory_per_block_optin
        return num_bytes
