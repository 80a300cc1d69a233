"""What came is read in each public form."""

import gzip
import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from diptych.errors import ConfigurationError
from diptych.simulation.trace_file import read_trace
from diptych.simulation.workload import Shape, replayed

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
"""
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]}
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    azure = read_trace(written(tmp_path, "a.csv", AZURE))
    assert azure == [Shape(0.0, 374, 44), Shape(pytest.approx(4.25), 396, 109)]  # type: ignore[arg-type]
    mooncake = read_trace(written(tmp_path, "m.jsonl", MOONCAKE))
    assert mooncake == [Shape(0.0, 700, 5, (0, 1)), Shape(2.5, 600, 7, (0, 2))]


def test_whole_numbers_may_be_written_as_floats_are(tmp_path: Path) -> None:
    """A table that once had gaps is saved so."""
    azure = read_trace(written(tmp_path, "a.csv", AZURE.replace(",374,44", ",374.0,44.0")))
    assert azure[0] == Shape(0.0, 374, 44)
    mooncake = read_trace(written(tmp_path, "m.jsonl", row_of(input_length=7.0)))
    assert mooncake == [Shape(0.0, 7, 1, ())]


def test_an_excerpt_begins_with_its_first_request(tmp_path: Path) -> None:
    """Else nobody would come in the time that is simulated. Lines may be in any order."""
    rows = [row_of(timestamp=stamp) for stamp in (3_601_500, 3_600_000, 3_604_000)]
    shapes = read_trace(written(tmp_path, "m.jsonl", "".join(rows)))
    assert [shape.at_s for shape in shapes] == [1.5, 0.0, 4.0]
    come = replayed(shapes, speed=1.0, duration_s=5.0)
    assert [shape.at_s for shape in come] == [0.0, 1.5, 4.0]


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Tokyo"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The machine's."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("stamps", "expected_s"),
    [
        (["10 00:00:00.009930+00:00", "10 00:00:01+00:00", "10 00:00:01.5000000Z"], [0.99007, 0.5]),
        (["10 00:00:00.0099301", "10 00:00:01+00:00", "10 00:00:01.50"], [0.99007, 0.5]),
        (["10 00:00:00.25-05:00", "10 05:00:01+00:00", "10 14:00:01.2500009+09:00"], [0.75, 0.25]),
        (["10 01:59:59.5", "10 02:30:00", "10 03:00:00"], [1800.5, 1800.0]),
    ],
)
def test_moments_are_those_of_their_zone_wherever_they_are_read(
    tmp_path: Path, zone: str, stamps: list[str], expected_s: list[float]
) -> None:
    """Of no zone: of UTC, which has each hour of a day once. In March New York skips one."""
    rows = "".join(f"2024-03-{stamp},1,1\n" for stamp in stamps)
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}"
    shapes = read_trace(written(tmp_path, "a.csv", text))
    gaps_s = [after.at_s - before.at_s for before, after in pairwise(shapes)]
    assert gaps_s == pytest.approx(expected_s, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\nx,1\n", "line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-1,4\n", "line 2"),
        ("a.csv", "", "no request"),
        ("m.jsonl", '{"timestamp": 0}\n', "input_length"),
        ("m.jsonl", "no json\n", "line 1"),
        (
            "m.jsonl",
            '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}\n',
            "1",
        ),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path: Path, name: str, text: str, names: str) -> None:
    with pytest.raises(ConfigurationError, match=names):
        read_trace(written(tmp_path, name, text))
    with pytest.raises(ConfigurationError, match="--trace"):
        read_trace(tmp_path / "missing.csv")


def row_of(**told: object) -> str:
    whole = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}
    return json.dumps({**whole, **told}).replace("Infinity", "1e400") + "\n"


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n"
TIME = "2023-11-16 18:15:47"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", f"{HEAD}{TIME},{'9' * 140_000},1\n", "line 3: field larger than field limit"),
        ("a.csv", f"{'T' * 140_000}\n", "line 1: field larger than field limit"),
        ("a.csv", f"{HEAD}{TIME},{'9' * 400},1\n", "line 3: ContextTokens: expected a whole num"),
        ("a.csv", f"{HEAD}{TIME},1,{'9' * 5000}\n", "line 3: GeneratedTokens: expected a whole n"),
        ("a.csv", f"{HEAD}\n\n{TIME},1e3,1\n", r"line 5: ContextTokens: .* \(got '1e3'\)"),
        ("a.csv", f"{HEAD}{TIME},1,1.5\n", r"line 3: GeneratedTokens: .* \(got '1.5'\)"),
        ("a.csv", f"{HEAD}{TIME},5\n", "line 3: GeneratedTokens: is missing"),
        ("a.csv", f"{HEAD}0000-11-16 18:15:47,1,1\n", "line 3: TIMESTAMP: expected a time"),
        ("a.csv", f"{HEAD}2023-11-16 18:15:47.1234567890 or so,1,1\n", "line 3: TIMESTAMP: exp"),
        ("a.csv", f"{HEAD}2023-11-16 18:15:45,1,1\n", "line 3: TIMESTAMP: is before the first"),
        (
            "a.csv",
            f"{HEAD}2023-11-16 18:15:45,1,1\n",
            "line 3: TIMESTAMP: .*: sort the lines by it",
        ),
        ("a.csv", "t,ContextTokens,GeneratedTokens\n1,1,1\n", "line 2: TIMESTAMP: is missing"),
        ("m.jsonl", row_of() + row_of(input_length=math.inf), "line 2: input_length: expected"),
        ("m.jsonl", row_of(output_length=1.5), "line 1: output_length: expected a whole number"),
        ("m.jsonl", row_of(output_length=-1), "line 1: output_length: expected a whole number"),
        ("m.jsonl", row_of(output_length=[[[0]]]), "line 1: output_length: expected a whole num"),
        ("m.jsonl", row_of(input_length=10**400), "line 1: input_length: expected a whole num"),
        ("m.jsonl", row_of(timestamp=10**400), "line 1: timestamp: expected milliseconds"),
        ("m.jsonl", row_of(timestamp=math.inf), "line 1: timestamp: expected milliseconds"),
        ("m.jsonl", row_of(timestamp="soon"), r"line 1: timestamp: .* \(got 'soon'\)"),
        ("m.jsonl", row_of(hash_ids=5), r"line 1: hash_ids: expected whole .* \(got 5\)"),
        ("m.jsonl", row_of(hash_ids=[0, math.inf]), "line 1: hash_ids: expected whole numbers"),
        ("m.jsonl", row_of(input_length=40, hash_ids=[0, 1, 2]), "line 1: hash_ids: expected 1 id"),
        ("m.jsonl", row_of(chat_id=5, timestamp=-1), "line 1: timestamp: expected seconds from 0"),
        ("m.jsonl", "[" * 100_000, "line 1: is no JSON: "),
        ("m.jsonl", "[1]\n", "line 1: expected an object"),
    ],
)
def test_a_bad_field_is_one_short_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigurationError, match=f"--trace: {path}: {says}") as caught:
        read_trace(path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300 + len(str(path))


def test_bailians_lines_have_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    """Its names are Mooncake's, in which they would be milliseconds, and blocks of 512."""
    told = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1}
    rows = [
        row_of(**told, timestamp=61.5, input_length=40, output_length=7, hash_ids=[5, 6, 9]),
        row_of(**told, timestamp=63, input_length=33, output_length=8, hash_ids=[5, 6, 10]),
    ]
    assert read_trace(written(tmp_path, "qwen.jsonl", "".join(rows))) == [
        Shape(0.0, 40, 7, (5, 6, 9), num_block_tokens=16),
        Shape(1.5, 33, 8, (5, 6, 10), num_block_tokens=16),
    ]


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""


def test_burstgpts_requests_are_read_but_for_those_that_failed(tmp_path: Path) -> None:
    """Newer files have more columns, in between."""
    newer = BURSTGPT.replace("stamp,", "stamp,Session ID,Elapsed time,")
    newer = newer.replace(",ChatGPT", ",17,2.5,ChatGPT").replace(",GPT-4", ",,1.25,GPT-4")
    for text in (BURSTGPT, newer):
        shapes = read_trace(written(tmp_path, "b.csv", text))
        assert shapes == [Shape(0.0, 472, 18), Shape(113.5, 417, 276)]
    bad = BURSTGPT.replace("45.5", "soon")
    with pytest.raises(ConfigurationError, match="line 3: Timestamp: expected seconds from 0 on"):
        read_trace(written(tmp_path, "b.csv", bad))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.csv", AZURE),
        ("trace", AZURE),
        ("trace.jsonl", MOONCAKE),
        ("trace.json", MOONCAKE),
        ("trace", MOONCAKE),
    ],
)
def test_a_trace_is_read_however_it_was_saved(tmp_path: Path, name: str, text: str) -> None:
    """With a mark of the byte order, other ends of lines, some of them blank; or compressed."""
    plain = read_trace(written(tmp_path, name, text))
    spaced = text.replace("\n", "\r\n\r\n") + "\n"
    assert read_trace(written(tmp_path, name, f"\ufeff{spaced}")) == plain
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(packed) == plain
    for broken in (packed.read_bytes()[:-9], packed.read_bytes()[:12] + b"x" * 99, b"x"):
        packed.write_bytes(broken)
        with pytest.raises(ConfigurationError, match=f"--trace: {packed}: "):
            read_trace(packed)


def test_what_columns_there_are_is_told_of_one_that_is_missing(tmp_path: Path) -> None:
    """Without a head they are the first request's; with semicolons they are one."""
    for text in ("".join(AZURE.splitlines(keepends=True)[1:]), AZURE.replace(",", ";")):
        path = written(tmp_path, "a.csv", text)
        with pytest.raises(ConfigurationError, match=r"line 2: TIMESTAMP: is missing \(there are"):
            read_trace(path)
    assert (
        read_trace(written(tmp_path, "a.csv", AZURE.replace(",", ", ")))[0].num_prompt_tokens == 374
    )
