"""How long answers will be, by how long they were."""

import pytest

from diptych.request_class import RequestClass
from router.placement.output_lengths import MAX_HISTOGRAMS, UNKNOWN_TOKENS, OutputLengths
from tests.work_count import num_calls

REALTIME, STANDARD, BATCH = RequestClass


def expected(
    lengths: OutputLengths, request_class: RequestClass, tenant: str, at_most: int, so_far: int = 0
) -> int:
    """Tokens that are to come of an answer."""
    return lengths.to_come(request_class, tenant, at_most, so_far).num_tokens


def test_nothing_is_known_at_first_and_the_request_bounds_it() -> None:
    lengths = OutputLengths()
    assert expected(lengths, STANDARD, "a", 10_000) == UNKNOWN_TOKENS
    assert expected(lengths, STANDARD, "a", 5) == 5
    assert expected(lengths, STANDARD, "a", 0) == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 100, 1000, 9000])
def test_a_tenants_own_answers_tell_what_comes_and_max_tokens_does_not(num_tokens: int) -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.learn(STANDARD, "a", num_tokens)
        lengths.learn(STANDARD, "b", 64)
    for at_most in (num_tokens, 10_000, 100_000):
        assert expected(lengths, STANDARD, "a", at_most) == num_tokens
    assert expected(lengths, STANDARD, "a", max(1, num_tokens // 2)) == max(1, num_tokens // 2)


def test_a_new_tenant_is_taken_for_one_of_its_class() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.learn(BATCH, "a", 500)
    assert expected(lengths, BATCH, "new", 10_000) == 500
    assert expected(lengths, REALTIME, "a", 10_000) == UNKNOWN_TOKENS


def test_the_past_fades() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.learn(STANDARD, "a", 1000)
    for _ in range(500):
        lengths.learn(STANDARD, "a", 10)
    assert 10 <= expected(lengths, STANDARD, "a", 10_000) <= 20


def test_the_long_ones_are_cut_off_by_what_a_request_allows() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.learn(STANDARD, "a", 4)
        lengths.learn(STANDARD, "a", 2000)
    assert expected(lengths, STANDARD, "a", 10_000) == pytest.approx(1002, rel=0.02)
    assert expected(lengths, STANDARD, "a", 100) == pytest.approx(52, rel=0.02)


def test_tenants_are_bounded() -> None:
    lengths = OutputLengths()
    for number in range(2 * MAX_HISTOGRAMS):
        lengths.learn(STANDARD, f"t{number}", 7)
    assert len(lengths._of_tenants) == MAX_HISTOGRAMS


def test_who_is_answered_all_the_time_is_not_forgotten_for_newcomers() -> None:
    lengths = OutputLengths()
    for number in range(2 * MAX_HISTOGRAMS):
        lengths.learn(STANDARD, "a", 500)
        lengths.learn(STANDARD, f"t{number}", 7)
    assert expected(lengths, STANDARD, "a", 10_000) == 500


def test_what_was_cut_off_says_only_that_it_would_have_been_longer() -> None:
    """Of those that may have more than five, half have ten and half have a thousand."""
    lengths = OutputLengths()
    for _ in range(100):
        lengths.learn(STANDARD, "a", 10)
        lengths.learn(STANDARD, "a", 1000)
        for _ in range(4):
            lengths.learn(STANDARD, "a", 5, is_cut=True)
    assert expected(lengths, STANDARD, "a", 10_000) == pytest.approx(505, rel=0.02)
    assert expected(lengths, STANDARD, "a", 5) == 5


@pytest.mark.parametrize(("num_tokens", "at_most"), [(5, 100), (300, 300), (90, 90)])
def test_where_all_were_cut_off_one_has_what_it_may_have(num_tokens: int, at_most: int) -> None:
    """Within what one has of which nothing is known, or as many as were seen."""
    lengths = OutputLengths()
    for _ in range(20):
        lengths.learn(STANDARD, "a", num_tokens, is_cut=True)
    assert expected(lengths, STANDARD, "a", at_most) == at_most
    assert expected(lengths, STANDARD, "a", 10_000) == max(num_tokens, UNKNOWN_TOKENS)


def test_some_end_where_others_are_cut_off() -> None:
    """Of three in four that are cut at 20 a third has 80: so has a third of all that end later."""
    lengths = OutputLengths()
    for _ in range(50):
        lengths.learn(STANDARD, "a", 10)
        lengths.learn(STANDARD, "a", 20, is_cut=True)
        lengths.learn(STANDARD, "a", 20, is_cut=True)
        lengths.learn(STANDARD, "a", 80)
    assert expected(lengths, STANDARD, "a", 10_000) == pytest.approx(
        0.25 * 10 + 0.75 * 80, rel=0.03
    )


def test_who_has_outlived_the_short_ones_is_one_of_the_long_ones() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.learn(STANDARD, "a", 10)
        lengths.learn(STANDARD, "a", 100)
    assert expected(lengths, STANDARD, "a", 10_000, so_far=5) == pytest.approx(50, abs=1)
    assert expected(lengths, STANDARD, "a", 10_000, so_far=40) == 60
    assert expected(lengths, STANDARD, "a", 70, so_far=40) == 30
    assert expected(lengths, STANDARD, "a", 10_000, so_far=400) == 101, "a fourth of what it has"
    assert expected(lengths, STANDARD, "a", 400, so_far=400) == 1
    assert expected(lengths, STANDARD, "new", 50, so_far=40) == 10


def test_who_asks_again_and_again_takes_no_memory() -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.learn(STANDARD, "a", 100)
    for at_most in range(1, 1000):
        assert expected(lengths, STANDARD, "a", at_most) == min(at_most, 100)
    assert len(lengths._of_tenants[STANDARD, "a"]._asked) <= 16


def test_what_has_faded_away_is_no_length() -> None:
    """One long answer, until its weight is the least number that there is."""
    lengths = OutputLengths()
    lengths.learn(STANDARD, "a", 9000)
    for number in range(76_000):
        lengths.learn(STANDARD, "a", 5000, is_cut=True)
        if number % 50 == 0 and number > 5000:
            assert expected(lengths, STANDARD, "a", 20_000, so_far=6000) == 1501, "outlived"
    assert expected(lengths, STANDARD, "a", 20_000) == 5000


@pytest.mark.parametrize(("num_whole", "num_cut"), [(190, 130), (130, 190), (20_000, 4096)])
def test_what_nobody_saw_the_end_of_is_as_long_as_the_longest(num_whole: int, num_cut: int) -> None:
    """Also of those of about one length."""
    lengths = OutputLengths()
    for _ in range(50):
        lengths.learn(STANDARD, "a", num_whole)
        lengths.learn(STANDARD, "a", num_cut, is_cut=True)
    shorter, *longer = lengths.to_come(STANDARD, "a", 50_000).halves
    assert shorter == pytest.approx(num_whole, abs=2)
    assert not longer or longer == [pytest.approx(max(num_whole, num_cut), abs=2)]


def test_one_long_answer_is_soon_forgotten() -> None:
    lengths = OutputLengths()
    lengths.learn(STANDARD, "a", 4000)
    for _ in range(100):
        lengths.learn(STANDARD, "a", 100, is_cut=True)
    assert expected(lengths, STANDARD, "a", 10_000) == UNKNOWN_TOKENS


def test_a_tenant_whose_answers_were_all_cut_off_is_taken_for_one_of_its_class() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.learn(STANDARD, "others", 1000)
    for _ in range(6):
        lengths.learn(STANDARD, "a", 16, is_cut=True)
    assert expected(lengths, STANDARD, "a", 10_000) == 1000
    assert expected(lengths, STANDARD, "a", 16) == 16


def test_to_learn_from_one_more_answer_costs_what_the_lengths_cost_that_were_seen() -> None:
    """Each answer teaches, and most of a tenant's are of a few lengths."""
    lengths = OutputLengths()
    for num_tokens in (30, 60):
        lengths.learn(STANDARD, "a", num_tokens)
    few = num_calls(lambda: lengths.learn(STANDARD, "a", 30))
    for num_tokens in (1, 4, 12, 120, 900):
        lengths.learn(STANDARD, "a", num_tokens)
    many = num_calls(lambda: lengths.learn(STANDARD, "a", 30))
    assert many - few == 2 * 5, "one for each that was seen, for the tenant and for its class"
    assert few < 20
