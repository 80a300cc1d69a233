"""Recorded traces: read, listed, converted, drawn; the example of the docs is what we say."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from diptych.cli.main import main
from diptych.cli.recorded_spans import read_spans
from diptych.cli.trace_tree import traces_of

DOCS = Path(__file__).parents[3] / "docs" / "trace"
EXAMPLE = DOCS / "request.otlp.jsonl"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(number: int, parent: int | None, start_ms: int, end_ms: int, **more: Any) -> Any:
    return {
        "traceId": TRACE.upper(),
        "spanId": f"{number:016x}",
        "parentSpanId": "" if parent is None else f"{parent:016x}",
        "name": f"span {number}",
        "kind": 1,
        "startTimeUnixNano": str(start_ms * 10**6),
        "endTimeUnixNano": str(end_ms * 10**6),
        **more,
    }


def export(service: str, *spans: Any) -> str:
    name = {"key": "service.name", "value": {"stringValue": service}}
    instance = {"key": "service.instance.id", "value": {"stringValue": "i1"}}
    scopes = [{"scope": {"name": "diptych"}, "spans": list(spans)}]
    resource = {"attributes": [name, instance]}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A client's request that failed over: the worker's span was exported before its parent."""
    tags = [
        {"key": "text", "value": {"stringValue": "a & b"}},
        {"key": "count", "value": {"intValue": "3"}},
        {"key": "part", "value": {"doubleValue": 0.5}},
        {"key": "is", "value": {"boolValue": False}},
        {"key": "all", "value": {"arrayValue": {"values": [{"stringValue": "x"}]}}},
    ]
    event = {"name": "retry", "timeUnixNano": "5000000", "attributes": tags[:1]}
    link = {"traceId": TRACE, "spanId": f"{2:016x}", "attributes": []}
    file = tmp_path / "spans.jsonl"
    lines = [
        export("worker", span(3, 2, 2, 4, attributes=tags)),
        "",
        export(
            "router",
            span(1, 99, 0, 10, kind=2, events=[event]),
            span(4, 1, 5, 9, links=[link]),
            span(2, 1, 1, 5, status={"code": 2, "message": "<LOST>"}),
        ),
    ]
    file.write_text("\n".join(lines))
    return file


def test_spans_lie_under_their_parents_in_the_order_in_which_they_began(recorded: Path) -> None:
    (trace,) = traces_of(read_spans(recorded.read_text().splitlines()))
    assert trace.trace_id == TRACE
    assert [(row.span.name, row.depth) for row in trace.rows] == [
        ("span 1", 0),
        ("span 2", 1),
        ("span 3", 2),
        ("span 4", 1),
    ]


def test_what_others_called_their_spans_breaks_neither_the_list_nor_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [
        {"key": f"number {index}", "value": {"doubleValue": value}}
        for index, value in enumerate(("NaN", "-Infinity", 0.5))
    ]
    status = {"code": 2, "message": "went\nwrong\x1b[2J"}
    odd = span(1, None, 0, 5, name="\x1b]0;mine\x07", attributes=numbers, status=status)
    path, jaeger, svg = (tmp_path / name for name in ("t.jsonl", "jaeger.json", "t.svg"))
    path.write_text(export("its\x00", odd))
    assert main(["trace", str(path), "--jaeger", str(jaeger), "--svg", str(svg)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == rf"{TRACE} \u001b]0;mine\u0007 5.0 ms, 1 spans went wrong\u001b[2J"
    texts = {text.text for text in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"its?", "?]0;mine?: went\nwrong?[2J"} <= texts
    told = json.loads(jaeger.read_text(), parse_constant=pytest.fail)
    tags = {tag["key"]: tag["value"] for tag in told["data"][0]["spans"][0]["tags"]}
    assert [tags[f"number {index}"] for index in range(3)] == ["nan", "-inf", 0.5]


@pytest.mark.parametrize("parents", [[1], [2, 1], [None, 3, 4, 2, 4]])
def test_spans_that_are_above_themselves_are_shown_once_all_the_same(
    parents: list[int | None],
) -> None:
    spans = [span(number, parent, number, 9) for number, parent in enumerate(parents, start=1)]
    (trace,) = traces_of(read_spans([export("router", *spans)]))
    names = [row.span.name for row in trace.rows]
    assert sorted(names) == [f"span {number}" for number in range(1, len(parents) + 1)]


def test_jaeger_gets_every_span_with_its_process_parent_and_link(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "jaeger.json"
    assert main(["trace", str(recorded), "--jaeger", str(out)]) == 0
    assert capsys.readouterr().out == f"{TRACE} span 1 10.0 ms, 4 spans\n"
    (data,) = json.loads(out.read_text())["data"]
    assert data["traceID"] == TRACE
    spans = {each["operationName"]: each for each in data["spans"]}
    services = {
        name: data["processes"][each["processID"]]["serviceName"] for name, each in spans.items()
    }
    assert services == {
        "span 1": "router", "span 2": "router", "span 4": "router", "span 3": "worker"
    }  # fmt: skip
    assert (spans["span 4"]["startTime"], spans["span 4"]["duration"]) == (5000, 4000)
    references = [(each["refType"], each["spanID"]) for each in spans["span 4"]["references"]]
    assert references == [("CHILD_OF", f"{1:016x}"), ("FOLLOWS_FROM", f"{2:016x}")]
    (log,) = spans["span 1"]["logs"]
    assert log["timestamp"] == 5000
    assert {each["key"]: each["value"] for each in log["fields"]} == {
        "event": "retry", "text": "a & b"
    }  # fmt: skip
    tags = {each["key"]: (each["type"], each["value"]) for each in spans["span 3"]["tags"]}
    assert tags == {
        "text": ("string", "a & b"),
        "count": ("int64", 3),
        "part": ("float64", 0.5),
        "is": ("bool", False),
        "all": ("string", "['x']"),
        "span.kind": ("string", "internal"),
    }
    failed = {each["key"]: each["value"] for each in spans["span 2"]["tags"]}
    assert (failed["error"], failed["otel.status_description"]) == (True, "<LOST>")


def test_a_picture_has_a_line_and_a_bar_for_each_span(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.svg"
    assert main(["trace", str(recorded), "--svg", str(out), "--trace-id", TRACE[:5]]) == 0
    texts = [element.text for element in ElementTree.parse(out).iter() if element.text]
    names = [text for text in texts if text.startswith("span")]
    assert names == ["span 1", "span 2: <LOST>", "span 3", "span 4"]
    assert {"router", "worker", "10.00 ms", "4.00 ms"} <= set(texts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1: : Invalid JSON"),
        ("{}", "line 1: resourceSpans: Field required"),
        (export("a", span(1, None, 0, 1, traceId="12")), "resourceSpans.0.*traceId"),
        (export("a", span(1, None, 0, 1, startTimeUnixNano="x")), "startTimeUnixNano"),
        ("", "no such trace"),
    ],
)
def test_what_is_no_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_text(text)
    assert main(["trace", str(file)]) == 2
    told = capsys.readouterr().err
    assert str(file) in told
    for part in why.split(".*"):
        assert part in told


def test_a_line_ends_where_the_file_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON may have what readers of text take for the end of a line."""
    file, svg = tmp_path / "spans.jsonl", tmp_path / "trace.svg"
    line = json.loads(export("a", span(1, None, 0, 1, name="é\u2028\x85b")))
    file.write_text(f"{json.dumps(line, ensure_ascii=False)}\r\n", encoding="utf-8", newline="")
    assert main(["trace", str(file), "--svg", str(svg)]) == 0
    assert "1 spans" in capsys.readouterr().out
    assert "é\u2028" in svg.read_text(encoding="utf-8")


def test_a_line_that_is_still_written_is_not_there_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole = tmp_path / "spans.jsonl", export("a", span(1, None, 0, 1)).encode()
    another = json.dumps(json.loads(export("a", span(2, 1, 0, 1, name="é"))), ensure_ascii=False)
    torn = another.encode()
    for end in (1, len(torn) // 2, torn.index("é".encode()) + 1, len(torn) - 1):
        file.write_bytes(whole + b"\n" + torn[:end])
        assert main(["trace", str(file)]) == 0
        assert "1 spans" in capsys.readouterr().out
    file.write_bytes(whole + b"\n" + torn)
    assert main(["trace", str(file)]) == 0
    assert "2 spans" in capsys.readouterr().out, "nothing is left to be written of it"


@pytest.mark.parametrize("bad", [b'{"resourceSpans": [', b"\xff"])
@pytest.mark.parametrize("after", [b"\n", b"\n{"])
def test_a_line_that_is_bad_though_it_has_ended_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes, after: bytes
) -> None:
    file, whole = tmp_path / "spans.jsonl", export("a", span(1, None, 0, 1)).encode()
    file.write_bytes(whole + b"\n" + bad + after)
    assert main(["trace", str(file)]) == 2
    assert "line 2: : Invalid JSON" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_the_example_of_the_docs_is_what_the_tool_makes_of_it(tmp_path: Path) -> None:
    jaeger, svg = tmp_path / "jaeger.json", tmp_path / "request.svg"
    assert main(["trace", str(EXAMPLE), "--jaeger", str(jaeger), "--svg", str(svg)]) == 0
    assert jaeger.read_text() == (DOCS / "request.jaeger.json").read_text()
    assert svg.read_text() == (DOCS / "request.svg").read_text()


def test_the_example_of_the_docs_is_one_request_over_three_processes() -> None:
    (trace,) = traces_of(read_spans(EXAMPLE.read_text().splitlines()))
    services = {row.span.service for row in trace.rows}
    assert services == {"diptych-router", "diptych-prefill", "diptych-decode"}
    assert [row.depth for row in trace.rows].count(0) == 1
