"""How a process of ours begins."""

import subprocess
import sys

import pytest

CLOSED = ("<&-", "2>&-", "<&- >&-", "<&- >&- 2>&-")
# Its next files are no standard ones, and what it starts has all of those as well.
PROGRAM = """
import os, subprocess, sys
from diptych.loading import open_standard_files
open_standard_files()
again = subprocess.run([sys.executable, "-c", "import os; [os.fstat(n) for n in range(3)]"])
for stream in (sys.stdout, sys.stderr):
    print("nothing", file=stream, flush=True)
os.write(int(sys.argv[1]), b"%d %d" % (min(os.pipe()), again.returncode))
"""


@pytest.mark.parametrize("closed", CLOSED)
def test_standard_files_that_are_closed_are_opened(closed: str) -> None:
    command = [sys.executable, "-c", PROGRAM, "9"]
    shell = ["sh", "-c", f'exec 9>&1; exec "$@" {closed}', "sh", *command]
    said = subprocess.run(shell, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    lowest, code = map(int, said.replace(b"nothing", b"").split())
    assert lowest > 2
    assert code == 0
