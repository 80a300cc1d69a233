"""Scores and vectors of texts: checked, tokenised, computed by the prefill pool alone."""

import asyncio
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from diptych.errors import DeadlineExceededError, InvalidRequestError
from diptych.telemetry import logs
from diptych.telemetry.tracing import Metadata, trace_id
from router.frontend.admission import Admission
from router.frontend.field_names import renamed
from router.frontend.outcome import NO_ROOM, telling_outcome
from router.frontend.prompt_jobs import Errand, Job, PromptJobs
from router.frontend.quotas import Admitted, Quotas
from router.frontend.turns import one_by_one
from router.frontend.validation import check_room, recorded_id, salt_of
from router.generation.answer import KVPath, Timing, Usage
from router.generation.prompt_work import (
    ContinuationScore,
    Embeddings,
    EmbedRequest,
    Input,
    Pooling,
    ScoreRequest,
    Scores,
)
from router.generation.request import GenerationRequest, Prompt, TextPrompt
from router.request.prompt_told import WantedLogprobs, WantedStates
from router.request.services import Services
from router.telemetry import RequestObserver, Telemetry

MAX_INPUTS = 2048
MAX_NUMBERS = 2048 * 4096
"""In the vectors of one answer: 100 MB of numbers, and about 170 MB of JSON."""
MAX_SCORED = 2**20
"""Log probabilities of one answer: 4 MB while they wait for each other, and 22 MB of JSON."""

# Ends that the client brought about: what workers were asked for is not given back.
_CLIENTS_OWN = ("cancelled", DeadlineExceededError.reason)

Work = TypeVar("Work", ScoreRequest, EmbedRequest)
_ON_WIRE = {Pooling.MEAN: 1, Pooling.LAST_TOKEN: 2}  # common_pb2.Pooling


@dataclass(slots=True)
class PromptCall(Generic[Work]):
    """One call that is being answered; it is asked for what it wants once."""

    work: Work
    errand: Errand
    quota: Admitted
    num_reserved: int = 0
    usage: Usage | None = None  # what it took, once that is known

    def reserve(self, num_tokens: int) -> None:
        """Before any worker is asked. Raises QuotaExceededError."""
        self.quota.reserve(num_tokens)
        self.num_reserved = num_tokens

    def num_used(self, outcome: str) -> int:
        """Tokens that count; none where it failed, and not by the client."""
        if self.usage is not None:
            return self.num_reserved
        num_placed = self.errand.num_placed_tokens if outcome in _CLIENTS_OWN else 0
        return min(self.num_reserved, num_placed)


class PromptAnswers:
    """Answers Score and Embed. Event loop only; each call belongs to the task that awaits it.

    Who answers writes the answer within ``answering``: as long as that takes the call is open.
    """

    def __init__(
        self,
        admission: Admission,
        quotas: Quotas,
        services: Services,
        telemetry: Telemetry,
    ) -> None:
        self._admission = admission
        self._quotas = quotas
        self._services = services
        self._jobs = PromptJobs(admission.model.tokenizer, services)
        self._telemetry = telemetry

    @contextmanager
    def answering(
        self,
        work: Work,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        *,
        max_numbers: int = MAX_NUMBERS,
    ) -> Iterator[PromptCall[Work]]:
        """Hold a place until the block ends, and leave a record of how. Raises DiptychError.

        ``deadline_s`` is a moment of the monotonic clock. ``max_numbers``: in all vectors
        together, as far as who writes them has room.
        """
        if isinstance(work, ScoreRequest):
            operation = "score"
            check_num_inputs(len(work.continuations), "continuations")
        else:
            operation = "embeddings"
            check_num_inputs(len(work.inputs), "inputs")
            self._check_dimensions(work, max_numbers)
        with self._place(work, operation, deadline_s, metadata) as call:
            yield call

    async def score(self, call: PromptCall[ScoreRequest]) -> Scores:
        """How likely each continuation is. Raises DiptychError."""
        request = call.work
        await self._admission.admit_prompts("Score", call.errand.deadline_s)
        before = await self._read_before(call, request.prompt)
        read: list[array[int]] = []
        num_scored = 0
        for index, each in enumerate(request.continuations):
            field = f"continuations[{index}]"
            own = await self._read_input(call, each, field, before)
            if not before and len(own) < 2:
                raise InvalidRequestError("has one token, and none before it", field=field)
            check_room(len(before) + len(own), self._max_len, field)
            num_scored += len(own) if before else len(own) - 1
            if num_scored > MAX_SCORED:
                raise InvalidRequestError(
                    f"have more than {MAX_SCORED} tokens together, each with a log probability: "
                    "send them in several requests",
                    field="continuations",
                )
            read.append(own)
        num_tokens = len(before) + sum(map(len, read))
        call.reserve(num_tokens)
        jobs = [_score_job(before, own) for own in read]
        results = await self._jobs.run(jobs, call.errand)
        usage = _usage(num_tokens, min(result.num_cached_tokens for result in results))
        call.usage = usage
        scores = (ContinuationScore(each.logprobs, each.is_greedy) for each in results)
        return Scores(tuple(scores), usage)

    async def embed(self, call: PromptCall[EmbedRequest]) -> Embeddings:
        """A vector of each input. Raises DiptychError."""
        request = call.work
        pooling = request.pooling or self._admission.model.pooling or Pooling.LAST_TOKEN
        await self._admission.admit_prompts("Embed", call.errand.deadline_s)
        wanted = WantedStates(_ON_WIRE[pooling], self._admission.model.vector_size)
        jobs = []
        for index, each in enumerate(request.inputs):
            token_ids = await self._read_input(call, each, f"inputs[{index}]")
            jobs.append(Job(token_ids, wanted))
        num_tokens = sum(job.num_tokens for job in jobs)
        call.reserve(num_tokens)
        results = await self._jobs.run(jobs, call.errand)
        usage = _usage(num_tokens, sum(result.num_cached_tokens for result in results))
        call.usage = usage
        vectors = await one_by_one(lambda result: _vector(result.states, request), results)
        return Embeddings(tuple(vectors), usage)

    def _check_dimensions(self, request: EmbedRequest, max_numbers: int) -> None:
        num_asked, num_there = request.dimensions, self._admission.model.vector_size
        if num_there is None:
            return
        if num_asked is not None and not 1 <= num_asked <= num_there:
            raise InvalidRequestError(
                f"{num_asked} is not from 1 to {num_there}, the model's", field="dimensions"
            )
        num_inputs, num_each = len(request.inputs), num_asked or num_there
        if num_inputs * num_each > max_numbers:
            raise InvalidRequestError(
                f"has {num_inputs} items of {num_each} dimensions, together not over {max_numbers}",
                field="inputs",
            )

    @property
    def _max_len(self) -> int:
        return self._admission.max_model_len

    @contextmanager
    def _place(
        self,
        work: Work,
        operation: str,
        deadline_s: float | None,
        metadata: Metadata,
    ) -> Iterator[PromptCall[Work]]:
        observer = RequestObserver(
            self._telemetry,
            recorded_id(work.request_id),
            operation=operation,
            metadata=metadata,
            tenant=work.tenant.name,
        )
        salt = salt_of(work.cache_salt, work.tenant.name)
        claim = self._admission.claim_of_prompts(work.tenant)
        errand = Errand(observer.request_id, salt, deadline_s, observer, claim)
        calls: list[PromptCall[Work]] = []

        def tell(outcome: str) -> None:
            usage = None
            if calls:
                usage, num_used = calls[0].usage, calls[0].num_used(outcome)
                if outcome in NO_ROOM and not num_used:
                    calls[0].quota.withdraw()
                else:
                    calls[0].quota.leave(num_used)
            total_s = time.monotonic() - observer.received_s
            timing = Timing(total_s=total_s, kv_path=KVPath.PREFILL_ONLY)
            observer.ended(outcome, None, usage, None if usage is None else timing)

        with telling_outcome(tell, deadline_s, lambda: self._admission.is_cut_off):
            calls.append(PromptCall(work, errand, self._quotas.admit(work.tenant, 1)))
            with self._admission.hold(work.tenant, work.num_bytes):
                logs.mark(observer.request_id, trace_id(observer.context))
                yield calls[0]

    async def _read_before(
        self, call: PromptCall[ScoreRequest], prompt: Prompt | None
    ) -> list[int]:
        """What continuations come after."""
        if prompt is None:
            return []
        if isinstance(prompt, TextPrompt):
            prompt = replace(prompt, is_continued=True)
        return await self._read(call, prompt, "")

    async def _read_input(
        self, call: PromptCall[Work], each: Input, field: str, before: Sequence[int] = ()
    ) -> "array[int]":
        if before and isinstance(each, TextPrompt):
            each = TextPrompt(each.text, is_continuation=True)
        return array("I", await self._read(call, each, field))  # there may be millions

    async def _read(self, call: PromptCall[Work], prompt: Prompt, field: str) -> list[int]:
        """The token ids of one text, once it is known to fit. Raises DiptychError."""
        work = call.work
        request = GenerationRequest(
            prompt=prompt,
            model=work.model,
            request_id=work.request_id,
            cache_salt=work.cache_salt,
            tenant=work.tenant,
            num_bytes=work.num_bytes,
        )
        try:
            token_ids = await self._admission.tokenize(request, call.errand.deadline_s)
            check_room(len(token_ids), self._max_len, request.prompt_field)
        except InvalidRequestError as error:
            names = {name: f"{field}.{name}" for name in ("text", "tokens") if field}
            raise renamed(error, names) from None
        await asyncio.sleep(0)  # there may be thousands of them
        return token_ids


def check_num_inputs(num_inputs: int, field: str) -> None:
    """For front ends too, before they go through them. Raises InvalidRequestError."""
    if not 1 <= num_inputs <= MAX_INPUTS:
        raise InvalidRequestError(f"has {num_inputs} items, not 1 to {MAX_INPUTS}", field=field)


def _score_job(before: Sequence[int], own: Sequence[int]) -> Job:
    end = len(before) + len(own)
    return Job(own, WantedLogprobs(max(1, len(before)), end, num_top=1), before)


def _vector(states: "array[float]", request: EmbedRequest) -> "array[float]":
    kept = states[: request.dimensions] if request.dimensions is not None else states
    if not request.normalize:
        return kept
    length = math.hypot(*kept) or 1.0
    return array("d", (value / length for value in kept))


def _usage(num_prompt_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=0,
        num_cached_tokens=min(num_cached_tokens, num_prompt_tokens),
    )
