"""A step that the runner gives back is complete on the device, whatever it was asked for."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepPlan
from diptych.errors import LogitsError
from diptych.sampling_params import SamplingParams
from tests.engines import load_decoder
from tests.tiny_model import write_tiny_model

SPEC = SampleSpec(params=SamplingParams(temperature=0.0, max_tokens=1), allow_stop=True)


class LateBackend(TorchBackend):
    """A device of which the host knows only after waiting, or after reading what it drew."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_behind = False

    def begin(self) -> None:
        self.is_behind = True

    def synchronise(self) -> None:
        self.is_behind = False

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> list[SampledToken | LogitsError]:
        drawn = super().sample(logits, specs, positions)
        self.is_behind = False
        return drawn


@pytest.mark.parametrize("samples", [(None,), (SPEC,), (None, SPEC), (None, None)])
def test_a_step_ends_when_the_device_has_done_it(
    tmp_path: Path, samples: tuple[SampleSpec | None, ...]
) -> None:
    write_tiny_model(tmp_path)
    decoder, backend = load_decoder(tmp_path), LateBackend()
    runner = Runner(decoder, KVCache(decoder.config, 8, 16), backend)
    chunks = tuple(
        Chunk(token_ids=(3, 4, 5), start=0, block_table=(index,), sample=sample)
        for index, sample in enumerate(samples)
    )
    backend.begin()
    output = runner.execute(StepPlan(chunks=chunks))
    assert not backend.is_behind
    assert [token is None for token in output.tokens] == [sample is None for sample in samples]
