"""Calls that a client insists on: a grammar that admits nothing else. Pure.

It is the same for all models, a list of objects with name and arguments, so that it does
not matter which marks of theirs are tokens without a text.
"""

import json
import re
from collections.abc import Sequence
from typing import Final

from diptych.constraint import Constraint
from diptych.text.chat_template import Tool
from diptych.text.response.template import ResponseTemplate

_ANY_OBJECT: Final = {"type": "object"}
_NOTHING: Final = {**_ANY_OBJECT, "additionalProperties": False}  # a function without parameters
_WHITESPACE: Final = {"whitespace_pattern": r"[ \n]{1,8}"}  # models end up in loops of what is free
_MOST_CALLS: Final = 32
_AT_LINE: Final = re.compile(r"\bat (\d+)\(\d+\): ")

FORCED_CALLS: Final = ResponseTemplate.read(
    {
        "fields": {
            "tool_calls": {
                "open_pattern": r"(?:\A\[|, )(?=\{)",
                "close_value": True,
                "content": "named-json",
            },
            "ignored": [{"open": "]"}, {"open_pattern": r"(?:\A\[|,) ?\Z"}],  # or it was cut off
            "content": {"content": "text"},
        }
    },
    "forced calls",
)
"""Reads what the grammar admits."""


def forced_calls(tools: Sequence[Tool], *, is_parallel: bool) -> Constraint:
    """One call of one of these ``tools``, or several if they may be parallel."""
    more = f' (", " call){{0,{_MOST_CALLS - 1}}}' if is_parallel else ""
    lines = [f'start: "[" call{more} "]"']
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        schema = _NOTHING if tool.parameters is None else {**_ANY_OBJECT, **tool.parameters}
        written = json.dumps({**schema, "x-guidance": _WHITESPACE}, ensure_ascii=False)
        lines.append(f'call_{index}: {json.dumps(begin)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {written}")
    return Constraint.grammar("\n".join(lines))


def by_tool(problem: str, tools: Sequence[Tool]) -> str:
    """What is wrong with the grammar of these tools, which nobody but us has seen: of which tool.

    It has two lines for each, behind the first two.
    """
    at = _AT_LINE.search(problem)
    index = -1 if at is None else (int(at[1]) - 3) // 2
    if at is None or not 0 <= index < len(tools):
        return problem
    return f"{problem[: at.start()]}{tools[index].name}: {problem[at.end() :]}"
