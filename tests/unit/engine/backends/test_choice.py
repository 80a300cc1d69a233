"""Which backend a setting names."""

import pytest

from diptych.engine.backends.choice import make_backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.errors import ConfigurationError


def test_the_cpu() -> None:
    backend = make_backend("cpu")
    assert isinstance(backend, CpuBackend)
    assert backend.device.type == "cpu"
    backend.synchronise()


def test_another_device_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"^device 'cuda' is not one of cpu$"):
        make_backend("cuda")
