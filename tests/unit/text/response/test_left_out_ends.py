"""Calls in XML whose ends a model left out, and values that speak of such ends."""

import json

import pytest

from diptych.text.response.families import AnswerForm, family
from diptych.text.response.patience import Patience
from tests.unit.text.response.parsing import parse, parse_in_pieces

TOOLS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}, "g": {}}
Calls = list[tuple[str, dict[str, str]]]


def qwen(name: str, *values: tuple[str, str]) -> str:
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<function={name}>\n{said}</function>"


def glm(name: str, *values: tuple[str, str]) -> str:
    said = "\n".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in values
    )
    return f"<tool_call>{name}\n{said}"


def read(form: AnswerForm, text: str, *, is_whole: bool = True) -> tuple[str, Calls]:
    parsed = parse_in_pieces(family(form.value), text, tools=TOOLS, is_whole=is_whole)
    assert parsed.reasoning == ""
    return parsed.content, [(call.name, json.loads(call.arguments)) for call in parsed.calls]


F_X, G_Y = qwen("f", ("a", "X")), qwen("g", ("b", "Y"))
X, Y = ("f", {"a": "X"}), ("g", {"b": "Y"})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{F_X}", "", [X]),
        (F_X, "", [X]),
        (f"{F_X}\n", "", [X]),
        (f"I'll check.\n\n{F_X}", "I'll check.", [X]),
        (f"{F_X}\n{G_Y}", "", [X, Y]),
        (f"<tool_call>\n{F_X}\n{G_Y}\n</tool_call>", "", [X, Y]),
        (f"<tool_call>\n{F_X}\n<tool_call>\n{G_Y}\n</tool_call>", "", [X, Y]),
        (f"{F_X}\nDone, I will wait.", "Done, I will wait.", [X]),
        (f"{F_X}\n</tool_call>\nDone.\n", "Done.\n", [X]),
        (f"{F_X}\n</too", "", [X]),
        ("<tool_call>\n<function=g>\n</function>", "", [("g", {})]),
        ("<function=g></function> so", "so", [("g", {})]),
        # The function's end is left out, or the value's, or all of them.
        ("<tool_call>\n<function=f>\n<parameter=a>\nX\n</parameter>\n</tool_call>", "", [X]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nX\n</parameter>\n</tool_call>\nok", "ok", [X]),
        ("<function=f>\n<parameter=a>\nX\n</parameter>\n" + G_Y, "", [X, Y]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nX\n</parameter>\n", "", [X]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nX\n</function>\n</tool_call>", "", [X]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nX\n</function>\n", "", [X]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nX\n</function>\n" + G_Y, "", [X, Y]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nX\n", "", [X]),
    ],
)
def test_qwens_calls_end_without_their_last_mark(text: str, content: str, calls: Calls) -> None:
    assert read(AnswerForm.QWEN_XML, text) == (content, calls)


@pytest.mark.parametrize(
    "value",
    [
        "Ends are </parameter> and </function>, also </tool_call> and <tool_call>.",
        "</function>",
        "<function=x>",
        "say <parameter=a> or\n<parameter=b> so",
        "a\n</parameter>\nb",
    ],
)
def test_a_value_of_qwens_with_an_end_may_speak_of_ends(value: str) -> None:
    text = f"<tool_call>\n{qwen('f', ('a', value), ('b', '1'))}\n</tool_call>"
    assert read(AnswerForm.QWEN_XML, text) == ("", [("f", {"a": value, "b": "1"})])


@pytest.mark.parametrize(
    "value",
    [
        "Ends are </arg_value> and </tool_call>, also <arg_value> and <arg_key>.",
        "a <arg_key>b</arg_key> <arg_value>X</arg_value> b </arg_value>.",
        "</tool_call> so",
    ],
)
def test_a_value_of_glms_with_an_end_may_speak_of_ends(value: str) -> None:
    text = glm("f", ("a", value), ("b", "1")) + "\n</tool_call>"
    assert read(AnswerForm.GLM, text) == ("", [("f", {"a": value, "b": "1"})])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (AnswerForm.QWEN_XML, "<function=f>\n<parameter=a>\nX\n</parameter>\nDone."),
        (AnswerForm.QWEN_XML, "<function=f>\n<parameter=a>\nX\n</function>\nDone."),
        (
            AnswerForm.QWEN_XML,
            "<function=f>\n<parameter=a>\nX\n</parameter>\nso\n<parameter=b>\nY\n</parameter>\n"
            "</function>",
        ),
        (AnswerForm.GLM, glm("f", ("a", "X")) + "\nDone."),
        (AnswerForm.GLM, glm("f", ("a", "X</tool_call>\nDone.")).removesuffix("</arg_value>")),
        (
            AnswerForm.GLM,
            f"{glm('f', ('a', 'X'))}\nso<arg_key>b</arg_key><arg_value>Y</arg_value></tool_call>",
        ),
        (
            AnswerForm.GLM,
            "<tool_call>f<arg_key>a</arg_key><arg_value>X<arg_key>b</arg_key>"
            "<arg_value>Y</arg_value></tool_call>",
        ),
    ],
)
def test_no_argument_has_what_comes_behind_its_end(form: AnswerForm, text: str) -> None:
    """Whether the model meant it so nobody knows: it is text."""
    content, calls = read(form, text)
    for _, arguments in calls:
        assert not any("<" in value or "Done" in value for value in arguments.values())
    assert calls or content == text


def test_a_call_within_a_value_is_not_read_as_half_of_it() -> None:
    value = f"So:\n<tool_call>\n{G_Y}\n</tool_call>\nis a call."
    content, calls = read(AnswerForm.QWEN_XML, f"<tool_call>\n{qwen('f', ('a', value))}")
    assert calls == []
    assert content.startswith("<tool_call>\n<function=f>\n<parameter=a>\nSo:")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (glm("f", ("a", "X")) + "\n" + glm("g", ("b", "Y")) + "\n</tool_call>", "", [X, Y]),
        (glm("f", ("a", "X")) + "\n<tool_call>g\n</tool_call>", "", [X, ("g", {})]),
        (glm("f", ("a", "X")) + "\n", "", [X]),
        (glm("f", ("a", "X")) + "\n</tool_call>\nok", "ok", [X]),
        (glm("f", ("a", "X")).removesuffix("</arg_value>"), "", [X]),
        (glm("f", ("a", "X")).removesuffix("</arg_value>") + "</tool_call>", "", [X]),
    ],
)
def test_glms_calls_end_without_their_last_mark(text: str, content: str, calls: Calls) -> None:
    assert read(AnswerForm.GLM, text) == (content, calls)


def test_a_call_that_was_cut_off_within_a_value_is_none() -> None:
    for end in range(len("<function=f>\n"), F_X.index("</function>")):
        assert read(AnswerForm.QWEN_XML, f"ok {F_X[:end]}", is_whole=False) == ("ok", [])
    call = glm("f", ("a", "X"))
    for end in range(call.index("</arg_key>"), len(call)):
        assert read(AnswerForm.GLM, f"ok {call[:end]}", is_whole=False) == ("ok", [])


@pytest.mark.parametrize(
    ("form", "head", "piece"),
    [
        (AnswerForm.QWEN_XML, "<function=f>\n", "<parameter=a>\nX\n</parameter>y\n"),
        (AnswerForm.QWEN_XML, "<function=f>\n<parameter=a>\n", "<parameter=b>\n</parameter>"),
        (AnswerForm.QWEN_XML, "<function=f>\n<parameter=a>\n", "\n<parameter=b>\n</parameter>"),
        (AnswerForm.QWEN_XML, "<function=f>\n<parameter=a>\n", "</function>\n"),
        (AnswerForm.GLM, "<tool_call>f", "<arg_key>a</arg_key><arg_value>X</arg_value>y"),
        (AnswerForm.GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>", "<arg_value></arg_value>"),
    ],
)
def test_many_ends_cost_little(form: AnswerForm, head: str, piece: str) -> None:
    patience = Patience(10)
    text = head + piece * 4000
    parse(family(form.value), [text], tools=TOOLS, patience=patience)
    patience.begin_piece()
    assert patience.left_s() > 9
