"""Bodies that ask for work on prompts alone become plain requests: vectors, rankings, scores."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from router.frontend.field_names import renamed
from router.frontend.http.asked import Envelope
from router.frontend.http.prompt_bodies import (
    Comparison,
    read_embeddings,
    read_rerank,
    read_score,
)
from router.generation.request import TextPrompt, TokenPrompt

ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=100)


def test_too_many_inputs_are_named_as_their_client_wrote_them() -> None:
    error = InvalidRequestError("too many", field="inputs")
    embeddings = read_embeddings({"input": ["a", "b"]}, ENVELOPE)
    assert renamed(error, embeddings.names).field == "input"
    alone = read_embeddings({"input": "a"}, ENVELOPE)
    assert renamed(error, alone.names).field == "input"
    ranking = read_rerank({"query": "a", "documents": ["b"]}, ENVELOPE)
    assert renamed(error, ranking.names).field == "documents"
    comparison = read_score({"text_1": "a", "text_2": ["b"]}, ENVELOPE)
    assert isinstance(comparison, Comparison)
    assert renamed(error, comparison.names).field == "text_2"


def test_detail_24_texts_and_lists_of_token_ids_are_inputs() -> None:
    for given, expected in (
        ([[1, 2], [3]], (TokenPrompt([1, 2]), TokenPrompt([3]))),
        ([1, 2], (TokenPrompt([1, 2]),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ("a", (TextPrompt("a"),)),
    ):
        assert read_embeddings({"input": given}, ENVELOPE).request.inputs == expected


@pytest.mark.parametrize(
    ("said", "is_base64"),
    [({}, False), ({"encoding_format": "float"}, False), ({"encoding_format": "base64"}, True)],
)
def test_detail_24_vectors_are_in_base64_for_who_asks(
    said: dict[str, Any], is_base64: bool
) -> None:
    assert read_embeddings({"input": "a", **said}, ENVELOPE).is_base64 == is_base64


def test_each_document_is_named_as_its_client_wrote_it() -> None:
    ranking = read_rerank({"query": "q", "documents": ["a", "b"]}, ENVELOPE)
    for index, theirs in enumerate(["query", "documents[0]", "documents[1]"]):
        error = InvalidRequestError("is empty", field=f"inputs[{index}].text")
        assert renamed(error, ranking.names).field == theirs


@pytest.mark.parametrize(
    ("firsts", "pairs"), [("a", [(0, 1), (0, 2)]), (["a", "b"], [(0, 2), (1, 3)])]
)
def test_one_text_is_compared_with_all_and_several_each_with_its_own(
    firsts: object, pairs: list[tuple[int, int]]
) -> None:
    comparison = read_score({"text_1": firsts, "text_2": ["c", "d"]}, ENVELOPE)
    assert isinstance(comparison, Comparison)
    assert comparison.pairs == pairs


@pytest.mark.parametrize("read", [read_embeddings, read_rerank, read_score])
@pytest.mark.parametrize("name", ["add_special_tokens", "extra_key", "truncate_prompt_tokens"])
def test_detail_23_what_would_change_the_prompt_is_refused_by_its_name(
    read: Callable[[Mapping[str, object], Envelope], object], name: str
) -> None:
    whole = {"input": "a", "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
    read(whole, ENVELOPE)
    with pytest.raises(InvalidRequestError, match=name):
        read({**whole, name: 2}, ENVELOPE)


@pytest.mark.parametrize(
    ("documents", "field"),
    [
        (["a", 5], "documents[1]"),
        (["a", None], "documents[1]"),
        ([["a"]], "documents[0]"),
        (["a", {}], "documents[1].text"),
        (["a", {"text": 5}], "documents[1].text"),
        ("a", "documents"),
    ],
)
def test_a_wrong_document_is_named_as_its_client_wrote_it(documents: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_rerank({"query": "q", "documents": documents}, ENVELOPE)
    assert caught.value.field == field


@pytest.mark.parametrize(("num", "most"), [(0, "at least 1"), (2048, "at most 2047")])
def test_the_documents_are_counted_as_their_client_does(num: int, most: str) -> None:
    with pytest.raises(InvalidRequestError, match=most) as caught:
        read_rerank({"query": "q", "documents": ["d"] * num}, ENVELOPE)
    assert caught.value.field == "documents"


def test_documents_are_texts_or_objects_with_one() -> None:
    ranking = read_rerank({"query": "q", "documents": ["a", {"text": "b", "id": 1}]}, ENVELOPE)
    assert ranking.documents == ["a", "b"]


def test_texts_to_compare_count_together() -> None:
    texts = ["a"] * 1024
    read_score({"text_1": texts, "text_2": texts}, ENVELOPE)
    texts = ["a"] * 1025
    with pytest.raises(InvalidRequestError, match="text_1 and text_2 have 2050 items") as caught:
        read_score({"text_1": texts, "text_2": texts}, ENVELOPE)
    assert caught.value.field == "text_2"
    read_score({"text_1": "a", "text_2": ["a"] * 2047}, ENVELOPE)
    with pytest.raises(InvalidRequestError, match="together"):
        read_score({"text_1": "a", "text_2": ["a"] * 2048}, ENVELOPE)


EMBEDDINGS = {"input": "a"}
RERANK = {"query": "a", "documents": ["b"]}
SCORE = {"continuations": ["a"], "prompt": "b"}


def test_what_is_null_is_not_said() -> None:
    texts = {"text_1": "a", "text_2": ["b"]}
    assert read_score({**texts, "continuations": None}, ENVELOPE) == read_score(texts, ENVELOPE)
    with pytest.raises(InvalidRequestError, match="is required, or continuations") as caught:
        read_score({"continuations": None}, ENVELOPE)
    assert caught.value.field == "text_1"


COMPARISON = {"text_1": "a", "text_2": "b"}


@pytest.mark.parametrize(
    ("read", "whole", "name", "wrong", "neutral"),
    [
        (read_embeddings, EMBEDDINGS, "embed_dtype", "float16", "float32"),
        (read_embeddings, EMBEDDINGS, "endianness", "big", "little"),
        (read_embeddings, EMBEDDINGS, "endianness", "big", "native"),
        (read_rerank, RERANK, "return_documents", False, True),
        (read_rerank, RERANK, "max_tokens_per_doc", 4096, 0),
        (read_rerank, RERANK, "rank_fields", ["title"], ["text"]),
        (read_score, SCORE, "text_1", "a", None),
        (read_score, SCORE, "text_2", ["a"], None),
        (read_score, COMPARISON, "prompt", "a", None),
    ],
)
def test_what_would_change_the_answer_elsewhere_is_refused_by_its_name(
    read: Callable[[Mapping[str, object], Envelope], object],
    whole: Mapping[str, object],
    name: str,
    wrong: object,
    neutral: object,
) -> None:
    for value in (None, neutral):
        read({**whole, name: value}, ENVELOPE)
    with pytest.raises(InvalidRequestError) as caught:
        read({**whole, name: wrong}, ENVELOPE)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("said", "ours", "theirs"),
    [
        ({"continuations": ["a", ""]}, "continuations[1].text", "continuations[1]"),
        ({"continuations": [[5], [6]]}, "continuations[1].tokens.ids[0]", "continuations[1][0]"),
        ({"continuations": "a"}, "continuations[0].text", "continuations"),
        ({"continuations": "a"}, "continuations[0]", "continuations"),
        ({"continuations": ["a", "b"]}, "continuations[1]", "continuations[1]"),
        ({"continuations": ["a"]}, "continuations", "continuations"),
        ({"continuations": ["a"], "prompt": "b"}, "text", "prompt"),
    ],
)
def test_each_continuation_is_named_as_its_client_wrote_it(
    said: dict[str, Any], ours: str, theirs: str
) -> None:
    error = InvalidRequestError("no", field=ours)
    assert renamed(error, read_score(said, ENVELOPE).names).field == theirs
