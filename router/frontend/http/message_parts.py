"""The content of a message: a text, or a list of parts, of which only texts are served. Pure."""

from collections.abc import Collection, Sequence
from typing import Annotated, Final

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from router.frontend.http.body import StrictModel
from router.frontend.validation import MAX_PARTS

_REFUSAL: Final = "refusal"
_TEXT: Final = frozenset({"text"})


class Part(StrictModel):
    """A piece of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None  # what a model said instead, as OpenAI's types have it


def _as_parts(value: object) -> object:
    """A text is one part."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("should be a text or a list of parts")
    return value


Parts = Annotated[list[Part], FailFast(), Field(max_length=MAX_PARTS), BeforeValidator(_as_parts)]


def read_text(
    parts: Sequence[Part], path: str, kinds: Collection[str] = _TEXT, *, of_model: bool = False
) -> str:
    """What they say together; ``kinds`` are the types that are texts. A model may have refused.

    Raises InvalidRequestError.
    """
    texts = []
    for index, part in enumerate(parts):
        is_refusal = of_model and part.type == _REFUSAL
        if part.type not in kinds and not is_refusal:
            raise InvalidRequestError("only text is supported", field=f"{path}[{index}].type")
        name, text = (_REFUSAL, part.refusal) if is_refusal else ("text", part.text)
        if text is None:
            raise InvalidRequestError("is required", field=f"{path}[{index}].{name}")
        texts.append(text)
    return "".join(texts)
