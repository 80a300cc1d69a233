"""What torch says of a device that is lost reaches the worker by its name."""

from collections.abc import Callable

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.kv.memory import DeviceKVMemory
from diptych.errors import DeviceLostError

META = torch.device("meta")  # no device of the host's


@pytest.mark.parametrize(
    "synchronise", [TorchBackend(META).synchronise, DeviceKVMemory(64, META).synchronise]
)
def test_waiting_for_a_lost_device(
    monkeypatch: pytest.MonkeyPatch, synchronise: Callable[[], None]
) -> None:
    waited_for = []

    def fail(device: torch.device) -> None:
        waited_for.append(device)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    with pytest.raises(DeviceLostError, match="meta is lost: CUDA error"):
        synchronise()
    assert waited_for == [META]
