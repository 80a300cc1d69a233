"""What the benchmark of simulated regimes makes of its cells."""

from pathlib import Path

from tests.bench.measured_cells import MeasuredCells
from tests.bench.regimes import Load, key_of, recovered_s, regimes, table

PERIOD_S = 40.0


def test_every_fixed_regime_is_tried_by_load_and_with_admission() -> None:
    tried = list(regimes(16))
    assert tried[0] == ("soft=16", "predicted")
    fixed = {each.workers for each in tried[1:]}
    assert fixed == {"decode=16"} | {f"prefill={k},decode={16 - k}" for k in (4, 6, 8, 10)}
    assert len(tried) == 1 + 2 * len(fixed)


def test_recovery_is_counted_from_each_change_after_the_first() -> None:
    cell = {
        "came": [10] * 16,
        "met": [0, 0, 0, 0, 10, 10, 10, 10, 2, 3, 8, 8, 10, 10, 10, 10],
    }
    assert recovered_s(cell, PERIOD_S) == 10.0
    assert recovered_s({"came": [10] * 4, "met": [9] * 4}, PERIOD_S) is None


def test_a_row_tells_the_means_of_the_seeds_that_are_whole(tmp_path: Path) -> None:
    cells = MeasuredCells(tmp_path / "cells.json", {})
    loads = [Load(4, "drift", seed) for seed in (1, 2)]
    for each in regimes(4):
        good = {"soft=4": 3.0, "decode=4": 2.0}.get(each.workers, 1.0)
        if each.placement == "predicted" and each.workers == "prefill=2,decode=2":
            good += 1.5
        cell = {"goodput": good, "came": [10] * 16, "met": [5] * 16}
        cells.add(key_of(each, loads[0]), cell)
    head, row = table(cells, loads, PERIOD_S).splitlines()
    assert head.startswith("workers")
    assert row.split()[:4] == ["4", "drift", "1", "3.00"]
    assert row.split()[4:8] == ["2.00", "(decode=4)", "2.50", "(prefill=2,decode=2)"]
    assert row.split()[8:] == ["1.200", "3.00", "0", "s"]
