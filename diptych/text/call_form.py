"""Calls of tools in the place of an answer of a given form: a grammar of both. Pure.

What a model calls is as free as without the form: behind the mark with which calls begin,
whatever comes.
"""

from collections.abc import Sequence
from typing import Final

from diptych.text.thought_form import Mark, with_parts

_ANSWER: Final = "answer_alone"
_ANY_BYTES: Final = "REST?\nREST: /(?s:.+)/"
_ANY_TOKENS: Final = "<[*]>*"


def or_calls(answer: str, marks: Sequence[Mark], *, has_tokens: bool) -> str:
    """The grammar of an ``answer``, which is one of llguidance's, or of calls.

    ``marks``: any of them begins calls. Without tokens it is over bytes.
    """
    rest = _ANY_TOKENS if has_tokens else _ANY_BYTES
    begins = [f"{mark.in_lark(has_tokens=has_tokens)} calls" for mark in marks]
    lark = f"start: {' | '.join([f'@{_ANSWER}', *begins])}\ncalls: {rest}"
    return with_parts(lark, answer, _ANSWER)
