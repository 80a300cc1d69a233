"""How long answers will be, by how long they were."""

import pytest

from diptych.request_class import RequestClass
from router.placement.output_lengths import MAX_HISTOGRAMS, UNKNOWN_TOKENS, OutputLengths

REALTIME, STANDARD, BATCH = RequestClass


def test_nothing_is_known_at_first_and_the_request_bounds_it() -> None:
    lengths = OutputLengths()
    assert lengths.expected(STANDARD, "a", 10_000) == UNKNOWN_TOKENS
    assert lengths.expected(STANDARD, "a", 5) == 5
    assert lengths.expected(STANDARD, "a", 0) == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 100, 1000, 9000])
def test_a_tenants_own_answers_tell_what_comes_and_max_tokens_does_not(num_tokens: int) -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.learn(STANDARD, "a", num_tokens)
        lengths.learn(STANDARD, "b", 64)
    for at_most in (num_tokens, 10_000, 100_000):
        assert lengths.expected(STANDARD, "a", at_most) == num_tokens
    assert lengths.expected(STANDARD, "a", max(1, num_tokens // 2)) == max(1, num_tokens // 2)


def test_a_new_tenant_is_taken_for_one_of_its_class() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.learn(BATCH, "a", 500)
    assert lengths.expected(BATCH, "new", 10_000) == 500
    assert lengths.expected(REALTIME, "a", 10_000) == UNKNOWN_TOKENS


def test_the_past_fades() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.learn(STANDARD, "a", 1000)
    for _ in range(500):
        lengths.learn(STANDARD, "a", 10)
    assert 10 <= lengths.expected(STANDARD, "a", 10_000) <= 20


def test_the_long_ones_are_cut_off_by_what_a_request_allows() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.learn(STANDARD, "a", 4)
        lengths.learn(STANDARD, "a", 2000)
    assert lengths.expected(STANDARD, "a", 10_000) == pytest.approx(1002, rel=0.02)
    assert lengths.expected(STANDARD, "a", 100) == pytest.approx(52, rel=0.02)


def test_tenants_are_bounded() -> None:
    lengths = OutputLengths()
    for number in range(2 * MAX_HISTOGRAMS):
        lengths.learn(STANDARD, f"t{number}", 7)
    assert len(lengths._of_tenants) == MAX_HISTOGRAMS
