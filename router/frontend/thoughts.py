"""What of an answer are thoughts, where the client says of what form the answer is."""

from collections.abc import Sequence
from typing import Final

from diptych.errors import InvalidRequestError
from diptych.text.response.thoughts import thoughts_before
from diptych.text.thought_form import ThoughtForm
from router.frontend.field_names import renamed
from router.frontend.served_model import ServedModel
from router.frontend.validation import EncodedPrompt
from router.generation.request import ChatPrompt, GenerationRequest

_NUM_PROMPT_TOKENS: Final = 64  # at its end, where an answer's first words may stand already
_NUM_CHARACTERS: Final = 1024  # about as many


def prompt_end(prompt_ids: Sequence[int], own_end: str | None, model: ServedModel) -> str:
    """A prompt's last words, with the marks among them.

    Where clients' are plain text only ``own_end`` counts, which is as of an EncodedPrompt.
    """
    if own_end is not None:
        return own_end[-_NUM_CHARACTERS:]
    spelling = model.tokenizer.text.spelling
    end = b"".join(map(spelling, prompt_ids[-_NUM_PROMPT_TOKENS:]))
    return end.decode(errors="replace")


def thoughts_of(
    request: GenerationRequest, prompt: EncodedPrompt, model: ServedModel
) -> ThoughtForm | None:
    """Those that may come before what has to be of a form. A text is continued as it is.

    Raises InvalidRequestError: they have begun, and nobody could tell where they end.
    """
    if not isinstance(request.prompt, ChatPrompt) or model.response_template is None:
        return None
    tokenizer = model.tokenizer
    source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    end = prompt_end(prompt.token_ids, prompt.own_end, model)
    try:
        return thoughts_before(model.response_template, source, end, tokenizer.added_tokens)
    except InvalidRequestError as error:
        if request.prompt.forced_tools:
            raise renamed(error, {"sampling.constraint": "chat.tool_choice"}) from None
        raise
