"""What ``diptych top`` shows of a report, and how it ends."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from diptych.cli import top
from diptych.cli.main import main
from diptych.cli.top_screen import OWNERS, Sample, block_bar, screen
from diptych.client import DiptychClient
from diptych.errors import DiptychError, NotServedError
from diptych.process import EXIT_FAILED
from diptych.v1.inference_pb2 import (
    BlockView,
    DescribeClusterResponse,
    PairView,
    RecentLatency,
    WorkerView,
)


def worker(address: str, **told: object) -> WorkerView:
    made = WorkerView(address=address, state="ready", is_used=True, max_num_seqs=64)
    made.MergeFrom(WorkerView(**told))  # type: ignore[arg-type]
    return made


def report(num_output_tokens: int = 100, num_pulls: int = 7) -> DescribeClusterResponse:
    blocks = BlockView(
        total=100, free=60, cached=20, running=11, reserved=5, leased=3, quarantined=1
    )
    pair = PairView(
        prefill="p:1", decode="d:1", state="proven", transport="nixl", bytes_per_s=2.5e9,
        num_pulls=num_pulls, way="DRAM to DRAM",
    )  # fmt: skip
    return DescribeClusterResponse(
        model="m",
        num_waiting=2,
        num_placed=3,
        num_output_tokens=num_output_tokens,
        ttft=RecentLatency(num_samples=5, p50_s=0.3, p95_s=1.25),
        num_prefill=1,
        num_decode=2,
        num_pairs=1,
        prefill=[worker("p:1", blocks=blocks, num_pending_prefill_tokens=1234)],
        decode=[worker("d:1", num_running=9, decode_step_s=0.0205)],
        pairs=[pair],
    )


def text_of(shown: RenderableType, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_everything_is_there() -> None:
    lines = text_of(screen(Sample(report(), 0.0), None, has_bars=False)).splitlines()
    said = [" ".join(line.split()) for line in lines]
    assert said[:2] == [
        "m queue 2 waiting, 3 on workers",
        "TTFT p50 300 ms, p95 1.25 s ITL - (last 30 s)",
    ]
    assert " ".join(OWNERS) in said[3]
    assert "p:1 ready 11 5 3 1 20 60 0/64 0 1,234" in said
    assert "d:1 ready 0 0 0 0 0 0 9/64 0 0 20.5 ms a step" in said
    assert "and 1 more" in said
    assert "p:1 d:1 proven nixl 2.50 7 DRAM to DRAM" in said


def test_speed_is_that_of_what_a_pool_does() -> None:
    """Each worker may do both: of both roles, or where short prompts stay with decode."""
    told = report()
    both = WorkerView(prefill_tokens_per_s=5300.0, decode_step_s=0.0205)
    told.prefill[0].MergeFrom(both)
    told.decode[0].MergeFrom(both)
    said = text_of(screen(Sample(told, 0.0), None, has_bars=True)).splitlines()
    prefill, decode = (
        next(line for line in said if line.startswith(each)) for each in ("p:1", "d:1")
    )
    assert prefill.endswith("5,300 tokens/s")
    assert decode.endswith("20.5 ms a step")


def test_a_worker_that_is_not_used_says_so() -> None:
    told = report()
    told.prefill[0].is_used = False
    told.decode[0].is_used = False
    told.decode[0].state = "starting"
    said = text_of(screen(Sample(told, 0.0), None, has_bars=False))
    assert "ready, not used" in said
    assert said.count("not used") == 1, "the other has a state that says why"


def test_blocks_of_each_worker_are_a_line_that_is_whole_on_a_hundred_columns() -> None:
    told = report()
    told.prefill[0].address = told.decode[0].address = "127.0.0.1:41233"  # of both roles
    told.decode[0].blocks.CopyFrom(told.prefill[0].blocks)
    lines = text_of(screen(Sample(told, 0.0), None, has_bars=True), width=100).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("KV blocks"))
    assert lines[at].split()[2:] == list(OWNERS)
    address, bar, *counts = lines[at + 1].split()
    assert (address, counts) == ("127.0.0.1:41233", ["11", "5", "3", "1", "20", "60"])
    assert bar == block_bar(told.prefill[0].blocks).plain
    assert not lines[at + 2].split(), "a worker of both roles is told once"


def test_rates_are_since_the_look_before() -> None:
    before, now = Sample(report(), 10.0), Sample(report(150, 17), 12.0)
    shown = text_of(screen(now, before, has_bars=True))
    assert "25.0 tokens/s" in shown
    assert shown.split()[-5:] == ["17", "5.0", "DRAM", "to", "DRAM"]
    restarted = text_of(screen(before, now._replace(at_s=8.0), has_bars=True))
    assert "0.0 tokens/s" in restarted


def test_there_are_no_rates_between_the_counts_of_two_routers() -> None:
    one, other = Sample(report(), 10.0, "r:1"), Sample(report(5_000_000, 900), 11.0, "r:2")
    moved_on = text_of(screen(other, one, has_bars=True))
    assert "tokens/s" not in moved_on
    assert moved_on.split()[-4] == "900"
    later = Sample(report(5_000_050, 905), 12.0, "r:2")
    assert "50.0 tokens/s" in text_of(screen(later, other, has_bars=True))


def test_a_bar_has_a_cell_for_each_owner_of_any_block() -> None:
    assert block_bar(BlockView(total=1000, leased=1, free=999)).plain == "█" + "░" * 23
    assert block_bar(BlockView(total=4, running=4)).plain == "█" * 24
    assert block_bar(BlockView()).plain == ""


def test_what_would_steer_a_terminal_is_not_shown() -> None:
    hostile = report()
    hostile.decode[0].MergeFrom(WorkerView(state="failed", message="\x1b]0;x\x07[red]y"))
    shown = text_of(screen(Sample(hostile, 0.0), None, has_bars=False))
    assert "failed ?]0;x?[red]y" in shown


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[object]], None]:
    """Have the router give these answers, one after the other."""

    def script(given: list[object]) -> None:
        async def cluster(self: DiptychClient, timeout_s: float) -> DescribeClusterResponse:
            answer = given.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            assert isinstance(answer, DescribeClusterResponse)
            return answer

        monkeypatch.setattr(DiptychClient, "cluster", cluster)

    return script


@pytest.mark.parametrize("is_dumb", [False, True])
def test_without_a_terminal_it_is_plain_text_once(
    answers: Callable[[list[object]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_dumb: bool,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_dumb)
    monkeypatch.setenv("TERM", "dumb")
    answers([report()])
    assert top.run([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("m   queue 2 waiting")
    assert said.isascii()
    assert all(line == line.rstrip() for line in said.splitlines())


def test_a_router_that_does_not_tell_or_is_not_there_is_one_line(
    answers: Callable[[list[object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answers([NotServedError("this router does\nnot tell")])
    assert top.run(["--address", "r:1", "--once"]) == EXIT_FAILED
    assert capsys.readouterr() == ("", "diptych top: r:1: NOT_SERVED: this router does not tell\n")


def test_ctrl_c_ends_it_cleanly(
    answers: Callable[[list[object]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    answers([KeyboardInterrupt()])
    assert top.run([]) == 0
    assert capsys.readouterr().err == ""


def test_ctrl_c_before_it_was_shown_once_is_no_success(
    answers: Callable[[list[object]], None],
) -> None:
    answers([KeyboardInterrupt()])
    assert main(["top", "--once"]) == 130


def test_a_router_that_is_lost_meanwhile_is_told_and_looked_for_again(
    answers: Callable[[list[object]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("asyncio.sleep", _no_pause)
    lost = DiptychError("gone")
    answers([report(), lost, report(150), KeyboardInterrupt()])
    assert top.run(["--address", "r:1"]) == 0
    said = capsys.readouterr().out
    assert "r:1: INTERNAL: gone" in said
    assert said.count("queue 2 waiting") == 3


def test_after_a_fail_over_there_is_no_rate_until_the_look_after(
    answers: Callable[[list[object]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("asyncio.sleep", _no_pause)
    answered = iter(["r:1", "r:2", "r:2"])
    monkeypatch.setattr(DiptychClient, "router", property(lambda _: next(answered)))
    answers([report(100), report(5_000_000), report(5_000_000), KeyboardInterrupt()])
    assert top.run(["--address", "r:1,r:2"]) == 0
    said = capsys.readouterr().out
    assert said.count("queue 2 waiting") == 3
    assert said.count("tokens/s") == 1
    assert "0.0 tokens/s" in said


async def _no_pause(seconds: float) -> None:
    pass
