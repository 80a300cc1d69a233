"""The ids of an answer's calls."""

from types import SimpleNamespace
from typing import cast

from diptych.text.chat_template import Message, Tool, ToolCall
from diptych.text.response.families import family
from diptych.text.response.template import CallIdForm
from router.frontend.served_model import ServedModel
from router.frontend.split_answers import CallIds, split_of
from router.generation.request import ChatPrompt, GenerationRequest, ToolChoice
from router.request.resolved import ResolvedRequest


def test_a_call_has_the_same_id_where_its_answer_is_resumed() -> None:
    first, again = CallIds("r 7 0", (1, 2)), CallIds("r 7 0", [1, 2])
    ids = [first.next("f"), first.next("f")]
    assert ids == [again.next("f"), again.next("g")]
    others = (CallIds("r 7 1", (1, 2)), CallIds("r 7 0", (1, 3)))
    assert len({*ids, *(each.next("f") for each in others)}) == 4


def test_ids_look_as_the_models_chat_template_wants_them() -> None:
    short = CallIds("r 7 0", (1, 2), CallIdForm.SHORT)
    ids = [short.next("f"), short.next("f")]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    numbered = CallIds("r 7 0", (1, 2), CallIdForm.NUMBERED, num_before=3)
    assert [numbered.next("f"), numbered.next("g")] == ["functions.f:3", "functions.g:4"]


def test_calls_that_are_insisted_on_go_on_with_the_chats_numbers() -> None:
    said = Message("assistant", "", tool_calls=(ToolCall("functions.f:0", "f", {}),))
    chat = ChatPrompt((said,), tools=(Tool("f", "", None),), tool_choice=ToolChoice.REQUIRED)
    shape = SimpleNamespace(prompt_ids=(1, 2))
    split = split_of(
        GenerationRequest(prompt=chat, num_bytes=0),
        cast(ResolvedRequest, SimpleNamespace(shape=shape, thoughts=None, calls=())),
        cast(ServedModel, SimpleNamespace(response_template=family("kimi-k2"))),
        "r 7 0",
    )
    assert split is not None
    called = split.add('[{"name": "f", "arguments": {}}').tool_calls
    assert [each.call_id for each in called] == ["functions.f:1"]
