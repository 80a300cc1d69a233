"""Calls of tools in the place of an answer of a given form: a grammar of both. Pure.

What a model calls is as free as without the form: behind the mark with which calls begin,
whatever comes.
"""

from collections.abc import Sequence
from typing import Final

from diptych.text.joined_grammars import GAP, with_answer
from diptych.text.mark import Mark

_ANSWER: Final = "answer_alone"


def or_calls(answer: str, marks: Sequence[Mark], *, has_tokens: bool) -> str:
    """The grammar of an ``answer``, which is one of llguidance's, or of calls.

    ``marks``: any of them begins calls, behind white space or none. Without tokens it is over
    bytes.
    """
    begins = " | ".join(mark.in_lark(has_tokens=has_tokens) for mark in marks)
    lark = f"start: @{_ANSWER} | GAP? ({begins}) <[*]>*\nGAP: {GAP}"
    return with_answer(lark, answer, _ANSWER)
