"""How commands end that nobody reads any more."""

import subprocess
import sys

_WRITES = """
import importlib, sys
from types import SimpleNamespace

module = importlib.import_module("diptych.cli.main")

def run(args):
    while True:
        print("x" * 1000, flush=True)

module.importlib = SimpleNamespace(import_module=lambda name: SimpleNamespace(run=run))
sys.exit(module.main(["health"]))
"""


def test_who_reads_no_more_ends_a_command_without_a_word() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WRITES], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141
