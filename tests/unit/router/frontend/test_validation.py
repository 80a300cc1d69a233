"""Every bad value is refused by the path of its field; every good one is resolved."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from diptych.constraint import OutputGrammar
from diptych.errors import InvalidRequestError
from diptych.sampling_params import (
    WORKER_NAMES,
    SamplingOptions,
    SamplingParams,
)
from diptych.text.chat_template import Message, ToolCall
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import inference_pb2
from router.frontend import validation
from router.frontend.checked_form import CheckedForm
from router.frontend.validation import EncodedPrompt, ModelFacts, recorded_id
from router.generation.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from router.request.prompt_told import WantedLogprobs
from router.request.resolved import ResolvedRequest
from tests.text_models import write_folder
from tests.unit.router.frontend.asked import (
    EOS,
    MAX_LEN,
    at,
    chat,
    facts,
    read,
    tokens,
    tool_call,
    tools,
)

UNKNOWN: Any = 9  # no class has that number
GRAMMAR = 'start: "a"'  # of any constraint


def resolve(
    message: inference_pb2.GenerateRequest, known: ModelFacts | None = None
) -> ResolvedRequest:
    request, known = read(message), known or facts()
    validation.check(request, known)
    words = frozenset((ord(word),) for word in request.sampling.bad_words)  # a letter is a token
    prompt = EncodedPrompt(list(message.tokens.ids))
    form = None if request.sampling.constraint is None else CheckedForm(GRAMMAR)
    return validation.resolve(request, prompt, known, drawn_seed=77, bad_words=words, form=form)


def test_with_a_constraint_any_stop_token_ends_but_stop_strings_wait() -> None:
    resolved = resolve(tokens(5, constraint={"regex": "a"}, min_tokens=3, max_tokens=9))
    assert (resolved.shape.min_tokens, resolved.min_tokens_to_stop) == (0, 3)
    assert resolved.sampling.min_tokens == 3
    free = resolve(tokens(5, min_tokens=3, max_tokens=9))
    assert (free.shape.min_tokens, free.min_tokens_to_stop) == (3, 3)


def test_a_model_without_an_end_has_no_constraints() -> None:
    endless = facts()._replace(eos_token_ids=frozenset())
    with pytest.raises(InvalidRequestError) as caught:
        resolve(tokens(5, constraint={"regex": "a"}), endless)
    assert caught.value.field == "sampling.constraint.regex"


def resumed(emitted: list[int], **sampling: object) -> inference_pb2.GenerateRequest:
    request = tokens(5, **sampling)
    request.emitted_token_ids.extend(emitted)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.GenerateRequest(), "prompt"),
        (inference_pb2.GenerateRequest(text=""), "text"),
        (tokens(), "tokens"),
        (tokens(5, 512), "tokens.ids[1]"),
        (chat(), "chat.messages"),
        (chat(("user", "hi"), ("", "there")), "chat.messages[1].role"),
        (chat(("r" * 65, "hi")), "chat.messages[0].role"),
        (tokens(5, temperature=-1.0), "sampling.temperature"),
        (tokens(5, temperature=101.0), "sampling.temperature"),
        (tokens(5, temperature=math.nan), "sampling.temperature"),
        (tokens(5, temperature=math.inf), "sampling.temperature"),
        (tokens(5, top_p=0.0), "sampling.top_p"),
        (tokens(5, top_p=1.01), "sampling.top_p"),
        (tokens(5, top_p=math.nan), "sampling.top_p"),
        (tokens(5, max_tokens=0), "sampling.max_tokens"),
        (tokens(5, max_tokens=MAX_LEN), "sampling.max_tokens"),
        (tokens(5, max_tokens=3, min_tokens=4), "sampling.min_tokens"),
        (tokens(5, min_tokens=MAX_LEN), "sampling.min_tokens"),
        (tokens(5, stop=["a", ""]), "sampling.stop[1]"),
        (tokens(5, stop=["a" * 1025]), "sampling.stop[0]"),
        (tokens(5, stop=["a"] * 17), "sampling.stop"),
        (tokens(5, stop_token_ids=[1] * 1025), "sampling.stop_token_ids"),
        (tokens(5, min_p=1.1), "sampling.min_p"),
        (tokens(5, presence_penalty=2.1), "sampling.presence_penalty"),
        (tokens(5, frequency_penalty=-2.1), "sampling.frequency_penalty"),
        (tokens(5, repetition_penalty=0.0), "sampling.repetition_penalty"),
        (tokens(5, logit_bias={5: 101.0}), "sampling.logit_bias[5]"),
        (tokens(5, logit_bias={5: 1.0, 512: 1.0}), "sampling.logit_bias[512]"),
        (tokens(5, logprobs=21), "sampling.logprobs"),
        (tokens(5, prompt_logprobs=21), "sampling.prompt_logprobs"),
        (tokens(5, n=17), "sampling.n"),
        (tokens(5, constraint={}), "sampling.constraint"),
        (tokens(5, constraint={"regex": "a"}, ignore_eos=True), "sampling.ignore_eos"),
        (tokens(5, best_of=17), "sampling.best_of"),
        (tokens(5, n=3, best_of=2), "sampling.best_of"),
        (inference_pb2.GenerateRequest(text="a", adapter="b"), "adapter"),
        (inference_pb2.GenerateRequest(text="a", priority=UNKNOWN), "priority"),
        (inference_pb2.GenerateRequest(text="a", ttft_ms=0), "ttft_ms"),
        (inference_pb2.GenerateRequest(text="a", ttft_ms=-1), "ttft_ms"),
        (inference_pb2.GenerateRequest(text="a", ttft_ms=0.0009), "ttft_ms"),
        (inference_pb2.GenerateRequest(text="a", tpot_ms=5e-321), "tpot_ms"),
        (inference_pb2.GenerateRequest(text="a", ttft_ms=math.nan), "ttft_ms"),
        (inference_pb2.GenerateRequest(text="a", tpot_ms=math.inf), "tpot_ms"),
        (inference_pb2.GenerateRequest(text="a", tpot_ms=9e7), "tpot_ms"),
        (
            inference_pb2.GenerateRequest(
                chat={"messages": [{"role": "user", "content": [{"text": "a"}, {}]}]}
            ),
            "chat.messages[0].content[1]",
        ),
        (tools("f", "f"), "chat.tools[1].name"),
        (tools("f", "f g"), "chat.tools[1].name"),
        (tools(""), "chat.tools[0].name"),
        (tools(*map(str, range(513))), "chat.tools"),
        (tools("f", description="x" * 300_000), "chat.tools"),
        (tools("f", parameters={"type": "string"}), "chat.tools[0].parameters.type"),
        (tools("f", parameters={"default": math.nan}), "chat.tools[0]"),
        (tools(choice=inference_pb2.TOOL_CHOICE_REQUIRED), "chat.tool_choice"),
        (tools("f", choice=9), "chat.tool_choice"),
        (at(-1), "chat.now_unix_s"),
        (at(10**12), "chat.now_unix_s"),
        (tools("f", required="f"), "chat.required_tool"),
        (tools("f", choice=2, required="g"), "chat.required_tool"),
        (tools("f", choice=2, sampling={"ignore_eos": True}), "sampling.ignore_eos"),
        (tools("f", choice=2, sampling={"stop": ["x"]}), "sampling.stop"),
        (tools("f", choice=2, sampling={"stop_token_ids": [1]}), "sampling.stop_token_ids"),
        (tool_call(name="", arguments="{}"), "chat.messages[0].tool_calls[0].name"),
        (tool_call(name="f", arguments="[1]"), "chat.messages[0].tool_calls[0].arguments"),
        (tool_call(name="f", arguments="{"), "chat.messages[0].tool_calls[0].arguments"),
        (tool_call("f", '{"x": NaN}'), "chat.messages[0].tool_calls[0].arguments"),
        (tool_call("f", '{"x": [-Infinity]}'), "chat.messages[0].tool_calls[0].arguments"),
        (resumed([600]), "emitted_token_ids[0]"),
        (resumed([5] * 3, max_tokens=2), "emitted_token_ids"),
        (resumed([5] * MAX_LEN), "emitted_token_ids"),
        (resumed([5], temperature=0.5), "sampling.seed"),
        (tokens(5, stop_token_ids=[1, 600]), "sampling.stop_token_ids[1]"),
        (tokens(*range(MAX_LEN)), "tokens"),
        (inference_pb2.GenerateRequest(text="a", request_id="a b"), "request_id"),
        (inference_pb2.GenerateRequest(text="a", request_id="a\n"), "request_id"),
        (inference_pb2.GenerateRequest(text="a", request_id="a" * 129), "request_id"),
        (inference_pb2.GenerateRequest(text="a", cache_salt="ü" * 33), "cache_salt"),
    ],
)
def test_refused_by_field(request_: inference_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve(request_)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


def test_nothing_given_is_filled_in() -> None:
    resolved = resolve(tokens(5, 6))
    assert resolved.shape.prompt_ids == (5, 6)
    assert resolved.shape.max_tokens == MAX_LEN - 2
    assert resolved.shape.stop_token_ids == EOS
    sampling = resolved.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 1.0, 77)
    assert sampling.max_tokens == MAX_LEN - 2
    assert sampling.stop_token_ids == {2}


def test_detail_11_all_tokens_that_the_model_ends_with_end_it() -> None:
    several = facts()._replace(eos_token_ids=frozenset({2, 3}))
    assert resolve(tokens(5, stop_token_ids=[9]), several).shape.stop_token_ids == {2, 3, 9}
    assert resolve(tokens(5, ignore_eos=True), several).shape.stop_token_ids == frozenset()


def test_what_is_given_is_kept() -> None:
    resolved = resolve(
        tokens(
            5, temperature=0.0, top_p=0.5, top_k=7, min_p=0.5, logit_bias={9: -2.0}, seed=0,
            max_tokens=63, min_tokens=63,
            stop_token_ids=[9, 9], stop=["x"], ignore_eos=True, return_margins=True,
            include_stop_str_in_output=True,
        )
    )  # fmt: skip
    sampling = resolved.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.min_p, sampling.logit_bias) == (0.5, {9: -2.0})
    assert sampling.seed == 0
    assert resolved.shape.stop_token_ids == {9}
    assert resolved.stop == ("x",)
    assert resolved.includes_stop
    assert not resolve(tokens(5)).includes_stop
    assert sampling.return_margins


def test_the_models_makers_are_asked_before_the_defaults() -> None:
    known = facts(recommended=SamplingOptions(temperature=0.25, top_p=0.5, top_k=7, min_p=0.5))
    sampling = resolve(tokens(5), known).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
    assert sampling.min_p == 0.5
    sampling = resolve(tokens(5, temperature=1.0, top_p=1.0, top_k=0, min_p=0), known).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.min_p == 0


def test_a_value_that_changes_nothing_is_no_refusal() -> None:
    neutral = tokens(
        5, n=1, best_of=1, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, logit_bias={},
    )  # fmt: skip
    assert resolve(neutral).shape.prompt_ids == (5,)


def test_the_best_are_known_by_log_probabilities_that_nobody_may_have_asked_for() -> None:
    silent = resolve(tokens(5, n=1, best_of=2))
    assert (silent.sampling.logprobs, silent.tells_logprobs) == (0, False)
    told = resolve(tokens(5, n=1, best_of=2, logprobs=3))
    assert (told.sampling.logprobs, told.tells_logprobs) == (3, True)
    assert resolve(tokens(5, n=2)).sampling.logprobs is None


def test_who_resumes_was_told_of_the_prompt_before() -> None:
    told = resolve(tokens(5, 6, temperature=0, prompt_logprobs=2)).shape.told
    assert told == WantedLogprobs(1, 2, 2)
    assert resolve(resumed([7], temperature=0, prompt_logprobs=2)).shape.told is None


def test_resumed_output_is_kept_apart_from_the_prompt() -> None:
    resolved = resolve(resumed([7, 8], temperature=0.5, seed=3, max_tokens=9))
    assert resolved.shape.prompt_ids == (5,)
    assert resolved.emitted_token_ids == (7, 8)
    assert resolved.shape.max_tokens == 9
    assert resolve(resumed([7], temperature=0)).emitted_token_ids == (7,)


@pytest.mark.parametrize(
    ("emitted", "options", "field"),
    [
        ([7, 2, 8], {}, "emitted_token_ids[2]"),
        ([2, 2], {}, "emitted_token_ids[1]"),
        ([7, 9, 8, 6], {"stop_token_ids": [9]}, "emitted_token_ids[2]"),
        ([2, 7, 2, 7], {"min_tokens": 2}, "emitted_token_ids[3]"),
    ],
)
def test_nothing_is_resumed_after_a_stop_token(
    emitted: list[int], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match="stop token") as caught:
        resolve(resumed(emitted, temperature=0, **options))
    assert caught.value.field == field


def test_a_stop_token_may_be_the_last_that_is_resumed_or_end_nothing() -> None:
    assert resolve(resumed([7, 2], temperature=0)).emitted_token_ids == (7, 2)
    assert resolve(resumed([2, 7], temperature=0, ignore_eos=True)).emitted_token_ids == (2, 7)


DIGEST = "0123456789abcdef" * 2  # as workers tell it


def begun_with(digest: str) -> inference_pb2.GenerateRequest:
    request = resumed([7], temperature=0)
    request.model_digest = digest
    return request


@pytest.mark.parametrize("digest", ["", "a", DIGEST])
def test_a_digest_that_was_told_is_kept(digest: str) -> None:
    assert resolve(begun_with(digest)).model_digest == digest


@pytest.mark.parametrize(
    "digest", ["0" * 33, "0" * 10**6, "m", DIGEST.upper(), f"{DIGEST[:-1]} ", "0x1", "٣", "a\n"]
)
def test_what_no_started_told_is_no_digest(digest: str) -> None:
    with pytest.raises(InvalidRequestError, match="32 hexadecimal digits") as caught:
        resolve(begun_with(digest))
    assert caught.value.field == "model_digest"
    assert len(caught.value.message) < 100, "it is not repeated"


def test_a_digest_goes_with_what_was_emitted() -> None:
    request = tokens(5)
    request.model_digest = DIGEST
    with pytest.raises(InvalidRequestError, match="model_digest: goes with emitted_token_ids"):
        resolve(request)


class Counted(Sequence[int]):
    """Token ids that count how many of them were looked at."""

    def __init__(self, length: int) -> None:
        self.length, self.num_read = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        if index >= self.length:
            raise IndexError
        return 5


@pytest.mark.parametrize("where", ["prompt", "emitted_token_ids"])
def test_too_many_ids_are_refused_without_looking_at_one(where: str) -> None:
    ids = Counted(16 * 2**20)
    request = GenerationRequest(prompt=TokenPrompt([5]), num_bytes=1)
    changed = {"prompt": TokenPrompt(ids)} if where == "prompt" else {where: ids}
    with pytest.raises(InvalidRequestError, match="leave room for an answer"):
        validation.check(replace(request, **changed), facts())
    assert ids.num_read == 0


def test_what_is_too_long_for_the_context_says_so_in_the_words_that_clients_look_for() -> None:
    """litellm and LangChain tell by them that a shorter prompt would do."""
    words = f"This model's maximum context length is {MAX_LEN} tokens: "
    hopeless: Any = SimpleNamespace(encode=list, min_tokens=lambda text: MAX_LEN)
    text = GenerationRequest(prompt=TextPrompt("a"), num_bytes=1)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: resolve(tokens(5, max_tokens=MAX_LEN)), "sampling.max_tokens"),
        (lambda: resolve(tokens(*[5] * MAX_LEN)), "tokens"),
        (lambda: validation.tokenize(text, hopeless, MAX_LEN), "text"),
    ]
    for refuse, field in cases:
        with pytest.raises(InvalidRequestError) as caught:
            refuse()
        assert caught.value.message.startswith(f"{field}: {words}")


def test_ids_that_nobody_answers_may_be_more_than_the_context() -> None:
    check = partial(validation.check, facts=facts(), check_length=validation.check_num_ids)
    request = GenerationRequest(prompt=TokenPrompt([5] * (MAX_LEN + 1)), num_bytes=1)
    check(request)
    ids = Counted(validation.MOST_IDS + 1)
    with pytest.raises(InvalidRequestError, match="more than 524288"):
        check(replace(request, prompt=TokenPrompt(ids)))
    assert ids.num_read == 0
    validation.check_num_ids(10**6, 10**6, "tokens")


HALF = "a\ud800"
NAMELESS = Message("assistant", "", tool_calls=(ToolCall("1", "", {}),))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"prompt": TokenPrompt([5, -1])}, "tokens.ids[1]"),
        ({"emitted_token_ids": [-1]}, "emitted_token_ids[0]"),
        (
            {"sampling": SamplingOptions(stop_token_ids=(3, -1))},
            "sampling.stop_token_ids[1]",
        ),
        ({"sampling": SamplingOptions(stop=(HALF,))}, "sampling.stop[0]"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({"prompt": ChatPrompt((Message("user", "a"),) * 4097)}, "chat.messages"),
        ({"prompt": ChatPrompt((NAMELESS,))}, "chat.messages[0].tool_calls[0].name"),
        (
            {"prompt": ChatPrompt((Message("user", "a"),), {"x": "a" * 16384})},
            "chat.template_arguments",
        ),
        ({"prompt": ChatPrompt((Message("user", "a"),), {"x": HALF})}, "chat.template_arguments"),
    ],
)
def test_what_no_protobuf_could_carry_is_refused_too(changed: dict[str, Any], field: str) -> None:
    """A front end that reads JSON can."""
    request = replace(GenerationRequest(prompt=TokenPrompt([5]), num_bytes=1), **changed)
    with pytest.raises(InvalidRequestError) as caught:
        validation.check(request, facts())
    assert caught.value.field == field


@pytest.mark.parametrize("written", [r'{"x": "\ud800"}', r'{"x\udfff": 1}', '{"x": 1e999}'])
def test_what_a_model_wrote_as_a_call_can_be_sent_back(written: str) -> None:
    validation.check(read(tool_call("f", written)), facts())


def test_every_parameter_of_the_workers_is_the_clients() -> None:
    """None is left at a default on the way."""
    given: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 7, "max_tokens": 9,
        "min_tokens": 2, "stop_token_ids": (4, 5), "return_margins": True,
        "min_p": 0.125, "logit_bias": {4: -1.5}, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logprobs": 0,
        "bad_words": ("a",), "constraint": {"regex": "a"},
    }  # fmt: skip
    assert set(given) == set(WORKER_NAMES)
    sampling = resolve(tokens(5, **given)).sampling
    unlike = {name for name in WORKER_NAMES if getattr(sampling, name) != given[name]}
    assert unlike == {"stop_token_ids", "bad_words", "constraint"}
    assert sampling.constraint == OutputGrammar(GRAMMAR, EOS)
    assert sampling.bad_words == {(97,)}
    assert sampling.stop_token_ids == {4, 5, *EOS}
    defaults = SamplingParams()
    assert not any(getattr(sampling, name) == getattr(defaults, name) for name in given)


@pytest.mark.parametrize(
    ("given", "has_logprobs"),
    [({}, False), ({"logprobs": 0}, True), ({"n": 1, "best_of": 2}, True)],
)
def test_what_each_token_has_to_come_with(given: dict[str, Any], has_logprobs: bool) -> None:
    resolved = resolve(tokens(5, **given))
    assert resolved.shape.has_logprobs is has_logprobs
    assert resolved.shape.has_logprobs is (resolved.sampling.logprobs is not None)


def test_a_bad_word_is_that_alone_and_after_a_space(tokenizer: Tokenizer) -> None:
    found = validation.tokenize_bad_words(["hello", "Größe"], tokenizer)
    said = {tokenizer.decode(word) for word in found}
    assert said == {"hello", " hello", "Größe", " Größe"}
    assert validation.tokenize_bad_words([], tokenizer) == frozenset()
    assert resolve(tokens(5, bad_words=["a"])).sampling.bad_words == {(97,)}
    for words, field in ((["a", ""], "bad_words[1]"), (["a" * 129], "bad_words[0]")):
        with pytest.raises(InvalidRequestError) as caught:
            resolve(tokens(5, bad_words=words))
        assert caught.value.field == f"sampling.{field}"


def test_a_bad_word_does_not_begin_as_a_prompt_does(tokenizer: Tokenizer) -> None:
    class Prefixed:
        """Puts a token before each prompt."""

        vocab_size = tokenizer.vocab_size

        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return [0] * add_special + list(tokenizer.encode(text, add_special=False))

    prefixed: Any = Prefixed()
    words = ["hello", "new"]
    found = validation.tokenize_bad_words(words, prefixed)
    assert found == validation.tokenize_bad_words(words, tokenizer)


def test_what_the_tokenizer_has_no_tokens_for_is_the_requests_fault(tmp_path: Path) -> None:
    """As unigrams that name no token for what they do not know."""
    raw = HFTokenizer(models.Unigram([(each, -1.0) for each in "abc "], None, False))
    raw.decoder = decoders.Metaspace()
    unknowing = write_folder(tmp_path, raw)
    prompt = read(inference_pb2.GenerateRequest(text="é"))
    with pytest.raises(InvalidRequestError, match=r"the model's tokenizer: .*unk_id") as caught:
        validation.tokenize(prompt, unknowing, MAX_LEN)
    assert caught.value.field == "text"
    with pytest.raises(InvalidRequestError, match="unk_id") as caught:
        validation.tokenize_bad_words(["a", "é"], unknowing)
    assert caught.value.field == "sampling.bad_words[1]"


def test_ids_are_read_from_the_message_without_a_copy() -> None:
    message = tokens(*range(50))
    prompt = read(message).prompt
    assert isinstance(prompt, TokenPrompt)
    assert prompt.token_ids is message.tokens.ids


@pytest.mark.parametrize(
    ("count", "field"),
    [({"num_messages": 4097}, "chat.messages"), ({"num_parts": 20_000}, "chat.messages")],
)
def test_counts_of_a_chat_are_bounded(count: dict[str, int], field: str) -> None:
    request = chat(*[("user", "a")] * count.get("num_messages", 1))
    request.chat.messages[0].content.extend(
        [inference_pb2.ContentPart(text="a")] * count.get("num_parts", 0)
    )
    with pytest.raises(InvalidRequestError) as caught:
        read(request)
    assert caught.value.field == field


def test_longest_prompt_leaves_room_for_one() -> None:
    assert resolve(tokens(*range(MAX_LEN - 1))).shape.max_tokens == 1


def test_the_record_of_a_request_has_no_id_that_is_too_long() -> None:
    """Else anybody could fill logs and traces by it: it begins before the id is refused."""
    assert recorded_id("a" * 128) == "a" * 128
    assert recorded_id("a" * 129) == "invalid"
    assert recorded_id("") != recorded_id("")
