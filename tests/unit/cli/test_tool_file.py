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


@pytest.mark.parametrize("said", ["{", "{}", '[{"description": "a"}]', '[{"name": "a", "b": 1}]'])
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
