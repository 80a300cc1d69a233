"""Texts and chats become token ids, as the model wants them."""

import json
import math
from pathlib import Path

import pytest
from tokenizers import processors

from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingOptions
from diptych.text.chat_template import ChatTemplate, Message
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import inference_pb2
from router.frontend import validation
from router.generation.request import ChatPrompt, GenerationRequest, TextPrompt
from tests.text_models import byte_level_tokenizer, write_folder
from tests.unit.router.frontend.asked import MAX_LEN, chat, facts, read, tool_call


def test_hopelessly_long_text_is_refused_without_tokenising(tokenizer: Tokenizer) -> None:
    request = inference_pb2.GenerateRequest(text="diptych " * 131_072)
    with pytest.raises(InvalidRequestError) as caught:
        validation.tokenize(read(request), tokenizer, MAX_LEN)
    assert caught.value.field == "text"
    assert "or more" in caught.value.message


def test_hopelessly_long_chat_is_not_even_rendered_where_contents_are_inert(tmp_path: Path) -> None:
    template = "{{ raise_exception('it was rendered') }}"
    write_folder(tmp_path, byte_level_tokenizer(), chat_template=template)
    tokenizer = Tokenizer(tmp_path, inert_contents=True)
    said = [("user", "<a" * 65_536), ("assistant", "</s>" * 65_536)]
    for turns, says in ((said, "or more"), (said[:1], "it was rendered")):
        with pytest.raises(InvalidRequestError, match=says) as caught:
            validation.tokenize(read(chat(*turns)), tokenizer, 30_000)
        assert caught.value.field == "chat.messages"
    half = GenerationRequest(prompt=ChatPrompt(messages=(Message("user", "\ud800"),)), num_bytes=1)
    with pytest.raises(InvalidRequestError, match=r"U\+D800"):
        validation.tokenize(half, tokenizer, MAX_LEN)


def test_text_is_tokenised_as_the_model_wants(tokenizer: Tokenizer) -> None:
    request = inference_pb2.GenerateRequest(text="hello")
    prompt = validation.tokenize(read(request), tokenizer, MAX_LEN)
    assert prompt.token_ids == tokenizer.encode("hello")


def test_a_text_that_goes_on_has_no_begin(tmp_path: Path) -> None:
    raw = byte_level_tokenizer()
    begin = raw.token_to_id("<s>")
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    tokenizer = write_folder(tmp_path, raw)
    begins, goes_on = (
        GenerationRequest(
            prompt=TextPrompt("hello", is_continuation=is_continuation),
            sampling=SamplingOptions(),
            num_bytes=5,
        )
        for is_continuation in (False, True)
    )
    rest = validation.tokenize(goes_on, tokenizer, MAX_LEN).token_ids
    assert validation.tokenize(begins, tokenizer, MAX_LEN).token_ids == [begin, *rest]


def test_a_text_that_is_continued_has_no_end(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), add_eos_token=True)
    plain = tokenizer.encode("hello", add_special=False)
    for is_continued in (False, True):
        prompt = TextPrompt("hello", is_continued=is_continued)
        request = GenerationRequest(prompt=prompt, sampling=SamplingOptions(), num_bytes=5)
        ids = validation.tokenize(request, tokenizer, MAX_LEN).token_ids
        assert ids == (plain if is_continued else [*plain, 1])


def test_a_token_that_the_model_lacks_is_refused_by_the_prompts_name(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocab_size"] -= 1  # without "added token"
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ("hello", "added  token"):
        validation.tokenize(read(inference_pb2.GenerateRequest(text=text)), tokenizer, MAX_LEN)
    for asked, field in (
        (inference_pb2.GenerateRequest(text="an added token"), "text"),
        (chat(("user", "an added token")), "chat.messages"),
    ):
        with pytest.raises(InvalidRequestError, match="has 'added token', token ") as caught:
            validation.tokenize(read(asked), tokenizer, MAX_LEN)
        assert caught.value.field == field
    with pytest.raises(InvalidRequestError, match="added token") as caught:
        validation.tokenize_bad_words(["no", "added token"], tokenizer)
    assert caught.value.field == "sampling.bad_words[1]"


def test_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    ids = validation.tokenize(read(chat(("user", "hi"))), tokenizer, MAX_LEN).token_ids
    text = tokenizer.render_chat([Message("user", "hi")]).text
    assert ids == tokenizer.encode(text, add_special=False)


def test_parts_of_a_message_are_joined() -> None:
    request = chat(("user", "a "), ("assistant", "c"))
    request.chat.messages[0].content.add(text="b")
    prompt = read(request).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (Message("user", "a b"), Message("assistant", "c"))


def test_half_of_a_character_is_refused_before_the_tokenizer(tokenizer: Tokenizer) -> None:
    request = GenerationRequest(prompt=TextPrompt("a\ud800"), num_bytes=1)
    with pytest.raises(InvalidRequestError, match=r"U\+D800") as caught:
        validation.tokenize(request, tokenizer, MAX_LEN)
    assert caught.value.field == "text"


def test_tool_calls_and_template_arguments_reach_the_template() -> None:
    request = tool_call("get", '{"x": 1}')
    request.chat.messages.add(role="tool", tool_call_id="1").content.add(text="2")
    request.chat.template_arguments.update({"depth": 3, "deep": True, "more": {"a": [1.5, None]}})
    prompt = read(request).prompt
    assert isinstance(prompt, ChatPrompt)
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.name }} {{ c.function.arguments.x }}"
        "{% endfor %}{{ m.tool_call_id }}{{ m.content }} {% endfor %}"
        "{{ depth }} {{ deep }} {{ more.a }}",
        {},
    )
    text = template.render(prompt.messages, prompt.template_arguments)
    assert text == "assistant get 1 tool12 3 True [1.5, None]"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_template_argument_that_no_json_can_say_is_refused(number: float) -> None:
    request = chat(("user", "a"))
    request.chat.template_arguments.update({"more": {"depth": [number]}})
    with pytest.raises(InvalidRequestError, match="no JSON text can say") as caught:
        validation.check(read(request), facts())
    assert caught.value.field == "chat.template_arguments"


def test_a_template_argument_cannot_replace_what_the_router_passes() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate("{{ messages }}", {}).render([Message("user", "a")], {"messages": []})
    assert caught.value.field == "chat.template_arguments.messages"
