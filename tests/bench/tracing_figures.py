"""What rounds with and without tracing say of its cost. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.bench.intervals import Estimate, median
from tests.bench.scraper import Scrape

ROLES: Final = ("router", "prefill", "decode")  # in the order of a round's CPU times
_WANTED_COST: Final = 0.03
_MIN_PAIRS: Final = 8  # fewer show nothing
_WANTED_SCRAPE_S: Final = 0.05


class Answered(NamedTuple):
    """One request, as its client saw it."""

    trace_id: str
    ttft_s: float
    num_tokens: int


class Round(NamedTuple):
    """All requests of one round."""

    answers: list[Answered]
    tokens_per_s: float
    cpu_s: tuple[float, ...]  # per request, by role

    @property
    def whole_cpu_s(self) -> float:
        """Of all roles."""
        return sum(self.cpu_s)


class Pair(NamedTuple):
    """Two rounds, one beside the other."""

    untraced: Round
    traced: Round


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingFigures:
    """Costs are ratios, and medians over the pairs with their 95 % interval."""

    num_requests: int  # traced ones
    num_pairs: int
    tokens_per_s_untraced: list[float]  # by pair
    tokens_per_s_traced: list[float]
    throughput_cost: Estimate  # 1 - traced / untraced
    cpu_untraced_ms: dict[str, float]  # per request, by role: median of the rounds
    cpu_added_ms: dict[str, Estimate]  # traced - untraced
    cpu_cost: Estimate  # traced / untraced - 1, of all roles together
    spans_per_request: float
    bytes_per_request: float  # sent to the collector
    exports_per_request: float
    unexplained_median: float  # |span sum - client's TTFT| / client's TTFT
    unexplained_worst: float
    explained_within_5_percent: float  # share of the requests


def tracing_figures(
    pairs: Sequence[Pair], explained_s: dict[str, float], exports: Sequence[bytes], num_spans: int
) -> TracingFigures:
    """``explained_s`` is what the spans of each trace say of the time to first token."""
    answers = [answer for pair in pairs for answer in pair.traced.answers]
    parts = [abs(explained_s[each.trace_id] - each.ttft_s) / each.ttft_s for each in answers]
    added_s = [
        [with_s - without_s for with_s, without_s in zip(on.cpu_s, off.cpu_s, strict=True)]
        for off, on in pairs
    ]
    return TracingFigures(
        num_requests=len(answers),
        num_pairs=len(pairs),
        tokens_per_s_untraced=[pair.untraced.tokens_per_s for pair in pairs],
        tokens_per_s_traced=[pair.traced.tokens_per_s for pair in pairs],
        throughput_cost=median([1 - on.tokens_per_s / off.tokens_per_s for off, on in pairs]),
        cpu_untraced_ms={
            role: 1e3 * median([pair.untraced.cpu_s[number] for pair in pairs]).value
            for number, role in enumerate(ROLES)
        },
        cpu_added_ms={
            role: median([1e3 * each[number] for each in added_s])
            for number, role in enumerate(ROLES)
        },
        cpu_cost=median([on.whole_cpu_s / off.whole_cpu_s - 1 for off, on in pairs]),
        spans_per_request=num_spans / len(answers),
        bytes_per_request=sum(map(len, exports)) / len(answers),
        exports_per_request=len(exports) / len(answers),
        unexplained_median=median(parts).value,
        unexplained_worst=max(parts),
        explained_within_5_percent=sum(part <= 0.05 for part in parts) / len(parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeFigures:
    """Answers to ``/metrics`` of one process; s."""

    num_scrapes: int
    median_s: float
    worst_s: float
    worst_waited_s: float  # of the worst, what the scraper itself waited for a core
    worst_without_wait_s: float  # of all, without what the scraper waited
    within_50_ms: float  # share of all


def scrape_figures(scrapes: Sequence[Scrape], names: Sequence[str]) -> dict[str, ScrapeFigures]:
    """By process."""
    result = {}
    for number, name in enumerate(names):
        own = [scrape for scrape in scrapes if scrape.process == number]
        worst = max(own, key=lambda scrape: scrape.took_s)
        result[name] = ScrapeFigures(
            num_scrapes=len(own),
            median_s=median([scrape.took_s for scrape in own]).value,
            worst_s=worst.took_s,
            worst_waited_s=worst.waited_s,
            worst_without_wait_s=max(scrape.took_s - scrape.waited_s for scrape in own),
            within_50_ms=sum(scrape.took_s < _WANTED_SCRAPE_S for scrape in own) / len(own),
        )
    return result


def told(tracing: TracingFigures, scrapes: dict[str, ScrapeFigures]) -> str:
    """For who reads it."""
    added = tracing.cpu_added_ms
    lines = [
        f"{tracing.num_pairs} pairs of rounds, {tracing.num_requests} traced requests",
        f"throughput that tracing costs:  {_percent(tracing.throughput_cost)}"
        f"   ({_verdict(tracing.throughput_cost, tracing.num_pairs)})",
        f"CPU time that it adds:          {_percent(tracing.cpu_cost)}"
        f"   ({_verdict(tracing.cpu_cost, tracing.num_pairs)})",
        *(
            f"  {role:<8} {tracing.cpu_untraced_ms[role]:8.2f} ms per request, traced "
            f"{added[role].value:+.2f} ms ({added[role].low:+.2f} to {added[role].high:+.2f})"
            for role in ROLES
        ),
        f"per traced request {tracing.spans_per_request:.1f} spans, "
        f"{tracing.bytes_per_request:.0f} bytes, {tracing.exports_per_request:.2f} exports",
        f"time to first token that no span explains: median {tracing.unexplained_median:.2%}, "
        f"worst {tracing.unexplained_worst:.2%}, "
        f"{tracing.explained_within_5_percent:.2%} of the requests within 5 %",
        *(
            f"/metrics of {name}: median {1e3 * each.median_s:.1f} ms, worst "
            f"{1e3 * each.worst_s:.1f} (of it the scraper waited {1e3 * each.worst_waited_s:.1f} "
            f"for a core; worst without such waits {1e3 * each.worst_without_wait_s:.1f}), "
            f"{each.within_50_ms:.2%} of {each.num_scrapes} within 50 ms"
            for name, each in scrapes.items()
        ),
    ]
    return "\n".join(lines)


def _percent(cost: Estimate) -> str:
    return f"{cost.value:6.2%} ({cost.low:.2%} to {cost.high:.2%})"


def _verdict(cost: Estimate, num_pairs: int) -> str:
    is_shown = num_pairs >= _MIN_PAIRS and cost.high < _WANTED_COST
    return f"{'shown' if is_shown else 'NOT shown'} to be below {_WANTED_COST:.0%}"
