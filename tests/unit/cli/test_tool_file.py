"""Tools from a file, and how their calls and what came of them are part of a conversation."""

from pathlib import Path

import pytest

from diptych.cli.conversation import Conversation
from diptych.cli.tool_file import Calls, read_tools, shown_call
from diptych.client import SamplingOptions, ToolChoice
from diptych.errors import InvalidRequestError
from diptych.v1 import inference_pb2

FUNCTION = '{"name": "clock", "description": "the time", "parameters": {"type": "object"}}'
CALL = inference_pb2.ToolCall(id="1", name="clock", arguments='{"a":\n "  é"}')


@pytest.mark.parametrize(
    "said", [f"[{FUNCTION}]", f'[{{"type": "function", "function": {FUNCTION}}}]']
)
def test_a_function_is_read_bare_and_in_openais_form(tmp_path: Path, said: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(said)
    tools = read_tools(path, Calls.REQUIRED)
    assert tools is not None
    (tool,) = tools.tools
    assert (tool.name, tool.description, tool.parameters) == (
        "clock",
        "the time",
        {"type": "object"},
    )
    assert tools.choice is ToolChoice.REQUIRED
    assert read_tools(None, Calls.AUTO) is None


@pytest.mark.parametrize(
    "said",
    [
        "{",
        "{}",
        '[{"description": "a"}]',
        '[{"name": "a", "b": 1}]',
        '[{"name": "a", "parameters": {"maximum": 9223372036854775807}}]',
        '[{"name": "a", "parameters": {"maximum": NaN}}]',
    ],
)
def test_what_is_no_list_of_functions_names_the_flag(tmp_path: Path, said: str) -> None:
    path = tmp_path / "tools.json"
    with pytest.raises(InvalidRequestError) as missing:
        read_tools(path, Calls.AUTO)
    path.write_text(said)
    with pytest.raises(InvalidRequestError) as wrong:
        read_tools(path, Calls.AUTO)
    assert missing.value.field == wrong.value.field == "--tools"


def test_a_call_is_shown_in_one_line() -> None:
    assert shown_call(CALL) == 'clock({"a": "  é"})'


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", ""),
        ('{"x":', '{"x":'),
        ('{"a":\t \r\n1e999}', '{"a": 1e999}'),
        ('{"a":12345678901234567891}', '{"a":12345678901234567891}'),
        ('{"a":' + "1" * 5000 + "}", '{"a":' + "1" * 5000 + "}"),
        ("[" * 100_000, "[" * 100_000),
        (r'{"a":"\ud800"}', r'{"a":"\ud800"}'),
        ('"\x1b[31m\x9b31m\x7f\u202e\u2028\U000e0001"',
         r'"\u001b[31m\u009b31m\u007f\u202e\u2028\udb40\udc01"'),
    ],
)  # fmt: skip
def test_whatever_a_model_calls_is_shown_and_nothing_of_it_obeyed(
    arguments: str, shown: str
) -> None:
    call = inference_pb2.ToolCall(id="1", name="f\x1b]0;own\x07\n", arguments=arguments)
    assert shown_call(call) == rf"f\u001b]0;own\u0007 ({shown})"


def test_what_is_called_for_one_line_is_not_insisted_on_after_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(f"[{FUNCTION}]")
    tools = read_tools(path, Calls.REQUIRED)
    conversation = Conversation("m", "", SamplingOptions(), tools)
    assert conversation.request("when?").chat.tool_choice == inference_pb2.TOOL_CHOICE_REQUIRED
    conversation.answered("when?", "", None, [CALL])
    conversation.call_answered(CALL, "noon")
    asked = conversation.request(None).chat
    assert [turn.role for turn in asked.messages] == ["user", "assistant", "tool"]
    assert asked.messages[2].tool_call_id == "1"
    assert asked.tool_choice == inference_pb2.TOOL_CHOICE_UNSPECIFIED
    conversation.answered(None, "It is noon.", None)
    later = conversation.request("thanks").chat
    assert [turn.role for turn in later.messages][3:] == ["assistant", "user"]
    assert later.tool_choice == inference_pb2.TOOL_CHOICE_REQUIRED


def test_without_tools_none_can_be_required() -> None:
    with pytest.raises(InvalidRequestError, match="--tool-choice: goes with --tools"):
        read_tools(None, Calls.REQUIRED)
    assert read_tools(None, Calls.AUTO) is None
