"""Calls in the place of an answer of which the client says what form it has."""

from diptych.errors import InvalidRequestError
from diptych.text.mark import Mark
from router.frontend.served_model import ServedModel
from router.generation.request import ChatPrompt, GenerationRequest


def calls_beside(request: GenerationRequest, model: ServedModel) -> tuple[Mark, ...]:
    """What begins calls, which may come in the place of an answer of a given form.

    Raises InvalidRequestError: there may be some, and no mark tells them from an answer.
    """
    chat, template = request.prompt, model.response_template
    if not isinstance(chat, ChatPrompt) or not chat.offered_tools or chat.forced_tools:
        return ()
    marks = () if template is None else template.calls_begin
    if not marks:
        raise InvalidRequestError(
            "cannot go with tools: this model has no mark that tells a call from such an answer",
            field="sampling.constraint",
        )
    return tuple(Mark.of(mark, model.tokenizer.added_tokens) for mark in marks)
