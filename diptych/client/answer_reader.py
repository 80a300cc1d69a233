"""One answer over all the calls that it takes: what came, and what to ask for next. Pure."""

from typing import Any, Final, NamedTuple

from diptych.client.chunk import Chunk
from diptych.errors import DiptychError
from diptych.finish_reason import FinishReason
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2, inference_pb2


class BrokenStreamError(DiptychError):
    """What a router sent is no answer, or not the one that began: it was found out here."""


class _Said(NamedTuple):
    """What some of an answer says."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[inference_pb2.ToolCall, ...] = ()

    def followed_by(self, other: "_Said") -> "_Said":
        return _Said(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )

    def beyond(self, known: "_Said") -> "_Said | None":
        """Without ``known``, which it begins with; None: it does not."""
        num_calls = len(known.tool_calls)
        if (
            not self.text.startswith(known.text)
            or not self.reasoning.startswith(known.reasoning)
            or self.tool_calls[:num_calls] != known.tool_calls
        ):
            return None
        return _Said(
            self.text.removeprefix(known.text),
            self.reasoning.removeprefix(known.reasoning),
            self.tool_calls[num_calls:],
        )


_NOTHING_SAID: Final = _Said()
_REASONS: Final = {int(reason): reason for reason in FinishReason}


class AnswerReader:
    """Makes the chunks of one answer. Owned by the task that makes its calls.

    Invariant: the chunks' tokens have positions without gap or repeat, and their text is that
    of one unbroken stream, however many calls there were.
    """

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        """``request`` is the first call's. It is not changed, by the caller neither."""
        self.is_whole = False
        self._request = request
        self._started: inference_pb2.Started | None = None  # of the first call that had one
        self._prompt_token_ids: tuple[int, ...] = ()  # which that one has
        self._token_ids = list(request.emitted_token_ids)
        self._model_digest = request.model_digest  # of the weights that those are of
        self._prompt_logprobs: list[TokenLogprobs] = []  # until the first token comes
        self._rest = _NOTHING_SAID  # what came behind the last token
        self._known_rest = _NOTHING_SAID  # what this call has to repeat of it
        self._finished = inference_pb2.ChoiceFinished()
        self._num_choices = request.sampling.n or 1
        self._is_alone = max(self._num_choices, request.sampling.best_of) == 1
        self._num_by_choice = [0] * self._num_choices  # tokens, where there are several
        self._num_finished = 0

    @property
    def num_tokens(self) -> int:
        """Of the output so far, whichever call brought them."""
        return len(self._token_ids)

    @property
    def can_go_on(self) -> bool:
        """Whether another call could bring the rest: of several choices none can."""
        return self._is_alone or not (self._token_ids or any(self._num_by_choice))

    def next_request(self) -> inference_pb2.GenerateRequest:
        """What the next call asks for: the answer, or what is missing of it."""
        self._known_rest = self._rest
        self._prompt_logprobs.clear()  # told again where no token came
        if self._started is None:
            return self._request
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.model = self._started.model
        request.request_id = self._started.request_id
        request.sampling.seed = self._started.seed
        request.return_prompt_token_ids = False
        request.emitted_token_ids[:] = self._token_ids
        request.model_digest = self._model_digest if self._token_ids else ""
        if request.HasField("chat"):
            request.chat.now_unix_s = self._started.now_unix_s
        return request

    def read(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """The chunk that this message completes, if it does. Raises BrokenStreamError."""
        match response.WhichOneof("event"):
            case "started":
                self._begin(response.started)
            case "prompt_logprobs":
                self._add_prompt(response.prompt_logprobs)
            case "delta":
                return self._part(response.delta)
            case "choice_finished":
                self._finished = response.choice_finished
                if self._num_choices > 1:
                    return self._end_of(response.choice_finished)
            case "summary":
                return self._last(response.summary)
        return None

    def check_whole(self) -> None:
        """Once a call has ended well. Raises BrokenStreamError: the answer has not."""
        if not self.is_whole:
            raise BrokenStreamError("the stream ended without a summary")

    def _begin(self, started: inference_pb2.Started) -> None:
        began, told = self._model_digest, started.model_digest
        if self._token_ids and began and told:
            self._check_same("model_digest", began, told)
        self._model_digest = told or (began if self._token_ids else "")
        if self._started is None:
            self._started = started
            self._prompt_token_ids = tuple(started.prompt_token_ids)
            return
        for name in ("model", "seed"):
            self._check_same(name, getattr(self._started, name), getattr(started, name))

    def _check_same(self, name: str, asked: object, told: object) -> None:
        if asked != told:
            raise BrokenStreamError(f"the answer would go on with {name} {told}, not {asked}")

    def _add_prompt(self, part: common_pb2.PromptLogprobs) -> None:
        due = len(self._prompt_logprobs) + 1
        if part.position != due:
            raise BrokenStreamError(
                f"what is told of the prompt at {part.position} came where {due} was due"
            )
        self._prompt_logprobs += map(TokenLogprobs.from_proto, part.logprobs)

    def _begun(self) -> inference_pb2.Started:
        if self._started is None:
            raise BrokenStreamError("the stream does not say what the request became")
        return self._started

    def _part(self, delta: inference_pb2.Delta) -> Chunk | None:
        if self._num_choices > 1:
            return self._part_of(delta)
        if delta.position != self.num_tokens:
            raise BrokenStreamError(
                f"tokens were skipped or repeated: position {delta.position} came "
                f"where {self.num_tokens} was due"
            )
        said = _said_by(delta)
        if any(self._known_rest):
            said = self._beyond_known(said, has_tokens=bool(delta.token_ids))
            if not any(said):
                return None
        self._token_ids += delta.token_ids
        self._rest = _NOTHING_SAID if delta.token_ids else self._rest.followed_by(said)
        return self._delta_chunk(delta, said)

    def _part_of(self, delta: inference_pb2.Delta) -> Chunk:
        """As ``_part``, of one of several choices, which come in one call or not at all."""
        due = self._due(delta.choice)
        if delta.position != due:
            raise BrokenStreamError(f"position {delta.position} came where {due} was due")
        self._num_by_choice[delta.choice] += len(delta.token_ids)
        return self._delta_chunk(delta, _said_by(delta))

    def _delta_chunk(self, delta: inference_pb2.Delta, said: _Said) -> Chunk:
        """said: what is new of what it says."""
        told = tuple(self._prompt_logprobs)
        self._prompt_logprobs.clear()
        return self._chunk(
            choice=delta.choice,
            text=said.text,
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
            token_ids=tuple(delta.token_ids),
            position=delta.position,
            margins=tuple(delta.margins),
            logprobs=tuple(map(TokenLogprobs.from_proto, delta.logprobs)),
            prompt_logprobs=told,
        )

    def _end_of(self, finished: inference_pb2.ChoiceFinished) -> Chunk:
        self._num_finished += 1
        if not finished.reason:
            raise BrokenStreamError("a choice ended without a finish reason")
        position = self._due(finished.choice)
        return self._chunk(choice=finished.choice, position=position, **_end_fields(finished))

    def _due(self, choice: int) -> int:
        if choice >= self._num_choices:
            raise BrokenStreamError(f"choice {choice} came, of {self._num_choices}")
        return self._num_by_choice[choice]

    def _chunk(self, **members: Any) -> Chunk:
        started = self._begun()
        return Chunk(
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            model_digest=self._model_digest,
            now_unix_s=started.now_unix_s,
            prompt_token_ids=self._prompt_token_ids,
            **members,
        )

    def _beyond_known(self, said: _Said, *, has_tokens: bool) -> _Said:
        """What is said without what an earlier call brought after the same token.

        Such text has no tokens of its own, so a router cannot be told of it: it sends it again.
        """
        known, self._known_rest = self._known_rest, _NOTHING_SAID
        beyond = said.beyond(known)
        if has_tokens or beyond is None:
            raise BrokenStreamError("text came that is not what had come in its place")
        return beyond

    def _last(self, summary: inference_pb2.Summary) -> Chunk:
        finished = self._finished
        if not finished.reason:
            raise BrokenStreamError("the answer ended without a finish reason")
        if any(self._known_rest):
            raise BrokenStreamError("the answer ended before the text that had come")
        if self._num_choices > 1:
            return self._behind_all(summary)
        self.is_whole = True
        return self._chunk(
            position=self.num_tokens,
            usage=summary.usage,
            timing=summary.timing,
            **_end_fields(finished),
        )

    def _behind_all(self, summary: inference_pb2.Summary) -> Chunk:
        if self._num_finished != self._num_choices:
            raise BrokenStreamError("the answer ended without the end of each choice")
        self.is_whole = True
        return self._chunk(usage=summary.usage, timing=summary.timing)


def _said_by(delta: inference_pb2.Delta) -> _Said:
    return _Said(delta.text, delta.reasoning, tuple(delta.tool_calls))


def _end_fields(finished: inference_pb2.ChoiceFinished) -> dict[str, Any]:
    """What a chunk says of the end."""
    by_token = finished.HasField("stop_token_id")
    return {
        "finish_reason": _REASONS.get(finished.reason),  # None: a newer router's, without a name
        "stop_match": finished.stop,
        "stop_token_id": finished.stop_token_id if by_token else None,
    }
