"""The benchmark of the engine's limits still runs, and its figures can be true."""

import json
from pathlib import Path

import pytest
import torch

from diptych.engine.backends.cpu.linear import split_works
from tests.bench import ceilings, limits
from tests.tiny_model import write_tiny_model


def test_a_quick_run_gives_every_ratio(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path))
    result = limits.run([folder], [1], [], quick=True)
    ratios = {key.removeprefix(f"{folder}."): value for key, value in result["ratios"].items()}
    parts = {"prefill_64_mfu_parts", "prefill_128_mfu_parts"} if split_works() else set()
    assert set(ratios) == parts | {
        "decode_b1_mbu",
        "decode_b8_roofline",
        "decode_b16_roofline",
        "decode_b32_roofline",
        "decode_b1_c128_mbu",
        "decode_b8_c128_roofline",
        "decode_b16_c128_roofline",
        "decode_b32_c128_roofline",
        "prefill_64_mfu",
        "prefill_128_mfu",
        "overhead_share_b16",
        "small_share_b16",
    }
    for name, value in ratios.items():
        assert 0 < value < 1.3, name
    (figure,) = result["figures"]
    for shares in (figure["forward"], figure["prefill"]):
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(0 < share < 1 for share in shares.values())
    assert figure["engine"]["inputs_and_sampling"] < figure["engine"]["outside_forward"]
    assert "decode_b16_roofline" in limits.table(result)


def test_the_json_alone_is_on_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "table", lambda result: "a table")
    limits.report({"ratios": {"a": 1.0}}, "-")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ratios": {"a": 1.0}}
    assert "a table" in err
    limits.report({"ratios": {}}, str(tmp_path / "limits.json"))
    assert json.loads((tmp_path / "limits.json").read_text()) == {"ratios": {}}
    assert capsys.readouterr().out == "a table\n"


def test_no_ceiling_is_below_the_engines_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In cache, whichever kernel that is on this machine."""
    monkeypatch.setattr(ceilings, "_own_rate", lambda *shape: 1e18)
    machine = ceilings.measure(1, "float32", quick=True)
    assert max(machine.flops_per_s.values()) == 1e18


def test_memory_is_read_from_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = []

    class Pages:
        def empty(self, num_bytes: int) -> torch.Tensor:
            placed.append(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(ceilings, "HugePages", Pages)
    assert ceilings.read_rate(2**16, 0.001) > 0
    assert placed == [4 * 2**16]
