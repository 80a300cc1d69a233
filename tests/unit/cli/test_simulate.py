"""``diptych simulate``: a table, a picture, and the form of measured goodput."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from diptych.cli.main import main
from diptych.errors import ConfigurationError
from diptych.process import EXIT_CONFIGURATION
from diptych.simulation.measured_steps import read_steps
from diptych.simulation.measured_steps import text as steps_text
from diptych.simulation.simulation import Run, Simulation
from diptych.step_model import StepCost

KEYS = {  # of python -m tests.bench.goodput
    *("ttft_multiple", "tpot_multiple", "disaggregated", "disaggregated_setting"),
    *("colocated", "colocated_setting", "ratio"),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{10 + i}.0000000,{200 + 10 * i},{8 + i}" for i in range(20)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return path


def simulate(trace: Path, *flags: str) -> int:
    return main(["simulate", "--trace", str(trace), *flags])


def test_it_answers_with_a_table_a_picture_and_a_report(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, svg, steps = tmp_path / "r.json", tmp_path / "p.svg", tmp_path / "steps.json"
    flags = ("--workers", "prefill=1,decode=1 decode=2", "--rate", "0.5", "--rate", "2")
    written = ("--json", str(report), "--svg", str(svg), "--save-steps", str(steps))
    assert simulate(trace, *flags, "--duration-s", "12", *written) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4 + 2
    assert table[1].startswith("prefill=1,decode=1  least-loaded  0.50")
    assert table[-2].startswith("simulated")
    told = json.loads(report.read_text())
    assert told["environment"]["simulated"] is True
    assert {"divide", "duration_s", "unloaded", "map", "runs"} <= told.keys()
    assert len(told["map"]) == 9
    assert all(cell.keys() >= KEYS for cell in told["map"])
    assert told["map"][0]["colocated_setting"] == "decode=2 least-loaded"
    assert all(len(outcome) == 3 for outcome in told["runs"][0]["outcomes"])
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert simulate(trace, *flags, "--duration-s", "12", "--steps", str(steps)) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[:-1] == table[:-1], "the same steps, the same seed"


def test_variables_of_ours_alone_say_what_is_written(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, foreign = tmp_path / "ours.json", tmp_path / "foreign.json"
    monkeypatch.setenv("JSON", str(foreign))
    assert simulate(trace, "--workers", "decode=1", "--duration-s", "2") == 0
    assert not foreign.exists()
    monkeypatch.setenv("DIPTYCH_SIMULATE_JSON", str(ours))
    assert simulate(trace, "--workers", "decode=1", "--duration-s", "2") == 0
    assert json.loads(ours.read_text())["runs"]
    assert not foreign.exists()


def test_the_traces_own_times_may_pass_faster(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(trace, "--workers", "decode=1", "--speed", "2", "--duration-s", "9") == 0
    assert "  2.00  " in capsys.readouterr().out.splitlines()[1], "18 in 9 s"


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_what_was_simulated_before_ctrl_c_is_not_lost(
    trace: Path,
    tmp_path: Path,
    num_done: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_begun, run = 0, Simulation.run

    def breaking_off(self: Simulation, *args: Any) -> Run:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1 + num_done + 1:  # the first is of unloaded workers
            raise KeyboardInterrupt
        return run(self, *args)

    monkeypatch.setattr(Simulation, "run", breaking_off)
    report = tmp_path / "r.json"
    flags = ("--workers", "decode=1 soft=1 soft=2", "--rate", "1", "--json", str(report))
    assert simulate(trace, *flags, "--duration-s", "5") == 130
    table = capsys.readouterr().out.splitlines()
    if num_done == 0:
        assert (table, report.read_text()) == ([], "")
        return
    assert len(table) == 1 + num_done + 3
    assert table[-1] == f"broken off: {num_done} of 3 runs"
    assert len(json.loads(report.read_text())["runs"]) == num_done


def test_prompts_that_workers_do_not_take_are_told_to_be_cut(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 200, 210, ... 390 tokens; --max-prompt says itself that it cuts."""
    flags = (
        "--workers",
        "decode=1",
        "--rate",
        "0.2",
        "--duration-s",
        "5",
        "--max-model-len",
        "352",
    )
    assert simulate(trace, *flags) == 0
    told = "4 of the trace's 20 prompts cut to 350 tokens by --max-model-len"
    assert capsys.readouterr().out.splitlines()[-1] == told
    assert simulate(trace, *flags, "--max-prompt", "350") == 0
    assert "cut to" not in capsys.readouterr().out


def test_answers_that_workers_do_not_give_are_told_to_be_cut(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 8, 9, ... 27 tokens, after prompts of 200, 210, ... 390; --max-output says it itself."""
    flags = ("--workers", "decode=1", "--rate", "0.2", "--duration-s", "5")
    assert simulate(trace, *flags, "--max-model-len", "395") == 0
    told = "2 of the trace's 20 answers cut by --max-model-len"
    assert capsys.readouterr().out.splitlines()[-1] == told
    assert simulate(trace, *flags, "--max-model-len", "395", "--max-output", "5") == 0
    assert "cut by" not in capsys.readouterr().out
    assert simulate(trace, *flags, "--max-model-len", "382") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "4 of the trace's 20 answers cut by --max-model-len",
        "1 of the trace's 20 prompts cut to 380 tokens by --max-model-len",
    ]


def test_help_names_each_flag_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = capsys.readouterr().out
    assert "  --json PATH " in text
    assert "--json-" not in text


@pytest.mark.parametrize("flag", ["--json", "--svg", "--save-steps"])
def test_what_cannot_be_written_is_told_before_anything_is_simulated(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    path = tmp_path / "gone" / "file"
    assert simulate(trace, "--workers", "decode=1", flag, str(path)) == EXIT_CONFIGURATION
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"diptych simulate: {flag}: {path}: No such file or directory\n"


def test_workers_of_both_roles_and_several_routers(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "r.json"
    flags = ("--workers", "soft=2 prefill=1,soft=1", "--routers", "3", "--rate", "1")
    assert simulate(trace, *flags, "--duration-s", "10", "--json", str(report)) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].startswith("soft=2 ")
    assert table[2].startswith("prefill=1,soft=1 ")
    told = json.loads(report.read_text())
    assert told["environment"]["settings"]["routers"] == 3
    assert told["runs"][0]["pools"].keys() == {"soft"}
    assert told["runs"][1]["pools"].keys() == {"prefill", "soft"}
    assert {cell["colocated_setting"] for cell in told["map"]} == {None}, "neither is a fixed one"


def test_decode_workers_that_compute_no_prompts_are_measured_by_engines_that_do(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--workers", "prefill=1,decode=1", "--rate", "0.5", "--duration-s", "6")
    assert simulate(trace, *flags) == 0
    unit = capsys.readouterr().out.splitlines()[-2]
    assert simulate(trace, *flags, "--no-local-prefill") == 0
    assert capsys.readouterr().out.splitlines()[-2] == unit


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--workers", "prefill=1"), "--workers"),
        (("--workers", "prefill=1,decode=0"), "--workers"),
        (("--workers", " "), "--workers"),
        (("--workers", "soft=0"), "--workers"),
        (("--workers", "soft=1,soft=2"), "--workers"),
        (("--workers", "hard=1"), "--workers"),
        (("--workers", "soft=-1"), "--workers"),
        (("--workers", "decode=1", "--rate", "0"), "--rate"),
        (("--workers", "decode=1", "--max-batched-tokens", "8"), "max_batched_tokens"),
        (("--workers", "decode=1", "--num-blocks", "8"), "num_blocks"),
        (("--workers", "decode=1", "--num-blocks", "9" * 30), "num_blocks: decode=1 have more"),
        (
            ("--workers", "decode=4096", "--num-blocks", "65537"),
            "num_blocks: decode=4096 have more",
        ),
        (("--workers", "prefill=1,decode=1 decode=2", "--no-local-prefill"), "local_prefill"),
        (("--workers", "decode=1", "--rate", "1e308", "--burst-ratio", "3"), "--rate: "),
        (("--workers", "decode=1", "--rate", "1", "--burst-ratio", "1e308"), "--burst-ratio: "),
        (("--workers", "decode=1", "--drift-ratio", "1e308"), "--drift-ratio: "),
        (("--workers", "decode=1", "--speed", "1e308"), "--speed: "),
        (("--workers", "decode=1", "--speed", "1e-308"), "--speed: "),
        (("--workers", "decode=1", "--burst-ratio", "2"), "burst_ratio"),
        (("--workers", "decode=4097"), "--workers: expected 4096 workers at the most"),
        (("--workers", "decode=1 prefill=2000,decode=2000,soft=97"), "--workers: expected 4096"),
        (("--workers", "decode=999999999999"), "--workers: expected 4096"),
        (("--workers", "decode=1", "--rate", "nan"), "--rate: expected values"),
        (("--workers", "decode=1", "--divide", "1e-308"), "--divide: "),
        (("--workers", "decode=1", "--divide", "5e-324"), "--divide: "),
        (("--workers", "decode=1", "--tpot-ms", "1e-320"), "--tpot-ms: "),
        (("--workers", "decode=1", "--max-pending-prefill-tokens", "9" * 400), "--max-pending"),
        (("--workers", "decode=1", "--steps", "/nonexistent"), "--steps"),
        (("--workers", "decode=1", "--svg", "/nonexistent/x.svg"), "--svg"),
    ],
)
def test_what_is_wrong_is_named(
    trace: Path, flags: tuple[str, ...], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(trace, "--duration-s", "2", *flags) == EXIT_CONFIGURATION
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert names in said.splitlines()[-1]


@pytest.mark.parametrize("later_ms", [None, 1e-320, 1e-300, 1e-5])
def test_a_trace_of_one_moment_wants_a_rate(
    trace: Path, later_ms: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if later_ms is None:
        trace.write_text("\n".join(trace.read_text().splitlines()[:2]))
    else:
        lengths = {"input_length": 9, "output_length": 5, "hash_ids": []}
        rows = [{"timestamp": at_ms, **lengths} for at_ms in (0, later_ms)]
        trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--workers", "decode=1", "--duration-s", "2")
    assert simulate(trace, *flags) == EXIT_CONFIGURATION
    said = "diptych simulate: --trace: all of it comes at one moment; --rate says how often\n"
    assert capsys.readouterr().err == said
    assert simulate(trace, *flags, "--rate", "2") == 0


def steps_of_rows(more_row_s: object) -> str:
    known = {"fixed_s": 1, "num_steps": 99}
    decode = {**known, "more_row_s": more_row_s}
    return json.dumps({"step_model": {"decode": decode, "prefill": known}})


def steps_with(name: str, value: str) -> str:
    """As it stands in the file: JSON has numbers that Python has not."""
    known = '"row_s": 0.01, "num_steps": 99'
    decode = f'{{{known}, "{name}": {value}}}'
    return f'{{"step_model": {{"decode": {decode}, "prefill": {{{known}}}}}}}'


def test_what_later_rows_cost_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(steps_of_rows([0.001, 0.002]))
    model = read_steps(path)
    assert model.decode == StepCost(1.0, num_steps=99, more_row_s=(0.001, 0.002))
    assert model.prefill == StepCost(1.0, num_steps=99), "as files that were written before"
    path.write_text(steps_text(model))
    assert read_steps(path) == model


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"step_model": {"decode": {"fixed_s": 1}, "prefill": {}}}',
        steps_of_rows([0.001, -1]),
        steps_of_rows([math.inf]),
        steps_of_rows(0.001),
        steps_of_rows("0.001"),
        steps_of_rows([0.001] * 5),
        '{"step_model": {"decode": {"fixed_s": -1, "num_steps": 99}, "prefill": {}}}',
        '{"step_model": {"decode": {"fixed": 1}, "prefill": {}}}',
        "[",
        "[]",
        '{"step_model": []}',
        "[" * 100_000,
        steps_with("upper_ratio", "1e300"),
        steps_with("upper_ratio", "1e400"),
        steps_with("fixed_s", "1000001"),
        steps_with("row_s", "9" * 400),
        steps_with("num_trials", "1e400"),
        steps_with("row_s", "[]"),
    ],
)
def test_a_bad_step_model_is_refused(
    trace: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)
    assert simulate(trace, "--workers", "decode=1", "--steps", str(path)) == EXIT_CONFIGURATION
    said = capsys.readouterr().err
    assert said.startswith(f"diptych simulate: --steps: {path}: ")
    assert said.count("\n") == 1


def test_what_is_wrong_in_a_step_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(steps_with("upper_ratio", "1e300"))
    says = r"decode: upper_ratio: expected a number from 0 to 100 \(got 1e\+300\)"
    with pytest.raises(ConfigurationError, match=says):
        read_steps(path)


def test_the_longest_steps_can_be_simulated(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(steps_with("upper_ratio", "100"))
    flags = ("--workers", "decode=1", "--duration-s", "2", "--drain-s", "1e9")
    assert simulate(trace, *flags, "--steps", str(path)) == 0
