"""The checks of faults, of hand-offs and of a disturbed batch, on a tiny model and the host."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.base import ForwardPass
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Rows
from diptych.errors import DeviceLostError
from tests.gpu import continued, disturbed, faults, handoff, speed
from tests.gpu.models import MODELS

CPU = torch.device("cpu")
CONFIG = ModelConfig.from_hf(faults.TINY)


class Limited(TorchBackend):
    """A device that can be filled up, and lost."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.max_rows = 1 << 20
        self.is_lost = False

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass:
        made = super().forward_pass(model, kv_cache)

        def forward(inputs: StepInputs, rows: Rows) -> Tensor:
            if len(inputs.token_ids) > self.max_rows:
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
            return made(inputs, rows)

        return forward

    def synchronise(self) -> None:
        if self.is_lost:
            raise DeviceLostError("gone")

    @contextmanager
    def filled(self, max_rows: int) -> Iterator[None]:
        self.max_rows, before = max_rows, self.max_rows
        yield
        self.max_rows = before


def test_a_step_without_memory_fails_its_sequences_and_no_others() -> None:
    backend = Limited()
    found = faults.check_memory(
        "tiny", CONFIG, backend, torch.float32, backend.filled(60), num_long=64
    )
    assert (found.failed, found.holds) == ("STEP_FAILED", True)
    found = faults.check_memory(
        "tiny", CONFIG, backend, torch.float32, backend.filled(100), num_long=64
    )
    assert (found.failed, found.holds) == ("nothing", False), "there was memory"
    found = faults.check_memory(
        "tiny", CONFIG, backend, torch.float32, backend.filled(5), num_long=64
    )
    assert (found.failed, found.is_gone_on, found.holds) == ("STEP_FAILED", False, False)
    assert found.is_freed
    assert found.is_whole


async def test_a_lost_device_ends_its_engine() -> None:
    backend = Limited()

    def lose() -> None:
        backend.is_lost = True

    told = await faults.ended_with(CONFIG, backend, torch.float32, lose)
    assert told == "DeviceLostError: gone"
    told = await faults.ended_with(CONFIG, Limited(), torch.float32, lambda: None)
    assert told.startswith("nothing: [")


def test_a_loss_is_looked_at_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults.check_loss(CPU)
    assert (found.told[:10], found.others_go_on, found.holds) == ("nothing: [", True, False)
    for script, holds in (
        ('print(\'{"told": "DeviceLostError: the device cuda:0 is lost"}\')', True),
        ('print(\'{"told": "RuntimeError: what"}\')', False),
        ("raise SystemExit(3)", False),
    ):
        command = (sys.executable, "-c", script)
        monkeypatch.setattr(faults, "loss_command", lambda device, command=command: command)
        assert faults.check_loss(CPU).holds is holds


SMALL = continued.Case(
    name="tiny",
    sizes=faults.TINY,
    transport="inline",
    dtype="float32",
    num_tokens=70,
    chunk=32,
    num_decoded=5,
)


def test_what_another_process_computed_is_gone_on_with() -> None:
    found = continued.check(SMALL, TorchBackend(CPU))
    assert (found.message, found.num_equal, found.holds) == ("", 5, True)
    assert found.way == "DRAM at the source, DRAM at the reader, in messages"
    assert found.exposed_s > 0
    assert found.exposed_share == found.exposed_s / found.prefill_s


def test_other_tokens_than_one_processs_are_no_success() -> None:
    """A source that has another model."""
    other = replace(SMALL, sizes={**faults.TINY, "rope_theta": 2.0})
    found = continued.check(SMALL, TorchBackend(CPU), continued.source_command(other, CPU))
    assert (found.message, found.holds) == ("", False)
    assert found.num_equal < SMALL.num_decoded


def test_a_source_that_ends_is_no_success() -> None:
    found = continued.check(SMALL, TorchBackend(CPU), (sys.executable, "-c", ""))
    assert (found.message, found.holds) == ("the source ended at its start", False)


@pytest.mark.parametrize("limit", [1e9, -1.0])
def test_a_batch_beside_pulls_is_measured(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much later its tokens are is held against the limit, whatever it is here."""
    monkeypatch.setattr(speed, "MODELS", {"Tiny": faults.TINY})
    monkeypatch.setattr(disturbed, "MAX_DELAY", limit)
    batch = speed.Case("decode", 2, 33)
    found = disturbed.check(
        handoff.Case("host", "host", "inline", num_heads=1, num_blocks=8),
        speed.Model(name="Tiny", num_layers=1, wanted={batch: 0.0}),
        batch,
        TorchBackend(CPU),
        torch.float32,
        num_rounds=2,
        num_alone=3,
        round_s=0.2,
    )
    assert (found.message, found.wanted, found.holds) == ("", limit, limit > 0)
    assert found.num_steps >= 4
    assert found.delay == found.beside_s / found.alone_s - 1
    assert found.pull_s > 0


def test_a_pair_that_is_not_joined_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MODELS", {"Tiny": faults.TINY})
    batch = speed.Case("decode", 1, 33)
    found = disturbed.check(
        handoff.Case("device", "device", "nixl", num_heads=1, num_blocks=8),
        speed.Model(name="Tiny", num_layers=1, wanted={batch: 0.0}),
        batch,
        TorchBackend(CPU),
        torch.float32,
    )
    assert (found.message, found.holds) == ("the source ended at its start", False)


def test_what_is_asked_of_a_device_is_what_is_promised() -> None:
    assert {case.transport for case in continued.CASES} == {"nixl", "staged"}
    assert {case.num_tokens for case in continued.CASES} == {8192}
    assert all(case.sizes["num_hidden_layers"] == 32 for case in continued.CASES)
    config = disturbed.MODEL.config()
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    for way in disturbed.CASES:
        assert way.num_blocks << 20 == 8192 * token_bytes
    assert MODELS["Llama-3.1-8B"]["num_key_value_heads"] == 8
