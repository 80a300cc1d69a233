"""Whether a request may come in, and what it becomes: room, checks, token ids, a context length.

What is refused here has cost no worker anything.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from diptych.errors import (
    RETRY_LATER_S,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    NotServedError,
    NoWorkerError,
    QueueFullError,
    WorkerDrainingError,
)
from diptych.shared_room import SharedRoom
from diptych.tenant import Tenant
from router.cluster.members import Cluster
from router.config import RouterConfig
from router.frontend import validation
from router.frontend.checked_form import CheckedForm
from router.frontend.constraint_check import ConstraintCheck
from router.frontend.fair_places import FairPlaces
from router.frontend.free_calls import calls_beside
from router.frontend.served_model import ServedModel
from router.frontend.service_classes import ServiceClasses
from router.frontend.thoughts import thoughts_of
from router.frontend.tools import constraint_of, of_tools
from router.frontend.validation import CheckLength, EncodedPrompt, ModelFacts, check_room
from router.generation.request import ChatPrompt, GenerationRequest, TokenPrompt
from router.placement.claim import NO_CLAIM, Claim
from router.request.resolved import ResolvedRequest

T = TypeVar("T")
PROMPT_LOGPROBS = "sampling.prompt_logprobs"
_MOST_WORDS = 8  # requests whose bad words are kept in tokens
_FREE_BYTES = 65_536  # of each request: large ones keep out no small one
_INLINE_BYTES = 4096  # larger requests are tokenised in a thread
_INLINE_IDS = 4096  # more become text in a thread
_MAX_TOKENIZING = 2  # at a time


def most_open(config: RouterConfig) -> int:
    """How many requests may be open without one of them being one too many.

    Up to ``max_queue`` wait at each of three places: to be tokenised, for the first
    worker, and for room on the workers.
    """
    return config.max_concurrent + 3 * config.max_queue + _MAX_TOKENIZING


class Admission:
    """Owns the count of open requests and of the bytes they arrived with. Event loop only.

    Invariant: what ``hold`` counted in it counts out, however the request ends.
    """

    def __init__(self, model: ServedModel, cluster: Cluster, config: RouterConfig) -> None:
        self._model = model
        self._cluster = cluster
        self._config = config
        self._tokenizing = ThreadPoolExecutor(_MAX_TOKENIZING, thread_name_prefix="tokenizing")
        self._constraints = ConstraintCheck()
        self._classes = ServiceClasses(config.classes, config.objectives, time.monotonic)
        self._is_draining = False
        self.is_cut_off = False
        """Whether what is open is ended, by the router."""
        self._num_arrived = 0
        self._num_open = 0
        self._open = SharedRoom(
            config.max_open_bytes, "large requests of {} bytes are open", free=_FREE_BYTES
        )
        self._num_unfound = 0
        self._to_tokenize = FairPlaces(
            _MAX_TOKENIZING, config.max_queue, "long prompts wait to be tokenised"
        )
        self._bad_words: dict[tuple[str, ...], frozenset[tuple[int, ...]]] = {}  # of late
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> ServedModel:
        """What is served."""
        return self._model

    @property
    def max_model_len(self) -> int:
        """The model's context, or less where the workers have less."""
        model_len = self._model.tokenizer.max_model_len
        workers_len = self._cluster.max_model_len
        return model_len if workers_len is None else min(model_len, workers_len)

    @property
    def num_at_once(self) -> int:
        """See :attr:`router.config.RouterConfig.num_at_once`."""
        return self._config.num_at_once

    @property
    def is_ready(self) -> bool:
        """Whether a request could be placed now."""
        return self._cluster.is_ready and not self._is_draining

    @property
    def num_open(self) -> int:
        """Requests that are not answered yet."""
        return self._num_open

    @property
    def num_arrived(self) -> int:
        """Requests that were ever counted as open."""
        return self._num_arrived

    def drain(self) -> None:
        """Take nothing new."""
        self._is_draining = True

    def cut_off(self) -> None:
        """The time to drain is over: whoever ends from now on did not leave by itself."""
        self._is_draining = self.is_cut_off = True

    async def close(self) -> None:
        """End what outlives requests."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        await self._constraints.close()

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    @contextmanager
    def hold(self, tenant: Tenant, num_bytes: int) -> Iterator[None]:
        """Count a request as open, for as long as what arrived is in memory.

        Raises QueueFullError if the large ones that are open arrived with too many bytes already,
        or the tenant's with as many as are free.
        """
        self._open.admit_piece(tenant.name, num_bytes)
        self._num_arrived += 1
        self._num_open += 1
        release = self._open.hold(tenant.name, num_bytes)
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            release()
            if self._num_open == 0:
                self._idle.set()

    async def admit(
        self, request: GenerationRequest, deadline_s: float | None, *, is_part: bool = False
    ) -> ResolvedRequest:
        """Everything that can be done before a worker is asked. Raises DiptychError.

        ``is_part``: of what was let in as a whole, which a drain waits for.
        """
        if not is_part:
            self.check_open(deadline_s)
        claim = self._classes.claim(request.level, request.tenant, deadline_s)
        prompt = await self._tokenize(request, deadline_s)
        resolved = self._resolve(request, prompt, claim, None)
        form = await self._check_constraint(request, prompt, deadline_s)
        if self._cluster.max_model_len is None:
            await self._wait_found(deadline_s)
        elif form is None:
            self._check_told(resolved)
            return resolved
        resolved = self._resolve(request, prompt, claim, form)
        self._check_told(resolved)
        return resolved

    def _check_told(self, resolved: ResolvedRequest) -> None:
        """Raise InvalidRequestError: nobody here can tell what is asked of the prompt."""
        if resolved.shape.told is not None and not self._cluster.may_have_prefill:
            raise InvalidRequestError(
                "prefill workers tell them, and there shall be none", field=PROMPT_LOGPROBS
            )

    async def admit_prompts(self, what: str, deadline_s: float | None) -> None:
        """As ``admit``, for work that prefill workers alone do, before anything is tokenised.

        Raises DiptychError; NotServedError where there shall be none of them.
        """
        self.check_open(deadline_s)
        if self._cluster.max_model_len is None:
            await self._wait_found(deadline_s)
        if not self._cluster.may_have_prefill:
            raise NotServedError(f"{what} is the work of prefill workers, and there shall be none")

    def claim_of_prompts(self, tenant: Tenant) -> Claim:
        """What a tenant's work on prompts alone may claim."""
        return self._classes.claim_without_objectives(tenant)

    async def tokenize(self, request: GenerationRequest, deadline_s: float | None) -> list[int]:
        """The token ids of a request's prompt, once the request is checked. Raises DiptychError.

        Nothing is to answer them, so they may be more than the context. Hopelessly long texts are
        refused, others wait for their turn, until the deadline.
        """
        return (await self._tokenize(request, deadline_s, validation.check_num_ids)).token_ids

    async def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special: bool,
        tenant: Tenant,
        deadline_s: float | None,
    ) -> str:
        """The text of what ``tokenize`` said. Raises DiptychError; many wait for their turn."""
        decode = partial(self._model.tokenizer.decode, token_ids, skip_special=skip_special)
        if len(token_ids) <= _INLINE_IDS:
            return decode()
        return await _within(deadline_s, self._in_turn(tenant, decode))

    async def _tokenize(
        self,
        request: GenerationRequest,
        deadline_s: float | None,
        check_length: CheckLength = check_room,
    ) -> EncodedPrompt:
        if request.model not in ("", self._model.name):
            raise ModelNotFoundError(
                f"no model {request.model[:128]!r} here; there is {self._model.name!r}"
            )
        facts = self._facts()
        validation.check(request, facts, check_length)
        prompt = await _within(deadline_s, self._encode(request, facts.max_model_len))
        if not request.sampling.bad_words:
            return prompt
        return prompt._replace(bad_words=await _within(deadline_s, self._encode_words(request)))

    async def check(self, request: GenerationRequest, deadline_s: float | None) -> ResolvedRequest:
        """What it becomes, as far as that needs no worker. Raises DiptychError.

        For several requests that are answered as one, before any of them begins.
        """
        prompt = await self._tokenize(request, deadline_s)
        return self._resolve(request, prompt, NO_CLAIM, None)

    def check_open(self, deadline_s: float | None) -> None:
        """Raise WorkerDrainingError or DeadlineExceededError: nothing more is let in."""
        if self._is_draining:
            raise WorkerDrainingError("the router shuts down", retry_after_s=RETRY_LATER_S)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise DeadlineExceededError("the request's deadline passed")

    def _facts(self) -> ModelFacts:
        tokenizer = self._model.tokenizer
        return ModelFacts(
            tokenizer.vocab_size,
            self.max_model_len,
            tokenizer.eos_token_ids,
            self._model.recommended,
        )

    async def _check_constraint(
        self, request: GenerationRequest, prompt: EncodedPrompt, deadline_s: float | None
    ) -> CheckedForm | None:
        """What it is held to; None: nothing. Waits for others' until the deadline."""
        constraint, given = constraint_of(request), request.sampling.constraint
        if constraint is None:
            return None
        thoughts = thoughts_of(request, prompt, self._model)
        calls = calls_beside(request, self._model)
        check = partial(self._constraints.check, tenant=request.tenant.name)
        checking = partial(check, constraint, thoughts=thoughts, calls=calls)
        tokenizer, emitted_ids = self._model.tokenizer, request.emitted_token_ids
        spellings = (
            tokenizer.text.spelling(each)
            for each in emitted_ids
            if each not in tokenizer.eos_token_ids
        )
        is_given = constraint is given
        if given is not None and not is_given:  # calls have no use for it, but it is not wrong
            await _within(deadline_s, check(given))
        try:
            return await _within(deadline_s, checking(b"".join(spellings)))
        except InvalidRequestError as error:
            if is_given or not isinstance(request.prompt, ChatPrompt):
                raise
            raise of_tools(error, request.prompt) from None

    def _resolve(
        self,
        request: GenerationRequest,
        prompt: EncodedPrompt,
        claim: Claim,
        form: CheckedForm | None,
    ) -> ResolvedRequest:
        return validation.resolve(
            request,
            prompt,
            self._facts(),
            drawn_seed=secrets.randbits(63),
            claim=claim,
            bad_words=prompt.bad_words,
            form=form,
        )

    async def _encode(self, request: GenerationRequest, max_model_len: int) -> EncodedPrompt:
        tokenizer = self._model.tokenizer
        if request.num_bytes <= _INLINE_BYTES or isinstance(request.prompt, TokenPrompt):
            return validation.tokenize(request, tokenizer, max_model_len)
        tokenize = partial(validation.tokenize, request, tokenizer, max_model_len)
        return await self._in_turn(request.tenant, tokenize)

    async def _encode_words(self, request: GenerationRequest) -> frozenset[tuple[int, ...]]:
        """The tokens of its bad words: of several prompts that have the same ones, once."""
        words = tuple(request.sampling.bad_words)
        found = self._bad_words.get(words)
        if found is None:
            tokenize = partial(validation.tokenize_bad_words, words, self._model.tokenizer)
            found = await self._in_turn(request.tenant, tokenize)
            if len(self._bad_words) >= _MOST_WORDS:
                self._bad_words.pop(next(iter(self._bad_words)), None)  # the first that came
            self._bad_words[words] = found
        return found

    async def _in_turn(self, tenant: Tenant, work: Callable[[], T]) -> T:
        """What ``work`` makes in a thread, once that is there for the tenant."""
        async with self._to_tokenize.place(tenant.name):
            # Of those whose client leaves the one that has a thread keeps it until it is done.
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def _wait_found(self, deadline_s: float | None) -> None:
        """No worker was ever heard of: wait for the first, within bounds."""
        if self._num_unfound >= self._config.max_queue:
            raise QueueFullError(
                f"{self._num_unfound} requests wait already", retry_after_s=RETRY_LATER_S
            )
        patience_s = self._config.timers.no_worker_s
        left_s = patience_s if deadline_s is None else deadline_s - time.monotonic()
        self._num_unfound += 1
        try:
            async with asyncio.timeout(min(patience_s, left_s)):
                await self._cluster.wait_found()
        except TimeoutError:
            if left_s < patience_s:
                raise DeadlineExceededError("the request's deadline passed") from None
            raise NoWorkerError("no worker was found", retry_after_s=RETRY_LATER_S) from None
        finally:
            self._num_unfound -= 1


async def _within(deadline_s: float | None, waiting: Awaitable[T]) -> T:
    """Raises DeadlineExceededError."""
    left_s = None if deadline_s is None else deadline_s - time.monotonic()
    try:
        async with asyncio.timeout(left_s):
            return await waiting
    except TimeoutError:
        raise DeadlineExceededError("the request's deadline passed") from None
