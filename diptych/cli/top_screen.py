"""How a cluster is, for a terminal or as plain text. Pure: reports in, what to show out."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diptych.v1 import inference_pb2

Report = inference_pb2.DescribeClusterResponse

OWNERS: Final = ("running", "reserved", "leased", "quarantined", "cached", "free")
_COLOURS: Final = {
    "running": "cyan",
    "reserved": "blue",
    "leased": "yellow",
    "quarantined": "red",
    "cached": "green",
    "free": "bright_black",
}
_STATE_COLOURS: Final = {
    **dict.fromkeys(("ready", "proven"), "green"),
    **dict.fromkeys(("starting", "connecting", "draining"), "yellow"),
    **dict.fromkeys(("failed", "unreachable"), "red"),
}
_BAR_CELLS: Final = 24


class Sample(NamedTuple):
    """A report, when it came (s, of any clock), and the address of the router that made it."""

    report: Report
    at_s: float
    router: str = ""


def screen(now: Sample, before: Sample | None, *, has_bars: bool) -> RenderableType:
    """The whole; rates are those since ``before``, and left out without it.

    What another router counted has its own beginning: between two there is no rate.
    """
    report = now.report
    if before is not None and before.router != now.router:
        before = None
    parts: list[RenderableType] = [_head(now, before), Text()]
    for name, workers, total in (
        ("prefill", report.prefill, report.num_prefill),
        ("decode", report.decode, report.num_decode),
    ):
        parts += [_pool(name, workers, total - len(workers), has_bars=has_bars), Text()]
    if has_bars:
        all_workers = {each.address: each for each in (*report.prefill, *report.decode)}
        parts += [_blocks(all_workers.values()), Text()]
    parts.append(_pairs(now, before))
    return Group(*parts)


def _head(now: Sample, before: Sample | None) -> Text:
    report = now.report
    head = Text()
    head.append(printable(report.model), style="bold")
    head.append(f"   queue {report.num_waiting} waiting, {report.num_placed} on workers")
    if before is not None:
        rate = _rate(report.num_output_tokens - before.report.num_output_tokens, now, before)
        head.append(f"   {rate:.1f} tokens/s")
    head.append(f"\nTTFT {_latency(report.ttft)}   ITL {_latency(report.itl)}   (last 30 s)")
    return head


def _pool(
    name: str, workers: Iterable[inference_pb2.WorkerView], num_more: int, *, has_bars: bool
) -> Table:
    table = _table(name)
    table.add_column("state", no_wrap=True)
    for title in (*(() if has_bars else OWNERS), "batch", "waiting", "prompt tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("speed", justify="right", no_wrap=True)
    for worker in workers:
        cells = [Text(printable(worker.address)), _state(worker)]
        if not has_bars:
            cells += [Text(f"{getattr(worker.blocks, owner):,}") for owner in OWNERS]
        places = f"/{worker.max_num_seqs}" if worker.max_num_seqs else ""
        cells += [Text(f"{worker.num_running}{places}"), Text(f"{worker.num_waiting}")]
        speed = _decode_speed(worker) if name == "decode" else _prefill_speed(worker)
        cells += [Text(f"{worker.num_pending_prefill_tokens:,}"), Text(speed)]
        table.add_row(*cells)
    if num_more:
        table.add_row(f"and {num_more} more")
    return table


def _blocks(workers: Iterable[inference_pb2.WorkerView]) -> Table:
    """Of each worker a bar, and how many blocks each owner has; the titles are its legend."""
    table = _table("KV blocks")
    table.add_column("", no_wrap=True)
    for owner in OWNERS:
        title = Text(owner, _COLOURS[owner])
        table.add_column(title, justify="right", no_wrap=True)
    for worker in workers:
        counts = [Text(f"{getattr(worker.blocks, owner):,}") for owner in OWNERS]
        table.add_row(Text(printable(worker.address)), block_bar(worker.blocks), *counts)
    return table


def _pairs(now: Sample, before: Sample | None) -> Table:
    table = _table("KV moves from")
    for title in ("to", "state", "over"):
        table.add_column(title, no_wrap=True)
    for title in ("GB/s", "pulls", "pulls/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("memories")  # wraps
    pulls = {} if before is None else {(p.prefill, p.decode): p for p in before.report.pairs}
    for pair in now.report.pairs:
        earlier = pulls.get((pair.prefill, pair.decode))
        rate = ""
        if before is not None and earlier is not None:
            rate = f"{_rate(pair.num_pulls - earlier.num_pulls, now, before):.1f}"
        table.add_row(
            Text(printable(pair.prefill)),
            Text(printable(pair.decode)),
            _coloured(pair.state),
            Text(printable(pair.transport)),
            f"{pair.bytes_per_s / 1e9:.2f}" if pair.bytes_per_s else "",
            f"{pair.num_pulls:,}",
            rate,
            Text(printable(pair.way)),
        )
    num_more = now.report.num_pairs - len(now.report.pairs)
    if num_more:
        table.add_row(f"and {num_more} more")
    return table


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def block_bar(blocks: inference_pb2.BlockView) -> Text:
    """A bar of cells in the owners' colours; an owner with any block has at least one."""
    bar = Text()
    left, left_blocks = _BAR_CELLS, blocks.total
    for owner in OWNERS:
        count = getattr(blocks, owner)
        if count and left_blocks:
            cells = min(left, max(1, round(left * count / left_blocks)))
            bar.append("█" * cells if owner != "free" else "░" * cells, style=_COLOURS[owner])
            left, left_blocks = left - cells, left_blocks - count
    return bar


def _state(worker: inference_pb2.WorkerView) -> Text:
    state = _coloured(worker.state)
    if worker.message and worker.state != "ready":
        state.append(f" {printable(worker.message)[:40]}")
    elif worker.state == "ready" and not worker.is_used:
        state.append(", not used", style="yellow")
    return state


def _coloured(state: str) -> Text:
    return Text(printable(state), style=_STATE_COLOURS.get(state, ""))


def _prefill_speed(worker: inference_pb2.WorkerView) -> str:
    return f"{worker.prefill_tokens_per_s:,.0f} tokens/s" if worker.prefill_tokens_per_s else ""


def _decode_speed(worker: inference_pb2.WorkerView) -> str:
    return f"{1e3 * worker.decode_step_s:.1f} ms a step" if worker.decode_step_s else ""


def _latency(latency: inference_pb2.RecentLatency) -> str:
    if not latency.num_samples:
        return "-"
    return f"p50 {_time(latency.p50_s)}, p95 {_time(latency.p95_s)}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def _rate(count: int, now: Sample, before: Sample) -> float:
    """0 where a count fell: what it counted began anew."""
    return max(0, count) / max(1e-3, now.at_s - before.at_s)


def printable(text: str) -> str:
    """What another process said, without what would steer a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
