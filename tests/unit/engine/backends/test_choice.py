"""Which backend, and which element type, a setting names."""

from typing import get_args

from diptych.engine.backends.choice import BACKENDS, make_backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.engine.kv.cache import KV_DTYPES
from diptych.formats import DeviceName, KVDtypeName


def test_the_cpu() -> None:
    backend = make_backend("cpu")
    assert isinstance(backend, CpuBackend)
    assert backend.device.type == "cpu"
    backend.synchronise()


def test_each_name_that_the_settings_know_is_made() -> None:
    assert set(get_args(DeviceName)) == BACKENDS.keys()
    assert set(get_args(KVDtypeName)) == KV_DTYPES.keys()
