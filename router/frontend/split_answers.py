"""Which answers are taken apart into content, reasoning and calls, and by which template."""

import hashlib
import string
from array import array
from collections.abc import Sequence
from typing import Final

from diptych.text.response.forced_calls import FORCED_CALLS
from diptych.text.response.parser import ResponseParser
from diptych.text.response.template import ResponseTemplate
from router.frontend.served_model import ServedModel
from router.generation.request import ChatPrompt, GenerationRequest
from router.request.answer_split import AnswerSplit

_NUM_PROMPT_TOKENS: Final = 64  # at its end, where an answer's first words may stand already
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
    request: GenerationRequest, prompt_ids: Sequence[int], model: ServedModel, answer: str
) -> AnswerSplit | None:
    """For one choice of a request; None: its text is one piece.

    What is held to a client's own form is that form from its begin to its end. ``answer`` is
    what this choice has for itself and has again where it is resumed: its calls' ids come of it.
    """
    chat = request.prompt
    if not isinstance(chat, ChatPrompt) or request.sampling.constraint is not None:
        return None
    offered, template = chat.offered_tools, model.response_template
    prompt = ""
    if chat.forced_tools:
        template = FORCED_CALLS
    elif template is None or not (offered or chat.is_split):
        return None
    else:
        prompt = _end_of(prompt_ids, model)
    tools = {tool.name: tool.parameters or {} for tool in offered} if offered else None
    ids = CallIds(answer, prompt_ids)
    return AnswerSplit(
        ResponseParser(template, prompt, tools),
        ids.next_short if _has_short_ids(model.response_template) else ids.next_long,
        max_calls=None if chat.has_parallel_calls else 1,
    )


def _end_of(prompt_ids: Sequence[int], model: ServedModel) -> str:
    spelling = model.tokenizer.text.spelling
    end = b"".join(map(spelling, prompt_ids[-_NUM_PROMPT_TOKENS:]))
    return end.decode(errors="replace")


def _has_short_ids(template: ResponseTemplate | None) -> bool:
    return template is not None and template.short_ids
