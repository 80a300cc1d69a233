"""The pure parts of a local cluster, and of what the command line shows."""

import errno
import socket
import tempfile
from pathlib import Path

import pytest

from diptych import settings
from diptych.cli import cluster_child
from diptych.cli.breakdown import breakdown
from diptych.cli.cluster_child import Child, readable
from diptych.cli.commands import COMMANDS
from diptych.cli.local_cluster import (
    ClusterPlan,
    LocalCluster,
    by_quarters,
    core_shares,
    run_cluster,
)
from diptych.cli.main import main
from diptych.errors import ConfigurationError
from diptych.v1 import common_pb2, inference_pb2
from router.config import RouterConfig


@pytest.mark.parametrize(
    ("cores", "num_workers", "shares"),
    [
        ([0, 1], 1, [[]]),
        ([4, 5], 2, [["--num-threads", "1", "--cpus", "4"], ["--num-threads", "1", "--cpus", "5"]]),
        ([0], 2, [["--num-threads", "1"], ["--num-threads", "1"]]),
        (
            [0, 1, 2, 3, 4],
            2,
            [["--num-threads", "3", "--cpus", "0,1,4"], ["--num-threads", "2", "--cpus", "2,3"]],
        ),
    ],
)
def test_cores_are_divided(cores: list[int], num_workers: int, shares: list[list[str]]) -> None:
    assert core_shares(cores, num_workers) == shares


@pytest.mark.parametrize(("flags", "port"), [([], 0), (["--metrics-port", "9100"], 9100)])
def test_metrics_are_where_further_flags_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], port: int
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(
        cluster_child, "ChildProcess", lambda command, *_, **__: started.append(command)
    )
    Child("router-0", "router", ["--model", "m", "--decode", "a:1", *flags], tmp_path)
    args = started[0][started[0].index("router") + 1 :]
    config = settings.load(RouterConfig, args, prog="diptych router", env_prefix="X_")
    assert config.metrics_port == port
    assert config.port_file == tmp_path / "router-0.json"


def test_a_log_line_is_shown_as_text() -> None:
    line = '{"time": "t", "level": "warning", "service": "s", "message": "slow", "num": 3}'
    assert readable(line) == "warning: slow num=3"
    assert readable("not JSON") == "not JSON"
    assert readable("[1]") == "[1]"


def test_progress_is_shown_by_quarters() -> None:
    assert by_quarters("loading weights: 37%") == "loading weights: 25 %"
    assert by_quarters("loading weights: 100%") == "loading weights: 100 %"
    assert by_quarters("no proven pair") == "no proven pair"


def test_breakdown_tiles_the_time_to_first_token() -> None:
    usage = inference_pb2.Usage(num_prompt_tokens=40, num_output_tokens=11, num_cached_tokens=16)
    timing = inference_pb2.Timing(
        queue_s=0.001,
        prefill_s=0.05,
        first_write_s=0.0005,
        ttft_s=0.0515,
        handoff_gap_s=0.03,
        decode_s=0.18,
        total_s=0.262,
        num_attempts=2,
        kv_path=inference_pb2.KV_PATH_DISAGGREGATED,
        prefill_worker="p:1",
        decode_worker="d:2",
        transfer=common_pb2.TransferStats(
            transport="nixl", num_bytes=2_000_000, read_s=0.001, exposed_s=0.004, total_s=0.02
        ),
    )
    text = "\n".join(breakdown(usage, timing))
    for part in (
        "queue              1.0 ms",
        "40 tokens, 16 of them cached",
        "TTFT              51.5 ms",
        "2.00 MB at 2.00 GB/s over nixl, 4.0 ms not hidden by prefill",
        "hand-off gap      30.0 ms",
        "11 tokens, ITL 20.0 ms, 47.6 tokens/s",
        "prefilled on p:1, KV pulled, decoded on d:2, 2 attempts",
    ):
        assert part in text


def test_breakdown_of_one_token_divides_by_nothing() -> None:
    usage = inference_pb2.Usage(num_prompt_tokens=1, num_output_tokens=1)
    text = "\n".join(breakdown(usage, inference_pb2.Timing()))
    assert "decode" not in text
    assert "transfer" not in text


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command.name} " in text
    assert main([]) == 2


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upp"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("diptych: no command 'upp'; there are up, generate")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "other"), [("--port", ["--http-port", "0"]), ("--http-port", ["--port", "0"])]
)
def test_a_taken_port_is_told_before_any_worker_starts(
    flag: str, other: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(address: tuple[str, int], **_: object) -> socket.socket:
        if address[1] == 4711:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return socket.socket()

    monkeypatch.setattr(socket, "create_server", taken)
    assert main(["up", flag, "4711", *other]) == 2
    assert capsys.readouterr().err == (
        f"diptych up: {flag}: cannot bind 127.0.0.1:4711: Address already in use; "
        "0 picks a free port\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["up", "--prefill", "-1"], "diptych up: --prefill: "),
        (["up", "--nope"], "diptych up: unrecognized arguments: --nope"),
        (["generate", "a", "--timeout-s", "inf"], "diptych generate: --timeout-s: "),
        (["health", "--timeout-s", "inf"], "diptych health: --timeout-s: "),
        (["top", "--interval-s", "inf"], "diptych top: --interval-s: "),
        (["model", "fetch", "no such model"], "diptych model: model 'no such model': "),
        (["model", "import", "x.bin"], "diptych model: --file: x.bin is not a .gguf file"),
    ],
)
def test_a_bad_setting_is_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(message)
    assert shown.count("\n") == 1


async def test_nowhere_to_write_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")

    async def use(cluster: LocalCluster) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match="TMPDIR names one"):
        await run_cluster(ClusterPlan(model="demo"), print, use)
