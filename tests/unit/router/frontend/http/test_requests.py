"""Bodies of the HTTP API become plain requests, or are refused by the name of a member."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from diptych.errors import InvalidRequestError
from diptych.request_class import RequestClass
from diptych.sampling_params import OPTIONS, SamplingOptions
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.text.chat_template import Message, Tool, ToolCall
from router.frontend.field_names import renamed
from router.frontend.http import unserved
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.chat_request import read_chat
from router.frontend.http.completion_request import read_completion
from router.frontend.http.sampling_fields import SERVED, read_sampling
from router.frontend.tools import MAX_TOOLS
from router.frontend.validation import MAX_MESSAGES, MAX_PARTS
from router.generation.request import ChatPrompt, TextPrompt, TokenPrompt, ToolChoice

MAX_LEN = 100
ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=MAX_LEN)
TURN = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def completion(**members: Any) -> Asked:
    return read_completion({"model": "m", "prompt": "p", **members}, ENVELOPE)


def chat(**members: Any) -> Asked:
    return read_chat({"model": "m", "messages": [TURN], **members}, ENVELOPE)


def refusal(content: Mapping[str, object], *, is_chat: bool = False) -> InvalidRequestError:
    read = read_chat if is_chat else read_completion
    with pytest.raises(InvalidRequestError) as caught:
        read(content, ENVELOPE)
    return caught.value


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_empty_name_names_no_model(*, is_chat: bool) -> None:
    content = {"model": "", "prompt": "p"} | ({"messages": [TURN]} if is_chat else {})
    assert refusal(content, is_chat=is_chat).field == "model"


def test_every_declared_parameter_is_read_under_its_name() -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "logprobs": 4,
        "prompt_logprobs": 5,
        "n": 3,
        "best_of": 4,
        "logit_bias": {"5": -100, "6": 0.5},
        "seed": 2**64 - 1,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [7, 8],
        "include_stop_str_in_output": True,
        "bad_words": ["c", "d e"],
        "ignore_eos": True,
    }
    assert set(values) == SERVED, "a parameter was added: say here what it is over HTTP"
    expected = {
        **values,
        "logit_bias": {5: -100.0, 6: 0.5},
        "bad_words": ("c", "d e"),
        "stop": ("a", "b"),
        "stop_token_ids": (7, 8),
    }
    assert read_sampling(values) == SamplingOptions(**expected)
    assert read_sampling(dict.fromkeys(values)) == SamplingOptions()


# The members of vLLM's and SGLang's bodies beside OpenAI's own: those that are refused where
# they change an answer, and those that change none here, for the reason above them.
OF_OTHERS = [
    "add_special_tokens",
    "allowed_token_ids",
    "best_of",
    "custom_logit_processor",
    "custom_params",
    "echo",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "lora_path",
    "no_stop_trim",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
    "return_cached_tokens_details",
    "return_hidden_states",
    "return_routed_experts",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "extra_key",
    "session_params",
    "skip_special_tokens",
    "stop_regex",
    "structural_tag",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "guided_whitespace_pattern",
    "no_repeat_ngram_size",
    "typical_p",
    "use_beam_search",
    "vllm_xargs",
]
OF_OTHER_CHATS = [
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "documents",
    "include_reasoning",
    "input_ids",
    "separate_reasoning",
    "stream_reasoning",
]


@pytest.mark.parametrize("name", OF_OTHERS)
def test_detail_23_what_changes_an_answer_elsewhere_is_refused_here(name: str) -> None:
    assert refusal({"model": "m", "prompt": "p", name: "asked"}).field == name
    if name != "prompt_embeds":
        content = {"model": "m", "messages": [TURN], name: "asked"}
        assert refusal(content, is_chat=True).field == name


def test_all_tokens_are_said_as_elsewhere_too() -> None:
    assert completion(top_k=-1).request.sampling.top_k == 0


def test_what_is_for_one_choice_alone_is_refused_for_several() -> None:
    several = {"model": "m", "prompt": "p", "n": 2}
    assert refusal({**several, "echo": True}).field == "echo"
    counted = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**several, "stream": True, "stream_options": counted}
    assert refusal(asked).field == "stream_options.continuous_usage_stats"


def test_counts_along_a_stream_need_the_prompts_tokens() -> None:
    counted = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=counted).request.return_prompt_token_ids
    assert not completion(stream=True).request.return_prompt_token_ids


def test_choices_that_are_drawn_and_not_told_count_too() -> None:
    several = {"model": "m", "prompt": ["a"] * 64, "n": 1}
    assert len(completion(**{**several, "best_of": 2}).others) == 63
    assert refusal({**several, "best_of": 3}).field == "prompt"


@pytest.mark.parametrize("name", OF_OTHER_CHATS)
def test_detail_23_what_changes_a_chat_elsewhere_is_refused_here(name: str) -> None:
    content = {"model": "m", "messages": [TURN], name: "asked"}
    assert refusal(content, is_chat=True).field == name


@pytest.mark.parametrize(
    "name",
    [
        # Ids, labels and the ways of their own clusters.
        *("request_id", "rid", "user", "custom_labels", "data_parallel_rank"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        # How to read pictures and grammars, which are refused themselves.
        *("mm_processor_kwargs", "media_io_kwargs"),
        # Between special tokens, which no text here has.
        "spaces_between_special_tokens",
    ],
)
def test_what_changes_nothing_here_is_passed_over(name: str) -> None:
    assert completion(**{name: "asked"}) == completion()
    assert chat(**{name: "asked"}) == chat()


def test_openais_own_verbosity_is_no_refusal() -> None:
    assert chat(verbosity="medium") == chat()
    assert (
        refusal({"model": "m", "messages": [TURN], "verbosity": "low"}, is_chat=True).field
        == "verbosity"
    )


def test_nothing_is_served_and_refused() -> None:
    for table in (unserved.OF_COMPLETION, unserved.OF_CHAT):
        assert not SERVED & set(table)
        assert set(OPTIONS) <= SERVED | set(table)


def test_the_service_level_is_read_by_its_fields_names() -> None:
    wanted = ServiceLevel(RequestClass.REALTIME, 500, 40.5)
    said = {"priority": "realtime", "ttft_ms": 500, "tpot_ms": 40.5}
    assert set(said) == set(ServiceLevel._fields)
    assert completion(**said).request.level == chat(**said).request.level == wanted
    assert completion(priority=0, ttft_ms=None).request.level == NO_LEVEL, "other servers' default"


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 1), ("priority", False), ("priority", 0.0), ("ttft_ms", "5"), ("tpot_ms", True)],
)
def test_a_service_level_that_says_something_else_is_refused(name: str, value: object) -> None:
    assert refusal({"model": "m", "prompt": "p", name: value}).field == name
    assert refusal({"model": "m", "messages": [TURN], name: value}, is_chat=True).field == name


def test_a_completion() -> None:
    asked = completion(
        stop="x", cache_salt="s", stream=True, stream_options={"include_usage": True}
    )
    assert asked.request.prompt == TextPrompt("p")
    assert asked.request.sampling == SamplingOptions(max_tokens=16, stop=("x",))
    assert (asked.request.model, asked.request.request_id) == ("m", "r")
    assert (asked.request.cache_salt, asked.request.num_bytes) == ("s", 9)
    assert (asked.is_stream, asked.includes_usage) == (True, True)
    assert (completion().is_stream, completion().includes_usage) == (False, False)
    for given, expected in (
        ([1, 2], TokenPrompt([1, 2])),
        ([[1, 2]], TokenPrompt([1, 2])),
        (["a"], TextPrompt("a")),
        ([], TokenPrompt([])),
    ):
        assert completion(prompt=given).request.prompt == expected


def test_detail_16_what_is_not_said_is_left_to_the_models_makers() -> None:
    """The router fills it in, from what it logged of generation_config.json at its start."""
    assert chat().request.sampling == SamplingOptions()
    assert chat(temperature=None, top_p=None).request.sampling == SamplingOptions()


def test_detail_12_a_chat_asks_otherwise_for_log_probabilities() -> None:
    assert chat(logprobs=True, top_logprobs=4).request.sampling.logprobs == 4
    assert chat(logprobs=True).request.sampling.logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).request.sampling.logprobs is None
    assert chat(logprobs=True).names["sampling.logprobs"] == "top_logprobs"
    assert completion(logprobs=0).request.sampling.logprobs == 0
    assert refusal({"model": "m", "prompt": "p", "logprobs": True}).field == "logprobs"


def test_what_a_model_refused_is_what_it_said() -> None:
    """As OpenAI's types have it in a history."""
    parts = [{"type": "refusal", "refusal": "I cannot"}, {"type": "text", "text": " now"}]
    asked = chat(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    )
    assert isinstance(asked.request.prompt, ChatPrompt)
    assert asked.request.prompt.messages[1] == Message("assistant", "I cannot now")
    message = {"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}
    assert (
        refusal({"model": "m", "messages": [message]}, is_chat=True).field
        == "messages[0].content[0].refusal"
    )
    message["role"] = "user"
    assert (
        refusal({"model": "m", "messages": [message]}, is_chat=True).field
        == "messages[0].content[0].type"
    )


def test_a_chat() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    asked = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        ],
        chat_template_kwargs={"enable_thinking": False},
        cache_salt="s",
    )
    assert asked.request.cache_salt == "s"
    assert asked.request.prompt == ChatPrompt(
        (Message("system", "be brief"), Message("user", "a b"), Message("assistant", "c")),
        {"enable_thinking": False},
        is_split=True,
    )
    assert asked.request.sampling == SamplingOptions()
    assert chat(max_tokens=5).request.sampling.max_tokens == 5
    both = chat(max_tokens=5, max_completion_tokens=3)
    assert both.request.sampling.max_tokens == 3
    assert both.names["sampling.max_tokens"] == "max_completion_tokens"


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer", "tool"])
def test_who_speaks_is_told_to_the_template(role: str) -> None:
    asked = chat(messages=[{**TURN, "role": role, "name": "ann"}])
    assert isinstance(asked.request.prompt, ChatPrompt)
    assert asked.request.prompt.messages[0].for_template()["name"] == "ann"


def test_a_chat_with_tools_and_what_they_answered() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    asked = chat(
        messages=[
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
        ],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
    )
    assert asked.request.prompt == ChatPrompt(
        (
            Message("assistant", "", (ToolCall("1", "f", {"x": 1}),), reasoning="r"),
            Message("tool", "2", tool_call_id="1", name="f"),
        ),
        tools=(Tool("f", "d", {"type": "object"}),),
        tool_choice=ToolChoice.REQUIRED,
        required_tool="f",
        has_parallel_calls=False,
        is_split=True,
    )
    other = chat(messages=[{"role": "assistant", "content": "c", "reasoning": "vLLM's newer name"}])
    assert isinstance(other.request.prompt, ChatPrompt)
    assert other.request.prompt.messages[0].reasoning == "vLLM's newer name"
    for name in ("reasoning_content", "reasoning"):
        only = chat(messages=[{"role": "assistant", "content": None, name: "r"}, TURN])
        assert isinstance(only.request.prompt, ChatPrompt)
        assert only.request.prompt.messages[0] == Message("assistant", "", reasoning="r")
        for turn in ({"role": "user", name: "r"}, {"role": "assistant", name: ""}):
            error = refusal({"model": "m", "messages": [turn]}, is_chat=True)
            assert error.message == "messages[0].content: is required"
    wrong = InvalidRequestError("is there twice", field="chat.tools[1].name")
    assert renamed(wrong, chat(tools=[TOOL, TOOL]).names).field == "tools[1].function.name"
    wrong = InvalidRequestError("is none", field="chat.required_tool")
    assert renamed(wrong, asked.names).field == "tool_choice.function.name"


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a", 1]}, "bad_words[1]"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"best_of": True}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": True}, "n"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[5]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"return_margins": True}, "return_margins"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": []}, "response_format"),
        ({"constraint": {"regex": "a"}}, "constraint"),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_is_wrong_or_not_served_is_named(
    members: dict[str, Any], field: str, is_chat: bool
) -> None:
    content = {"model": "m", "prompt": "p", "messages": [TURN], **members}
    error = refusal(content, is_chat=is_chat)
    assert error.field == field
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"messages": [TURN] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [{**TURN, "content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}]},
         "messages[0].content"),
        ({"messages": [{**TURN, "content": [{"type": "text", "text": ""}] * MAX_PARTS}, TURN]},
         "messages"),
        ({"messages": [{**TURN, "role": "function"}]}, "messages[0].role"),
        ({"messages": [{**TURN, "content": None}]}, "messages[0].content"),
        ({"messages": [{**TURN, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [5]}, "messages[0]"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": "3"}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[1].function.parameters"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
         "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
         "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
          "arguments": '{"a": NaN}'}}]}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
          "arguments": "[1]"}}]}]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_chat_is_named(members: dict[str, Any], field: str) -> None:
    assert refusal({"model": "m", "messages": [TURN], **members}, is_chat=True).field == field


@pytest.mark.parametrize(
    ("members", "field", "num_reasons"),
    [
        ({"messages": [{"role": "user", "content": [{}] * 50}]}, "messages[0].content[0].type", 1),
        ({"messages": [5] * 50}, "messages[0]", 1),
        ({"prompt": ["a", *[5] * 50]}, "prompt[1]", None),
        ({"prompt": [5, *["a"] * 50]}, "prompt[1]", 1),
        ({"prompt": "p", "stop": [5] * 17}, "stop", None),
    ],
)
def test_no_work_is_spent_after_the_first_error(
    members: dict[str, Any], field: str, num_reasons: int | None
) -> None:
    """A body of megabytes may be wrong in every part: the first is what is told.

    ``num_reasons``: those that were found; None: nothing looked at more than that field.
    """
    error = refusal({"model": "m", **members}, is_chat="messages" in members)
    reasons = error.__context__
    assert error.field == field
    found = reasons.error_count() if isinstance(reasons, ValidationError) else None
    assert found == num_reasons


@pytest.mark.parametrize("nest", [lambda ids: ids, lambda ids: [ids]])
def test_a_prompt_that_is_too_long_is_refused_before_its_items_are_looked_at(
    nest: Callable[[list[object]], list[object]],
) -> None:
    """Of such items each would be an error of its own, or take its time where it is none."""
    error = refusal({"model": "m", "prompt": nest([-1.5] * MAX_LEN)})
    assert error.message == (
        "prompt: This model's maximum context length is 100 tokens: this has 100; "
        "at most 99 leave room for an answer"
    )


def test_lists_that_are_null_are_left_out() -> None:
    """As openai's client sends back a message that it was answered with."""
    turn = {"role": "assistant", "content": "c"}
    said = chat(messages=[TURN, {**turn, "tool_calls": None}], tools=None, stop=None)
    assert said == chat(messages=[TURN, turn])


def test_detail_23_what_changes_nothing_is_no_refusal() -> None:
    void = dict.fromkeys(unserved.OF_CHAT)
    assert chat(**void, user="u", metadata={"a": 1}, seed=None) == chat()
    same = {name: values[0] for name, values in unserved.OF_CHAT.items() if values}
    assert chat(**same).request == chat().request
    same = {name: values[0] for name, values in unserved.OF_COMPLETION.items() if values}
    assert completion(**same).request == completion().request
