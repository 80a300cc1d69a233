"""Prompts that only prefill workers compute: each a request of its own, which draws nothing."""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diptych.errors import DiptychError, ModelChangedError
from diptych.sampling_params import SamplingParams
from diptych.text.detokenizer import Detokenizer
from diptych.text.tokenizer import Tokenizer
from diptych.token_logprobs import PromptLogprobs
from router.placement.claim import Claim
from router.request.emitted_tokens import RequestShape
from router.request.observer import Observer
from router.request.prompt_told import Wanted
from router.request.resolved import ResolvedRequest
from router.request.response_builder import ResponseBuilder
from router.request.services import Services
from router.request.session import Session

_MAX_TRIES = 2  # of a call: weights are not replaced twice in so short a time
# Workers draw a token behind every prompt; nobody looks at this one.
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


class Job(NamedTuple):
    """Tokens, and what to tell of them.

    They are joined only while they are computed: thousands may share what comes before.
    """

    own: Sequence[int]
    wanted: Wanted
    before: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Of both."""
        return len(self.before) + len(self.own)


class JobResult(NamedTuple):
    """What was told: numbers as small as they came, since all of a call wait for the last job."""

    logprobs: "array[float]"
    is_greedy: bool
    """Whether each of their tokens is the likeliest that was told in its place."""
    states: "array[float]"
    num_cached_tokens: int
    model_digest: str = ""  # of the weights that it was placed on; empty: not known


@dataclass(slots=True)
class Errand:
    """What the jobs of one call have in common."""

    request_id: str
    cache_salt: bytes
    deadline_s: float | None  # a moment of the monotonic clock
    observer: Observer
    claim: Claim
    num_placed_tokens: int = 0
    """Of jobs that ended, however they did, and of which a worker was asked."""


class PromptJobs:
    """Runs jobs on the prefill pool. Event loop only.

    Placement, retries and failures are those of any request (:mod:`router.request.machine`).
    """

    def __init__(self, tokenizer: Tokenizer, services: Services) -> None:
        self._tokenizer = tokenizer
        self._services = services

    async def run(self, jobs: Sequence[Job], errand: Errand) -> list[JobResult]:
        """All results, in the jobs' order. The first failure ends all. Raises DiptychError.

        They are compared with each other, so all are of one model: where weights were replaced
        meanwhile, all are computed anew.
        """
        for _ in range(_MAX_TRIES):
            results = await self._try(jobs, errand)
            if len({result.model_digest for result in results}) == 1:
                return results
        raise ModelChangedError("models of different digests answered, as amid a rollout: ask anew")

    async def _try(self, jobs: Sequence[Job], errand: Errand) -> list[JobResult]:
        """Jobs of like lengths go together, so that steps are full."""
        results: dict[int, JobResult] = {}
        failures: list[DiptychError] = []
        running: list[asyncio.Task[None]] = []

        def fail(error: DiptychError) -> None:
            failures.append(error)
            for task in running:
                task.cancel()

        num_at_once = self._services.config.num_at_once
        turns = iter(sorted(range(len(jobs)), key=lambda index: jobs[index].num_tokens))
        async with asyncio.TaskGroup() as tasks:
            for number in range(min(len(jobs), num_at_once)):
                work = self._work(turns, jobs, errand, results, fail)
                running.append(tasks.create_task(work, name=f"prompt-job-{number}"))
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(jobs))]

    async def _work(
        self,
        turns: Iterator[int],
        jobs: Sequence[Job],
        errand: Errand,
        results: dict[int, JobResult],
        fail: Callable[[DiptychError], None],
    ) -> None:
        """Do one job after another, until none is left or one failed."""
        for index in turns:
            try:
                results[index] = await self._run_one(jobs[index], errand)
            except DiptychError as error:
                fail(error)
                return

    async def _run_one(self, job: Job, errand: Errand) -> JobResult:
        shape = RequestShape(prompt_ids=(*job.before, *job.own), max_tokens=1, told=job.wanted)
        request = ResolvedRequest(
            shape=shape, sampling=_SAMPLING, cache_salt=errand.cache_salt, claim=errand.claim
        )
        builder = ResponseBuilder(
            shape,
            Detokenizer(self._tokenizer, (), 0),
            received_s=time.monotonic(),
            clock=time.monotonic,
            max_unsent=self._services.config.client_buffer_messages,
        )
        session = Session(
            errand.request_id,
            request,
            builder,
            errand.observer,
            self._services,
            deadline_s=errand.deadline_s,
            on_failed=lambda: None,
        )
        logprobs, is_greedy = array("f"), True
        try:
            session.start()
            while (event := await session.next_event()) is not None:
                if isinstance(event, PromptLogprobs):
                    logprobs.extend(found.logprob for found in event.logprobs)
                    is_greedy = is_greedy and _is_greedy(event, shape.prompt_ids)
        finally:
            session.close()
            if builder.moments.placed_s is not None:
                errand.num_placed_tokens += job.num_tokens
        cached, digest = session.usage.num_cached_tokens, session.model_digest
        return JobResult(logprobs, is_greedy, builder.states, cached, digest)


def _is_greedy(part: PromptLogprobs, prompt_ids: Sequence[int]) -> bool:
    token_ids = prompt_ids[part.position : part.position + len(part.logprobs)]
    return all(
        found.top_token_ids == (token_id,)
        for token_id, found in zip(token_ids, part.logprobs, strict=True)
    )
