"""Which answers are taken apart into content, reasoning and calls, and by which template."""

import hashlib
import string
from array import array
from collections.abc import Sequence
from typing import Final

from diptych.text.response.answer_or_calls import AnswerOrCalls
from diptych.text.response.forced_calls import FORCED_CALLS
from diptych.text.response.parser import ResponseParser
from diptych.text.response.template import CallIdForm
from diptych.text.response.thoughts import AnswerParser, ThoughtSplit
from router.frontend.served_model import ServedModel
from router.frontend.thoughts import prompt_end
from router.generation.request import ChatPrompt, GenerationRequest
from router.request.answer_split import AnswerSplit
from router.request.resolved import ResolvedRequest

_LETTERS: Final = string.ascii_letters + string.digits


class CallIds:
    """Names the calls of one choice: the same ones, each time that it is answered."""

    def __init__(
        self,
        answer: str,
        prompt_ids: Sequence[int],
        form: CallIdForm = CallIdForm.ANY,
        num_before: int = 0,
    ) -> None:
        """``num_before``: calls that the chat has already."""
        self._form = form
        self._num_before = num_before
        self._source = hashlib.sha256(answer.encode())
        self._source.update(array("Q", prompt_ids).tobytes())
        self._num_calls = 0

    def next(self, name: str) -> str:
        """That of the next call, of the tool of this name."""
        one = self._source.copy()
        one.update(str(self._num_calls).encode())
        number = self._num_before + self._num_calls
        self._num_calls += 1
        match self._form:
            case CallIdForm.SHORT:
                return "".join(_LETTERS[each % len(_LETTERS)] for each in one.digest()[:9])
            case CallIdForm.NUMBERED:
                return f"functions.{name}:{number}"
        return f"call_{one.hexdigest()[:32]}"


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
    template = model.response_template
    form = CallIdForm.ANY if template is None else template.call_ids
    num_before = sum(len(message.tool_calls) for message in chat.messages)
    ids = CallIds(answer, prompt_ids, form, num_before)
    return AnswerSplit(parser, ids.next, max_calls=None if chat.has_parallel_calls else 1)


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
    held: AnswerParser | None = None
    if chat.forced_tools:
        held = ResponseParser(FORCED_CALLS, "", tools)
    elif resolved.calls and template is not None:
        marks = [mark.text for mark in resolved.calls]
        held = AnswerOrCalls(marks, ResponseParser(template, "", tools))
    return held if resolved.thoughts is None else ThoughtSplit(resolved.thoughts, held)
