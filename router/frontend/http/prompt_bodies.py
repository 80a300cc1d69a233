"""Bodies of ``/v1/embeddings``, ``/score`` and ``/rerank`` as work on prompts. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from router.frontend.http import unserved
from router.frontend.http.asked import Envelope
from router.frontend.http.body import StrictModel, validated
from router.frontend.http.completion_request import read_prompt
from router.frontend.prompt_answers import MAX_INPUTS, check_num_inputs
from router.generation.prompt_work import EmbedRequest, Input, Pooling, ScoreRequest
from router.generation.request import TextPrompt


def _as_list(value: object) -> object:
    """One text is a list of one."""
    return [value] if isinstance(value, str) else value


def _as_document(value: object) -> object:
    """A text is a document with nothing else: so errors name a member of one kind, not of two."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise ValueError("should be a text or an object with one")
    return value


_Texts = Annotated[list[str] | None, Field(max_length=MAX_INPUTS), BeforeValidator(_as_list)]
Names = Mapping[str, str]
"""What the client calls what errors name, see :func:`router.frontend.field_names.renamed`."""


class _Body(StrictModel):
    model: str | None = None
    cache_salt: str | None = None


class _EmbeddingBody(_Body):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    normalize: bool | None = None
    pooling: Literal["mean", "last"] | None = None


class _ScoreBody(_Body):
    text_1: _Texts = None
    text_2: _Texts = None


class _Document(StrictModel):
    text: str


class _RerankBody(_Body):
    query: str
    documents: Annotated[
        list[Annotated[_Document, BeforeValidator(_as_document)]],
        FailFast(),
        Field(min_length=1, max_length=MAX_INPUTS - 1),  # the query is an input too
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingsAsked:
    """What a body of ``/v1/embeddings`` wants."""

    request: EmbedRequest
    is_base64: bool
    names: Names


@dataclass(frozen=True, slots=True)
class Scoring:
    """Continuations to score."""

    request: ScoreRequest
    names: Names


@dataclass(frozen=True, slots=True)
class Comparison:
    """Texts to compare: each of ``pairs`` names two inputs by their index."""

    request: EmbedRequest
    pairs: Sequence[tuple[int, int]]
    names: Names


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents to rank by how near they are to a query, which is the first input."""

    request: EmbedRequest
    documents: Sequence[str]
    top_n: int
    names: Names


def read_embeddings(content: Mapping[str, object], envelope: Envelope) -> EmbeddingsAsked:
    """Raises InvalidRequestError."""
    unserved.refuse(content, unserved.OF_EMBEDDINGS)
    body = validated(_EmbeddingBody, content)
    inputs = _read_inputs(content.get("input"), "input", envelope)
    names = _names("input", len(inputs), is_one=not _is_several(content["input"]))
    request = EmbedRequest(
        inputs=inputs,
        pooling=None if body.pooling is None else Pooling(body.pooling),
        dimensions=body.dimensions,
        normalize=body.normalize is not False,
        **_common(body, envelope),
    )
    return EmbeddingsAsked(request, body.encoding_format == "base64", names)


def read_score(content: Mapping[str, object], envelope: Envelope) -> Scoring | Comparison:
    """Continuations to score, or vLLM's texts to compare. Raises InvalidRequestError."""
    unserved.refuse(content, unserved.OF_PROMPTS)
    body = validated(_ScoreBody, content)
    if content.get("continuations") is None:
        if body.text_1 is not None:
            unserved.refuse_beside(content, ["prompt"], "text_1")
        return _read_comparison(body, envelope)
    unserved.refuse_beside(content, ["text_1", "text_2"], _CONTINUATIONS)
    prompt, said = content.get("prompt"), content["continuations"]
    request = ScoreRequest(
        prompt=None if prompt is None else read_prompt(prompt, envelope.max_model_len),
        continuations=_read_inputs(said, _CONTINUATIONS, envelope),
        **_common(body, envelope),
    )
    num_read = len(request.continuations)
    names = _names(_CONTINUATIONS, num_read, is_one=not _is_several(said), ours=_CONTINUATIONS)
    return Scoring(request, {**names, **_SCORE_NAMES})


def read_rerank(content: Mapping[str, object], envelope: Envelope) -> Ranking:
    """Raises InvalidRequestError."""
    unserved.refuse(content, unserved.OF_RERANK)
    body = validated(_RerankBody, content)
    texts = [each.text for each in body.documents]
    request = _compared([body.query, *texts], body, envelope)
    names = {"inputs[0].text": "query", "inputs[0]": "query"}
    names |= {f"inputs[{index + 1}].text": f"documents[{index}]" for index in range(len(texts))}
    names["inputs"] = "documents"
    return Ranking(request, texts, body.top_n or len(texts), names)


def _read_comparison(body: _ScoreBody, envelope: Envelope) -> Comparison:
    given = {}
    for name, value in (("text_1", body.text_1), ("text_2", body.text_2)):
        if value is None:
            raise InvalidRequestError("is required, or continuations", field=name)
        given[name] = value
    firsts, seconds = given["text_1"], given["text_2"]
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"has {len(firsts)} items, neither 1 nor text_2's {len(seconds)}", field="text_1"
        )
    check_num_inputs(len(seconds), "text_2")
    num_texts = len(firsts) + len(seconds)
    if num_texts > MAX_INPUTS:
        raise InvalidRequestError(
            f"text_1 and text_2 have {num_texts} items together, at most {MAX_INPUTS}",
            field="text_2",
        )
    request = _compared([*firsts, *seconds], body, envelope)
    step = 0 if len(firsts) == 1 else 1
    pairs = [(index * step, len(firsts) + index) for index in range(len(seconds))]
    names = {f"inputs[{index}].text": f"text_1[{index}]" for index in range(len(firsts))}
    names |= {
        f"inputs[{len(firsts) + index}].text": f"text_2[{index}]" for index in range(len(seconds))
    }
    names["inputs"] = "text_2"
    return Comparison(request, pairs, names)


def _compared(texts: Sequence[str], body: _Body, envelope: Envelope) -> EmbedRequest:
    return EmbedRequest(inputs=[TextPrompt(text) for text in texts], **_common(body, envelope))


def _common(body: _Body, envelope: Envelope) -> dict[str, Any]:
    return {
        "model": body.model or "",
        "cache_salt": body.cache_salt or "",
        "request_id": envelope.request_id,
        "num_bytes": envelope.num_bytes,
    }


def _read_inputs(value: object, field: str, envelope: Envelope) -> tuple[Input, ...]:
    """One text or list of token ids, or a list of these. Raises InvalidRequestError."""
    if not isinstance(value, list) or not _is_several(value):
        return (read_prompt(value, envelope.max_model_len, field),)
    check_num_inputs(len(value), field)
    return tuple(
        read_prompt([each], envelope.max_model_len, f"{field}[{index}]")
        if isinstance(each, str | list)
        else _refuse(f"{field}[{index}]")
        for index, each in enumerate(value)
    )


def _is_several(value: object) -> bool:
    return isinstance(value, list) and (not value or isinstance(value[0], str | list))


def _refuse(field: str) -> Input:
    raise InvalidRequestError("should be a text or a list of token ids", field=field)


def _names(field: str, num_inputs: int, *, is_one: bool, ours: str = "inputs") -> Names:
    """Of the inputs, as the client wrote them: one alone, or in a list."""
    if is_one:
        alone = (f"{ours}[0].tokens.ids", f"{ours}[0].tokens", f"{ours}[0].text", f"{ours}[0]")
        return dict.fromkeys((*alone, ours), field)
    names = {
        f"{ours}[{index}].{kind}": f"{field}[{index}]"
        for index in range(num_inputs)
        for kind in ("tokens.ids", "tokens", "text")
    }
    return {**names, ours: field}


_CONTINUATIONS: Final = "continuations"
_SCORE_NAMES: Final[Names] = {
    "request_id": "x-request-id",
    "tokens.ids": "prompt",
    "tokens": "prompt",
    "text": "prompt",
}
