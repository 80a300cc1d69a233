"""Every bad value is refused by the path of its field; every good one is resolved."""

import math
from pathlib import Path

import pytest

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Message
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import common_pb2, inference_pb2
from router.frontend import validation
from router.frontend.validation import ResolvedRequest
from tests.text_models import byte_level_tokenizer, write_folder

VOCAB_SIZE = 512
MAX_LEN = 64
EOS = frozenset({2})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("byte-level")
    return write_folder(folder, byte_level_tokenizer())


def tokens(*ids: int, **sampling: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(ids=ids),
        sampling=common_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def resolve(request: inference_pb2.GenerateRequest, max_len: int = MAX_LEN) -> ResolvedRequest:
    validation.check(request, VOCAB_SIZE)
    return validation.resolve(
        request,
        list(request.tokens.ids),
        eos_token_ids=EOS,
        max_model_len=max_len,
        drawn_seed=77,
    )


def chat(*turns: tuple[str, str]) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt())
    for role, content in turns:
        request.chat.messages.add(role=role, content=content)
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
    assert list(sampling.stop_token_ids) == [2]


def test_what_is_given_is_kept() -> None:
    resolved = resolve(
        tokens(
            5, temperature=0.0, top_p=0.5, top_k=7, seed=0, max_tokens=63, min_tokens=63,
            stop_token_ids=[9, 9], stop=["x"], ignore_eos=True, return_margins=True,
        )
    )  # fmt: skip
    sampling = resolved.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert sampling.HasField("seed")
    assert sampling.seed == 0
    assert resolved.shape.stop_token_ids == {9}
    assert list(sampling.stop) == [], "stop strings are the router's"
    assert resolved.stop == ("x",)
    assert resolved.return_margins


def test_longest_prompt_leaves_room_for_one() -> None:
    assert resolve(tokens(*range(MAX_LEN - 1))).shape.max_tokens == 1


def test_hopelessly_long_text_is_refused_without_tokenising(tokenizer: Tokenizer) -> None:
    request = inference_pb2.GenerateRequest(text="diptych " * 131_072)
    with pytest.raises(InvalidRequestError) as caught:
        validation.tokenize(request, tokenizer, MAX_LEN)
    assert caught.value.field == "text"
    assert "or more" in caught.value.message


def test_text_is_tokenised_as_the_model_wants(tokenizer: Tokenizer) -> None:
    request = inference_pb2.GenerateRequest(text="hello")
    assert validation.tokenize(request, tokenizer, MAX_LEN) == tokenizer.encode("hello")


def test_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    ids = validation.tokenize(chat(("user", "hi")), tokenizer, MAX_LEN)
    assert ids == tokenizer.encode_chat([Message("user", "hi")])
