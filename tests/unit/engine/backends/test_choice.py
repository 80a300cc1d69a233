"""Which backend, and which element type, a setting names."""

import importlib
import logging
import re
from types import ModuleType
from typing import get_args

import pytest
import torch

from diptych.engine.backends.choice import BACKENDS, make_backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.engine.kv.cache import KV_DTYPES
from diptych.engine.model.rank_share import RankShare
from diptych.errors import ConfigurationError
from diptych.formats import DeviceName, KVDtypeName

NO_CUDA = "this torch was built without CUDA"
NO_GPU = "torch sees no GPU"
OLD_GPU = r"compute capability is \(7, 5\)"
NO_TRITON = r"triton cannot be imported .*: pip install -e '\.\[cuda\]'"


@pytest.fixture(params=[NO_CUDA, NO_GPU, OLD_GPU, NO_TRITON])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What this machine is made to lack; all before it is there."""
    what: str = request.param
    monkeypatch.setattr(torch.version, "cuda", None if what == NO_CUDA else "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: what != NO_GPU)
    capability = (7, 5) if what == OLD_GPU else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    def import_module(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", import_module)
    return what


def test_the_cpu() -> None:
    backend = make_backend("cpu")
    assert isinstance(backend, CpuBackend)
    assert backend.device.type == "cpu"
    backend.synchronise()


def test_cuda_says_what_is_missing(missing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^device cuda: .*{missing}") as caught:
        make_backend("cuda")
    assert caught.value.message.endswith("; or set device to cpu")
    assert "\n" not in caught.value.message


def test_auto_is_the_cpu_where_anything_is_missing_and_says_what(
    missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(make_backend("auto"), CpuBackend)
    (record,) = caplog.records
    assert record.__dict__["device"] == "cpu"
    assert re.match(f".*{missing}", record.__dict__["reason"])


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_ranks_need_a_gpu_each(name: DeviceName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(importlib, "import_module", lambda name: ModuleType(name))
    with pytest.raises(ConfigurationError, match=r"4 ranks .* but 2 can be seen: .*--tensor-par"):
        make_backend(name, RankShare(0, 4))


def test_flashinfer_needs_a_gpu() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^prefill_attention flashinfer needs device cuda"
    ):
        make_backend("cpu", prefill_attention="flashinfer")


def test_each_name_that_the_settings_know_is_made() -> None:
    assert set(get_args(DeviceName)) == BACKENDS.keys()
    assert set(get_args(KVDtypeName)) == KV_DTYPES.keys()
