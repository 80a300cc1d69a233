"""What a device offers the engine. One backend is chosen at start; nothing else knows the device.

A backend makes the parts of which the model is described (:mod:`diptych.engine.model.parts`),
memory for keys and values, and a sampler. Everything is called on the model thread only, but
``KVMemory``, which the transfer thread reads, writes and waits for as well.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from diptych.engine.device_copies import Send
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import KVMemory
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Attention, LayerOps, Rows, WeightStore
from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.sampling.logit_edits import Unseen
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import LogitsError
from diptych.formats import Quantization


class ForwardPass(Protocol):
    """All layers of one model on one KV cache."""

    def __call__(self, inputs: StepInputs, rows: Rows) -> Tensor:
        """Write keys and values of all rows; the hidden states of these before the last norm.

        [R, hidden_size], until the next step.
        """
        ...


class MemoryUsage(NamedTuple):
    """Of one device, bytes."""

    total_bytes: int
    free_bytes: int  # whoever has the rest
    held_bytes: int  # by this process
    peak_bytes: int  # the most that it held since it last gave back what was unused


class DeviceMemory(Protocol):
    """Memory of a device that is not the host's, as this process has it."""

    def release_unused(self) -> None:
        """Give back what was freed and is kept for later."""
        ...

    def usage(self) -> MemoryUsage: ...


class Mark(Protocol):
    """A moment in what a device was asked for, which it does in order."""

    def wait(self) -> None:
        """Return when it has done all until then. Raises DeviceLostError."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """What is asked for within comes after the moment, and waits for nothing asked since.

        All of it is done when the context ends, however.
        """
        ...


class Backend(Protocol):
    """A device, and the parts of an engine that are made for it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def memory(self) -> DeviceMemory | None:
        """None: it is the host's, which others share out."""
        ...

    @property
    def steps_in_flight(self) -> int:
        """Steps that it is asked for at a time.

        One, or two where it does on its own what it was asked for: then it draws the tokens that
        the host need not see, too.
        """
        ...

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Rows of steps of single tokens that are to be run before the first real one."""
        ...

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """The same of prompts with a single token: those that others of its kernels are for."""
        ...

    def auto_dtype(self, stored: torch.dtype) -> torch.dtype:
        """What to compute in where nobody says; stored: the checkpoint's own element type."""
        ...

    def weights(
        self, dtype: torch.dtype, quantization: Quantization, *, compact: bool = True
    ) -> WeightStore:
        """compact: float32 weights may be kept in a compact form of the same bits.

        Raises ConfigurationError: no such combination on this device.
        """
        ...

    def layer_ops(self, config: ModelConfig, dtype: torch.dtype) -> LayerOps: ...

    def kv_memory(self, num_bytes: int, rank: int = 0) -> KVMemory:
        """Zeroed, where that rank computes; this is rank 0.

        Raises RuntimeError, MemoryError, OSError or OverflowError: it does not fit.
        """
        ...

    def attention(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> Attention:
        """dtype: of queries and results; the cache may have another."""
        ...

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass: ...

    def begin_step(self) -> Send:
        """How the next step is sent what it is given.

        What was sent counts until so many steps have begun as may be in flight.
        """
        ...

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> list[SampledToken | LogitsError]:
        """As :func:`diptych.engine.sampling.sampler.sample`."""
        ...

    def draw(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        unseen: Unseen | None = None,
    ) -> DeviceDraws:
        """As ``sample``, of rows for which :func:`awaited` has no reason; waits for nothing.

        unseen: of rows whose history lacks its last token, which the device has drawn before.
        """
        ...

    def mark(self) -> Mark:
        """The moment now."""
        ...

    def synchronise(self) -> None:
        """Return when the device has completed all that it was given.

        Raises DeviceLostError: it cannot be used again. What else a part of the backend raises
        is of the step in which it was called.
        """
        ...
