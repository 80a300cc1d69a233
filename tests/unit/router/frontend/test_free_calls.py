"""Calls in the place of an answer of a given form: where they may be, and by which mark."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.constraint import Constraint
from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingOptions
from diptych.text.chat_template import Message, Tool
from diptych.text.mark import Mark
from diptych.text.response.families import family
from router.frontend.free_calls import calls_beside
from router.frontend.served_model import ServedModel
from router.generation.request import ChatPrompt, GenerationRequest, TextPrompt, ToolChoice

CONSTRAINT = SamplingOptions(constraint=Constraint.regex("a+"))


def model(name: str | None) -> ServedModel:
    tokenizer = SimpleNamespace(added_tokens={"<tool_call>": 7})
    template = None if name is None else family(name)
    return cast(ServedModel, SimpleNamespace(response_template=template, tokenizer=tokenizer))


def chat(**said: Any) -> GenerationRequest:
    prompt = ChatPrompt((Message("user", "a"),), **said)
    return GenerationRequest(prompt=prompt, sampling=CONSTRAINT, num_bytes=0)


def test_a_mark_is_a_token_where_the_model_has_it() -> None:
    (mark,) = calls_beside(chat(tools=(Tool("f"),)), model("hermes"))
    assert mark == Mark.of("<tool_call>", {"<tool_call>": 7})
    assert mark[0].token_id == 7


@pytest.mark.parametrize("name", ["llama-json", "gpt-oss", "think", None])
def test_without_a_mark_nobody_could_tell_them_apart(name: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="no mark") as caught:
        calls_beside(chat(tools=(Tool("f"),)), model(name))
    assert caught.value.field == "sampling.constraint"


def test_where_there_are_none_nothing_is_asked_of_the_model() -> None:
    text = GenerationRequest(prompt=TextPrompt("a"), sampling=CONSTRAINT, num_bytes=0)
    none = chat(tools=(Tool("f"),), tool_choice=ToolChoice.NONE)
    forced = chat(tools=(Tool("f"),), tool_choice=ToolChoice.REQUIRED)
    for request in (text, chat(), none, forced):
        assert calls_beside(request, model(None)) == ()
