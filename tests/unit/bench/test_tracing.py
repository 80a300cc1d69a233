"""What the benchmark of tracing makes of its rounds."""

from tests.bench.scraper import Scrape
from tests.bench.tracing_figures import (
    Answered,
    Pair,
    Round,
    scrape_figures,
    told,
    tracing_figures,
)


def round_of(trace_id: str, tokens_per_s: float, *cpu_ms: float) -> Round:
    answers = [Answered(trace_id, ttft_s=0.1, num_tokens=16)]
    return Round(answers, tokens_per_s, tuple(each / 1e3 for each in cpu_ms))


def test_a_cost_is_that_of_the_pairs_and_shown_only_by_its_interval() -> None:
    """The machine is twice as fast in the last pair, which hides nothing."""
    speeds = [100.0, 101.0, 99.0, 98.0, 100.0, 99.0, 101.0, 200.0]
    cheap, dear = (
        [
            Pair(
                round_of("none", speed, 5.0, 50.0, 45.0),
                round_of(str(number), speed * (1 - cost), 6.0, 50.0, 45.0),
            )
            for number, speed in enumerate(speeds)
        ]
        for cost in (0.02, 0.04)
    )
    explained_s = {str(number): 0.1 for number in range(6)} | {"6": 0.09, "7": 0.09}
    low, high = (tracing_figures(each, explained_s, [b"abc"] * 16, 96) for each in (cheap, dear))
    assert round(low.throughput_cost.value, 6) == 0.02
    assert round(high.throughput_cost.value, 6) == 0.04
    assert [round(each.value, 6) for each in low.cpu_added_ms.values()] == [1.0, 0.0, 0.0]
    assert round(low.cpu_cost.value, 6) == 0.01
    assert (low.spans_per_request, low.bytes_per_request, low.exports_per_request) == (12, 6, 2)
    assert low.explained_within_5_percent == 0.75
    few = tracing_figures(cheap[:7], explained_s, [], 84)
    for figures, said in ((low, "(shown"), (high, "(NOT shown"), (few, "(NOT shown")):
        assert f"{said} to be below 3%)" in told(figures, {}).splitlines()[1]


def test_a_scrape_is_told_beside_what_the_scraper_waited() -> None:
    scrapes = [Scrape(0, 0.01, 0.0), Scrape(0, 0.09, 0.08), Scrape(0, 0.02, 0.0), Scrape(1, 1, 0)]
    router = scrape_figures(scrapes, ["router", "worker"])["router"]
    assert (router.num_scrapes, router.median_s, router.worst_s) == (3, 0.02, 0.09)
    assert (router.worst_waited_s, router.worst_without_wait_s) == (0.08, 0.02)
    assert round(router.within_50_ms, 3) == 0.667
