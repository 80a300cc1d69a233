"""What a process loads when nobody asked for more: users wait for it at each start."""

import subprocess
import sys
from pathlib import Path

import pytest

# Of any role; each is for one choice that is not the default.
FOR_A_CHOICE = {
    "dns",
    "httpx",
    "huggingface_hub",
    "lightkube",
    "opentelemetry.exporter",
    "opentelemetry.sdk",
    "requests",
    "rich",
    "transformers",
}
ROUTER = ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1", "--http-port", "0"]
CODE = """
import atexit, runpy, sys
atexit.register(lambda: print(*sys.modules))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("role", "flags", "absent"),
    [
        ("router", ROUTER, {"numpy", "torch", "numba", "diptych.engine", "kvtransfer"}),
        ("decode_worker", [], {"sympy", "torch._dynamo", "torch._inductor", "triton", "gguf"}),
    ],
    ids=["router", "decode worker"],
)
def test_what_nobody_asked_for_is_not_loaded(
    tiny_llama: Path, role: str, flags: list[str], absent: set[str]
) -> None:
    """From its start to its end, which comes with that of standard input."""
    command = [sys.executable, "-c", CODE, role, "--model", str(tiny_llama), "--stop-with-stdin"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *flags], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stderr is not None
        while b'"settled"' not in (line := process.stderr.readline()):
            assert line, "it ended early"
        told, log = process.communicate()
    assert process.returncode == 0, log
    loaded = set(told.decode().split())
    assert f"{role}.app" in loaded
    assert loaded & (FOR_A_CHOICE | absent) == set()
