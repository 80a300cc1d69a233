"""What is made of the comparison's rows: medians, ratios of ours over theirs, a table."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class Scenario(NamedTuple):
    """Requests that are sent at the same time."""

    name: str
    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int


def metric(scenario: Scenario) -> str:
    """What is compared."""
    return "output_tokens_per_s" if scenario.num_output_tokens > 1 else "prompt_tokens_per_s"


def medians(rows: Sequence[dict[str, Any]], name: str, key: str) -> dict[str, float]:
    """Of one figure in one scenario, by target."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["scenario"] == name and key in row:
            values.setdefault(row["target"], []).append(row[key])
    return {target: statistics.median(each) for target, each in values.items()}


def ratios(
    rows: Sequence[dict[str, Any]], scenarios: Sequence[Scenario], ours: Sequence[str]
) -> list[dict[str, Any]]:
    """Ours over theirs, for every scenario and pair of servers: of the medians, and by round."""
    result = []
    for scenario in scenarios:
        key = metric(scenario)
        speeds = medians(rows, scenario.name, key)
        measured = {
            (row["target"], row["round"]): row[key]
            for row in rows
            if row["scenario"] == scenario.name
        }
        rounds = sorted({number for _, number in measured})
        for our, their in itertools.product(speeds, speeds):
            if our not in ours or their in ours:
                continue
            pairs = [(measured.get((our, n)), measured.get((their, n))) for n in rounds]
            result.append(
                {
                    "scenario": scenario.name,
                    "ours": our,
                    "theirs": their,
                    "ratio": speeds[our] / speeds[their],
                    "by_round": [a / b for a, b in pairs if a and b],
                }
            )
    return result


def table(
    rows: Sequence[dict[str, Any]], scenarios: Sequence[Scenario], ours: Sequence[str]
) -> str:
    compared = ratios(rows, scenarios, ours)
    lines = []
    for scenario in scenarios:
        key = metric(scenario)
        speeds, ttfts = (medians(rows, scenario.name, each) for each in (key, "ttft_s"))
        decodes = medians(rows, scenario.name, "decode_tokens_per_s")
        lines.append(f"{scenario.name}: {key.replace('_', ' ')}")
        for name, speed in speeds.items():
            pairs = [c for c in compared if (c["scenario"], c["theirs"]) == (scenario.name, name)]
            text = f"  {name:<16}{speed:9.1f}   TTFT {ttfts[name]:6.2f} s"
            if name in decodes:
                text += f"   decode {decodes[name]:6.1f} tokens/s per stream"
            lines.append(text + "".join(f"   {c['ours']} x{c['ratio']:.2f}" for c in pairs))
        lines += [f"  {each}" for each in over_the_best(compared, scenario.name)]
    inexact = sorted({f"{r['target']} ({r['scenario']})" for r in rows if not r["exact"]})
    if inexact:
        lines.append("token counts differ from what was asked: " + ", ".join(inexact))
    others = [row["machine"]["others_cores"] for row in rows]
    if others:
        lines.append(
            f"what was not measured used {statistics.median(others):.2f} cores meanwhile, "
            f"at most {max(others):.2f}"
        )
    return "\n".join(lines)


def over_the_best(compared: Sequence[dict[str, Any]], name: str) -> list[str]:
    """Each of ours over the fastest of theirs in one scenario, and by round."""
    least: dict[str, dict[str, Any]] = {}
    for each in compared:
        if each["scenario"] == name and (
            each["ours"] not in least or each["ratio"] < least[each["ours"]]["ratio"]
        ):
            least[each["ours"]] = each
    return [
        f"{our} over the best, {each['theirs']}: x{each['ratio']:.2f} "
        f"(by round {', '.join(f'{ratio:.2f}' for ratio in each['by_round'])})"
        for our, each in least.items()
    ]


def line(row: dict[str, Any]) -> str:
    count = (
        "" if row["exact"] else f", tokens {row['num_prompt_tokens']} {row['num_output_tokens']}"
    )
    return (
        f"{row['scenario']}: {row['target']}: {row['output_tokens_per_s']:.1f} tokens/s, "
        f"TTFT {row['ttft_s']:.2f} s, others {row['machine']['others_cores']:.2f} cores{count}"
    )
