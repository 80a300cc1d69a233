"""The content of a message: a text, or a list of parts, of which only texts are served. Pure."""

from collections.abc import Collection, Sequence
from typing import Annotated, Final

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from router.frontend.http.body import StrictModel
from router.frontend.validation import MAX_PARTS

_TEXT: Final = frozenset({"text"})


class Part(StrictModel):
    """A piece of a message's content."""

    type: str
    text: str | None = None


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


def read_text(parts: Sequence[Part], path: str, kinds: Collection[str] = _TEXT) -> str:
    """What they say together; ``kinds`` are the types that are texts.

    Raises InvalidRequestError.
    """
    texts = []
    for index, part in enumerate(parts):
        if part.type not in kinds:
            raise InvalidRequestError("only text is supported", field=f"{path}[{index}].type")
        if part.text is None:
            raise InvalidRequestError("is required", field=f"{path}[{index}].text")
        texts.append(part.text)
    return "".join(texts)
