"""An answer's events as the protocol's responses. Pure."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from diptych.errors import DiptychError, InvalidRequestError
from diptych.finish_reason import FinishReason
from diptych.open_inference import service_pb2
from diptych.rpc.channel import MAX_MESSAGE_BYTES
from diptych.rpc.status import to_failure
from diptych.text.token_text import TokenText
from diptych.token_logprobs import TokenLogprobs
from router.frontend.http.logprob_form import by_token_id, finite
from router.frontend.open_inference import tensors
from router.frontend.open_inference.asked import FINAL_RESPONSE, VERSION, Asked
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Started,
    Summary,
)
from router.generation.request import TextPrompt

MAX_ECHO_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""Of a prompt before all of several answers; the rest of a response is for what is generated."""

MAX_LOGPROBS: Final = 32_768
"""Of all tokens of all answers of one response: up to some 200 bytes of JSON each."""

_UNFINISHED: Final = "None"  # what Triton's vLLM backend says of an answer that goes on


class Answer(Protocol):
    """Makes responses of events."""

    def send(self, event: GenerationEvent) -> service_pb2.ModelInferResponse | None:
        """What to send for the next event; None: nothing."""
        ...


def check_size(asked: Asked) -> None:
    """Refuse what no response could carry, before any work.

    Raises InvalidRequestError.
    """
    sampling = asked.request.sampling
    if not asked.is_stream and tensors.LOGPROBS in asked.outputs:
        each = 1 + (sampling.logprobs or 0)
        count = asked.num_choices * max(0, sampling.max_tokens or 0) * each
        if count > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"more than {MAX_LOGPROBS} log probabilities fit no response; a stream has room",
                field=f"return_{tensors.LOGPROBS}",
            )
    num_choices = asked.num_choices
    if num_choices == 1 or not asked.echoes or tensors.TEXT_OUTPUT not in asked.outputs:
        return
    prompt = asked.request.prompt
    assert isinstance(prompt, TextPrompt)
    num_bytes = num_choices * len(prompt.text.encode())
    if num_bytes > MAX_ECHO_BYTES:
        raise InvalidRequestError(
            f"must be true: the prompt before {num_choices} answers has {num_bytes} bytes, "
            f"more than {MAX_ECHO_BYTES}",
            field=tensors.EXCLUDE_INPUT,
        )


class WholeAnswer:
    """All of it in one response, for the last event."""

    def __init__(self, asked: Asked, model: str, text: TokenText, *, is_marked: bool) -> None:
        """``is_marked``: it goes over a stream, where the last response says that it is."""
        self._asked = asked
        self._model = model
        self._text = text
        self._is_marked = is_marked
        prompt = asked.request.prompt
        assert isinstance(prompt, TextPrompt)
        begin = prompt.text if asked.echoes else ""
        self._texts = [[begin] for _ in range(asked.num_choices)]
        self._likely = [_Likely.of(asked) for _ in range(asked.num_choices)]
        self._reasons = [_UNFINISHED] * asked.num_choices

    def send(self, event: GenerationEvent) -> service_pb2.ModelInferResponse | None:
        """See :class:`Answer`."""
        match event:
            case Delta():
                self._texts[event.choice].append(event.text)
                self._likely[event.choice].add(event)
            case ChoiceFinished():
                self._reasons[event.choice] = _word(event.reason)
            case Summary():
                response = self._response(event.usage.num_prompt_tokens)
                return _marked(response, is_final=True) if self._is_marked else response
        return None

    def _response(self, num_prompt: int) -> service_pb2.ModelInferResponse:
        texts = ["".join(parts) for parts in self._texts]
        counts = [each.num_tokens for each in self._likely]
        response = _response(self._asked, self._model, texts, self._reasons, num_prompt, counts)
        _add_likely(response, self._asked, self._likely, self._text)
        return response


class StreamedAnswer:
    """A response for each piece, and an empty one at the end, which says why it ended."""

    def __init__(self, asked: Asked, model: str, text: TokenText) -> None:
        self._asked = asked
        self._model = model
        self._text = text
        self._num_prompt = 0
        self._reason = _UNFINISHED

    def send(self, event: GenerationEvent) -> service_pb2.ModelInferResponse | None:
        """See :class:`Answer`."""
        match event:
            case Delta():
                likely = _Likely.of(self._asked)
                likely.add(event)
                return self._piece(event.text, likely, is_final=False)
            case Started():
                self._num_prompt = len(event.prompt_token_ids)
            case ChoiceFinished():
                self._reason = _word(event.reason)
            case Summary():
                return self._piece("", _Likely.of(self._asked), is_final=True)
        return None

    def _piece(
        self, text: str, likely: "_Likely", *, is_final: bool
    ) -> service_pb2.ModelInferResponse:
        counts = [likely.num_tokens]
        response = _response(
            self._asked, self._model, [text], [self._reason], self._num_prompt, counts
        )
        _add_likely(response, self._asked, [likely], self._text)
        return _marked(response, is_final=is_final)


@dataclass(slots=True)
class _Likely:
    """How likely the tokens of one choice were; of each as much as was told, if it is wanted."""

    is_wanted: bool
    num_tokens: int = 0
    total: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Asked) -> "_Likely":
        """Of none yet."""
        return cls(tensors.LOGPROBS in asked.outputs)

    def add(self, delta: Delta) -> None:
        """The next of its tokens."""
        self.num_tokens += len(delta.token_ids)
        self.total += math.fsum(finite(found.logprob) for found in delta.logprobs)
        if self.is_wanted:
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs


def _add_likely(
    response: service_pb2.ModelInferResponse,
    asked: Asked,
    choices: Sequence[_Likely],
    text: TokenText,
) -> None:
    """One element for each choice: JSON of a list, as vLLM writes it, and a sum."""
    if tensors.LOGPROBS in asked.outputs:
        num_top = asked.request.sampling.logprobs or 0
        written = [
            json.dumps(
                [
                    by_token_id(text, token_id, found, num_top)
                    for token_id, found in zip(each.token_ids, each.logprobs, strict=True)
                ],
                ensure_ascii=False,
            )
            for each in choices
        ]
        tensors.add_texts(response, tensors.LOGPROBS, written)
    if tensors.CUMULATIVE_LOGPROB in asked.outputs:
        sums = [each.total for each in choices]
        tensors.add_numbers(response, tensors.CUMULATIVE_LOGPROB, sums)


def failure(error: DiptychError, given_id: str) -> service_pb2.ModelStreamInferResponse:
    """What a stream says of a request that was refused or failed; the others go on."""
    told = to_failure(error)
    response = service_pb2.ModelStreamInferResponse(error_message=f"{told.reason}: {told.message}")
    response.infer_response.id = given_id
    _marked(response.infer_response, is_final=True)
    return response


def _marked(
    response: service_pb2.ModelInferResponse, *, is_final: bool
) -> service_pb2.ModelInferResponse:
    response.parameters[FINAL_RESPONSE].bool_param = is_final
    return response


def _word(reason: FinishReason) -> str:
    return reason.name.lower()


def _response(
    asked: Asked,
    model: str,
    texts: list[str],
    reasons: list[str],
    num_prompt: int,
    counts: list[int],
) -> service_pb2.ModelInferResponse:
    response = service_pb2.ModelInferResponse(
        model_name=model, model_version=VERSION, id=asked.given_id
    )
    if tensors.TEXT_OUTPUT in asked.outputs:
        tensors.add_texts(response, tensors.TEXT_OUTPUT, texts)
    if tensors.FINISH_REASON in asked.outputs:
        tensors.add_texts(response, tensors.FINISH_REASON, reasons)
    if tensors.NUM_INPUT_TOKENS in asked.outputs:
        tensors.add_counts(response, tensors.NUM_INPUT_TOKENS, [num_prompt])
    if tensors.NUM_OUTPUT_TOKENS in asked.outputs:
        tensors.add_counts(response, tensors.NUM_OUTPUT_TOKENS, counts)
    return response
