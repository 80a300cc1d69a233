"""The transports that tests run over."""

import importlib.util

import pytest

needs_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed: the extra ucxx"
)
UCXX = pytest.param("ucxx", marks=needs_ucxx)
AGENTS = ["nixl", UCXX]  # those with an agent in a process of its own
TRANSPORTS = ["inline", *AGENTS]
