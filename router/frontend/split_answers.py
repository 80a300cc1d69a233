"""Which answers are taken apart into content, reasoning and calls, and by which template."""

import secrets
import string
import uuid
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


def split_of(
    request: GenerationRequest, prompt_ids: Sequence[int], model: ServedModel
) -> AnswerSplit | None:
    """For one choice of a request; None: its text is one piece.

    What is held to a client's own form is that form from its begin to its end.
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
    return AnswerSplit(
        ResponseParser(template, prompt, tools),
        _short_id if _has_short_ids(model.response_template) else _long_id,
        max_calls=None if chat.has_parallel_calls else 1,
    )


def _end_of(prompt_ids: Sequence[int], model: ServedModel) -> str:
    spelling = model.tokenizer.text.spelling
    end = b"".join(map(spelling, prompt_ids[-_NUM_PROMPT_TOKENS:]))
    return end.decode(errors="replace")


def _has_short_ids(template: ResponseTemplate | None) -> bool:
    return template is not None and template.short_ids


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _short_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
