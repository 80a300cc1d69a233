"""The benchmark of the engine's limits still runs, and its figures can be true."""

from pathlib import Path

import pytest

from tests.bench import limits
from tests.tiny_model import write_tiny_model


def test_a_quick_run_gives_every_ratio(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path))
    result = limits.run([folder], [1], [], quick=True)
    ratios = {key.removeprefix(f"{folder}."): value for key, value in result["ratios"].items()}
    assert set(ratios) == {
        "decode_b1_mbu",
        "decode_b8_roofline",
        "decode_b16_roofline",
        "decode_b32_roofline",
        "decode_b1_c128_mbu",
        "decode_b8_c128_roofline",
        "decode_b16_c128_roofline",
        "decode_b32_c128_roofline",
        "prefill_64_mfu",
        "prefill_64_mfu_parts",
        "prefill_128_mfu",
        "prefill_128_mfu_parts",
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
