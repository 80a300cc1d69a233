"""What becomes of a check that breaks or comes too late, and of ``make gpu`` without a GPU."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.gpu.checklist import Check, go_through

ROOT = Path(__file__).parents[5]


@dataclass(frozen=True)
class Found:
    case: str
    holds: bool


def found(case: str, *, holds: bool = True) -> Check:
    return Check("part", case, lambda: [Found(case, holds)])


def broken() -> Iterator[Found]:
    yield Found("before", holds=True)
    raise RuntimeError("an illegal memory access was encountered")


def test_what_breaks_is_told_and_the_others_are_checked(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    seen_before: list[int] = []

    def last() -> list[Found]:
        seen_before.append(len(json.loads(out.read_text())["part"]))
        return [Found("c", holds=True)]

    checks = [found("a"), Check("part", "b", broken), Check("part", "c", last)]
    assert not go_through(checks, {"device": "one"}, out, 100.0)
    report = json.loads(out.read_text())
    assert (report["device"], report["left_out"]) == ("one", [])
    assert [each["case"] for each in report["part"]] == ["a", "before", "b", "c"]
    assert [each["holds"] for each in report["part"]] == [True, True, False, True]
    assert "an illegal memory access" in report["part"][2]["error"]
    assert seen_before == [3], "what was found is on the disk before the next check begins"


def test_it_holds_when_all_hold(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert go_through([found("a"), found("b")], {}, out, 100.0)
    assert not go_through([found("a"), found("b", holds=False)], {}, out, 100.0)


def test_what_comes_too_late_is_left_out_and_named(tmp_path: Path) -> None:
    times = iter([0.0, *(0.0, 60.0), *(60.0, 130.0), *(130.0, 130.0)])
    checks = [found("a"), found("b"), found("c")]
    assert not go_through(checks, {}, tmp_path / "gpu.json", 100.0, clock=lambda: next(times))
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["left_out"] == ["part: c"]
    assert report["seconds"] == 130.0
    assert [each["case"] for each in report["part"]] == ["a", "b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run make gpu")
def test_from_carried_wheels_alone_it_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """``make gpu``, with nothing installed by it, nor fetched."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sitecustomize.py", "import sys\nprint('brought along', file=sys.stderr)\n")
    out, unpacked = tmp_path / "gpu.json", tmp_path / "unpacked"
    settings = [f"PYTHON={sys.executable}", f"WHEELS={wheels}", f"UNPACKED={unpacked}"]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        ["make", "--no-print-directory", "--silent", "gpu", *settings, f"GPU_JSON={out}"],
        cwd=ROOT,
        env=variables | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped, nothing was checked: device cuda: ")
    assert "brought along" in done.stderr
    assert not out.exists()
