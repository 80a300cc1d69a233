"""A parser fed with a whole answer."""

from collections.abc import Sequence
from typing import Any

from diptych.text.response.body import ParsedCall
from diptych.text.response.parser import Parsed, ResponseParser
from diptych.text.response.patience import Patience
from diptych.text.response.template import ResponseTemplate

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
    "g": {},
}


_MOST_S = 60  # garbage of all tests may be collected amid an answer
F1 = (ParsedCall("f", '{"x": 1}'),)


def parse(
    template: ResponseTemplate,
    pieces: Sequence[str],
    *,
    prompt: str = "",
    is_whole: bool = True,
    tools: dict[str, dict[str, Any]] | None = TOOLS,
    patience: Patience | None = None,
) -> Parsed:
    parser = ResponseParser(template, prompt, tools, patience or Patience(_MOST_S))
    parts = [*map(parser.feed, pieces), parser.finish(is_whole=is_whole)]
    return Parsed(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )


def parse_in_pieces(
    template: ResponseTemplate,
    text: str,
    *,
    sizes: Sequence[int] = (1, 3, 7, 100_000),
    prompt: str = "",
    is_whole: bool = True,
    tools: dict[str, dict[str, Any]] | None = TOOLS,
) -> Parsed:
    """What pieces of each of the ``sizes`` say, which is the same."""
    found = [
        parse(
            template,
            [text[at : at + size] for at in range(0, len(text), size)],
            prompt=prompt,
            is_whole=is_whole,
            tools=tools,
        )
        for size in sizes
    ]
    assert all(each == found[0] for each in found)
    return found[0]
