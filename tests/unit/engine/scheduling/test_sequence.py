"""What a sequence is made of, from the wire."""

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
