"""What a sequence is made of, from the wire."""

import math
import time

import pytest

from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.v1 import common_pb2

KEY = SequenceKey("router", 1)


def test_whose_it_is_comes_from_the_wire() -> None:
    spec = common_pb2.SequenceSpec(payer=b"p", tier=3, tier_weight=8.0, yields=True)
    seq = Sequence.from_spec(KEY, spec, prefill_only=False)
    assert (seq.payer, seq.tier, seq.tier_weight, seq.yields) == (b"p", 3, 8.0, True)


def test_a_tier_without_a_weight_has_one() -> None:
    seq = Sequence.from_spec(KEY, common_pb2.SequenceSpec(tier=3), prefill_only=False)
    assert seq.tier_weight == 1.0


def test_what_it_is_promised_comes_from_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 70.0)
    spec = common_pb2.SequenceSpec(tpot_s=0.05, num_expected_tokens=60, due_in_s=-2.5)
    seq = Sequence.from_spec(KEY, spec, prefill_only=False)
    assert (seq.tpot_s, seq.num_expected_tokens, seq.due_s) == (0.05, 60, 67.5)
    free = Sequence.from_spec(KEY, common_pb2.SequenceSpec(), prefill_only=False)
    assert (free.tpot_s, free.num_expected_tokens, free.due_s) == (0.0, 0, math.inf)
