"""The benchmark of whole steps, as far as it goes without a GPU: on a tiny model and the host."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from tests.bench.roofline import Ceilings
from tests.gpu import speed
from tests.gpu.models import MODELS
from tests.gpu.speed import Case, Model

CPU = torch.device("cpu")


class TwoSteps(TorchBackend):
    """Takes a step while it is at another, as a device does."""

    steps_in_flight = 2


BACKEND = TwoSteps(CPU)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
PROMPT, ALONE, BATCH = Case("prefill", 1, 40), Case("decode", 1, 33), Case("decode", 2, 33)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(speed, "MODELS", {"Tiny": {**MODELS["Qwen3-0.6B"], **TINY}})
    monkeypatch.setattr(speed, "_OVERHEAD_ROWS", 2)
    monkeypatch.setattr(speed, "_CHUNK", 32)
    return Model(name="Tiny", num_layers=1, wanted={ALONE: 0.0, BATCH: 0.0, PROMPT: 0.0})


def once(do: Callable[[], object]) -> float:
    do()
    return 1e-9


def test_every_figure_is_measured(tiny: Model) -> None:
    """Of no machine more than nothing, at limits beyond any."""
    endless = Ceilings(1e30, 1e30, 1e30)
    found = list(speed.check(tiny, BACKEND, torch.float32, endless, once))
    assert [each.figure for each in found] == [
        "MBU",
        "share of the roofline",
        "share of a step outside the device, at most",
        "MFU",
    ]
    assert [each.case for each in found] == [
        f"Tiny, {case}" for case in (ALONE, BATCH, BATCH, PROMPT)
    ]
    assert [each.holds for each in found] == [True, True, False, True]
    assert all(0 < each.value < 1e-9 for each in found if each.wanted == 0.0)
    assert found[2].value == 1 - 1e-9 / found[2].step_s
    demanding = replace(tiny, wanted={ALONE: 0.5})
    assert not next(speed.check(demanding, BACKEND, torch.float32, endless, once)).holds


def test_a_prompt_counts_whole_and_a_weight_once(tiny: Model) -> None:
    """What the device is measured by: the roofline of the steps that are run."""
    rig = speed.Rig(tiny, BACKEND, torch.float32, "none")
    alone, batch, prompt = (rig.operations(case) for case in (ALONE, BATCH, PROMPT))
    weights = 2 * (32 * (2 + 2) * 16 + 32 * 32 + 3 * 32 * 64 + 64 * 32)
    assert sum(op.num_bytes for op in alone if op.is_linear) == weights
    assert sum(op.num_bytes for op in batch if op.is_linear) == weights
    kv = [op.num_bytes for op in batch if not op.is_linear]
    assert kv == [2 * 33 * 2 * 16 * 4]
    assert len(prompt) == 5 + 6, "two chunks, and the head once"


def test_8_bit_floats_are_compared_with_the_same_step(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_ALONE", ALONE)
    model = replace(tiny, wanted={ALONE: 0.0}, fp8=True)
    found = list(speed.check(model, BACKEND, torch.float32, Ceilings(1e9, 1e9, 1e9), once))
    assert [each.figure for each in found] == ["MBU", "speed-up"]
    assert found[1].value == found[0].step_s / found[1].step_s
    assert found[1].wanted == 1.5


def test_rates_of_copies_and_products() -> None:
    found = speed.ceilings(CPU, torch.float32, 16, lambda do: once(do) * 1e9)
    assert found == Ceilings(8 * 2 * 16 * 16**2, 8 * 2 * 16**3, 8 * 2 * 16**3)


def test_what_is_wanted_of_real_shapes() -> None:
    """All layers; what each is asked for is what the documents promise to show."""
    small, large = speed.MODELS_TIMED
    assert (small.config().num_layers, large.config().num_layers) == (28, 32)
    batches = dict.fromkeys((Case("decode", n, 1024) for n in (64, 128, 256)), 0.75)
    prompt = {Case("prefill", 1, 8192): 0.55}
    assert small.wanted == {Case("decode", 1, 1024): 0.55} | batches | prompt
    assert large.wanted == {Case("decode", 1, 1024): 0.75} | batches | prompt
    assert large.fp8
