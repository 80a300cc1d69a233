"""What ``python -m router`` sets of its process."""

import gc
import runpy
import signal
import sys

import pytest


def test_its_process_looks_for_cycles_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds, on_interrupt = gc.get_threshold(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["router", "--no-such-setting", "1"])
    try:
        with pytest.raises(SystemExit):
            runpy.run_module("router", run_name="__main__")
        assert gc.get_threshold() == (10_000, *thresholds[1:])
    finally:
        gc.set_threshold(*thresholds)
        signal.signal(signal.SIGINT, on_interrupt)
