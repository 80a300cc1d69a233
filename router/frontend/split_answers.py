"""Which answers are taken apart into content, reasoning and calls, and by which template."""

import hashlib
import string
from array import array
from collections.abc import Sequence
from typing import Final

from diptych.text.response.forced_calls import FORCED_CALLS
from diptych.text.response.parser import ResponseParser
from diptych.text.response.template import ResponseTemplate
from diptych.text.response.thoughts import AnswerParser, ThoughtSplit
from router.frontend.served_model import ServedModel
from router.frontend.thoughts import prompt_end
from router.generation.request import ChatPrompt, GenerationRequest
from router.request.answer_split import AnswerSplit
from router.request.resolved import ResolvedRequest

_LETTERS: Final = string.ascii_letters + string.digits


class CallIds:
    """Names the calls of one choice: the same ones, each time that it is answered."""

    def __init__(self, answer: str, prompt_ids: Sequence[int]) -> None:
        self._source = hashlib.sha256(answer.encode())
        self._source.update(array("Q", prompt_ids).tobytes())
        self._num_calls = 0

    def next_long(self) -> str:
        """As most of them look."""
        return f"call_{self._next().hex()[:32]}"

    def next_short(self) -> str:
        """Nine letters and digits."""
        return "".join(_LETTERS[each % len(_LETTERS)] for each in self._next()[:9])

    def _next(self) -> bytes:
        one = self._source.copy()
        one.update(str(self._num_calls).encode())
        self._num_calls += 1
        return one.digest()


def split_of(
    request: GenerationRequest, resolved: ResolvedRequest, model: ServedModel, answer: str
) -> AnswerSplit | None:
    """For one choice of a request; None: its text is one piece.

    What is held to a client's own form is that form from its begin to its end, behind the
    thoughts. ``answer`` is what this choice has for itself and has again where it is resumed:
    its calls' ids come of it.
    """
    chat, prompt_ids = request.prompt, resolved.shape.prompt_ids
    if not isinstance(chat, ChatPrompt):
        return None
    parser = _parser(request, chat, resolved, model)
    if parser is None:
        return None
    ids = CallIds(answer, prompt_ids)
    return AnswerSplit(
        parser,
        ids.next_short if _has_short_ids(model.response_template) else ids.next_long,
        max_calls=None if chat.has_parallel_calls else 1,
    )


def _parser(
    request: GenerationRequest, chat: ChatPrompt, resolved: ResolvedRequest, model: ServedModel
) -> AnswerParser | None:
    offered, template = chat.offered_tools, model.response_template
    tools = {tool.name: tool.parameters or {} for tool in offered} if offered else None
    if request.sampling.constraint is None and not chat.forced_tools:
        if template is None or not (offered or chat.is_split):
            return None
        end = prompt_end(resolved.shape.prompt_ids, resolved.own_end, model)
        return ResponseParser(template, end, tools)
    held = ResponseParser(FORCED_CALLS, "", tools) if chat.forced_tools else None
    return held if resolved.thoughts is None else ThoughtSplit(resolved.thoughts, held)


def _has_short_ids(template: ResponseTemplate | None) -> bool:
    return template is not None and template.short_ids
