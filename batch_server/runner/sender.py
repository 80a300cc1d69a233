"""Asks routers for the answer to a line, until there is one."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Final, NamedTuple

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.stop import stop_never
from tenacity.wait import wait_random_exponential

from batch_server.records import Endpoint, LineOwner
from batch_server.runner.answers import (
    WORKER_LOST,
    Answer,
    Verdict,
    failed,
    judge,
    read_answer,
)
from batch_server.runner.slots import Slots

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S: Final = 1.0  # of all lines, after a router had no room
_TELL_EVERY_S: Final = 10.0
_BACKOFF: Final = wait_random_exponential(multiplier=0.5, max=30)


class _NotNowError(Exception):
    """The line is sent again."""

    def __init__(self, retry_after_s: float = 0.0) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class AnswerBounds(NamedTuple):
    """Of what a router answers to one line."""

    max_bytes: int = 2**26
    timeout_s: float = 1800.0


class LineSender:
    """Sends lines to any of several routers. Event loop only; one for all batches.

    A line waits for as long as no router serves it, and with it all others, unless the router
    says that it is this line's matter, or others were served while it waited for workers. What
    failed amid its answer is tried a few times, the same each time, seed and id included.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        routers: Sequence[str],
        slots: Slots,
        max_attempts: int,
        bounds: AnswerBounds = AnswerBounds(),  # noqa: B008 - a tuple never changes
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``routers`` are addresses as ``http://host:port``; ``client`` has what they ask for."""
        self._client = client
        self._routers = routers
        self._router = 0  # the one that is asked
        self._slots = slots
        self._max_attempts = max_attempts
        self._bounds = bounds
        self._sleep = sleep
        self._clock = clock
        self._tell_at_s = float("-inf")
        self._num_served = 0  # lines whose answer was a good one
        self._alone = asyncio.Lock()  # of suspects: so none is taken for another one's doing

    async def answer(
        self,
        owner: LineOwner,
        endpoint: Endpoint,
        request_id: str,
        read_body: Callable[[], Awaitable[bytes]],
    ) -> Answer:
        """What becomes the line's result. Returns at last where a router serves it.

        The body is read by who has a place: so many are in memory, however many lines wait.
        """
        tries = _Tries(self._max_attempts)
        retrying = AsyncRetrying(
            sleep=self._sleep,
            wait=_pause_s,
            stop=stop_never,
            retry=retry_if_exception_type(_NotNowError),
        )
        return await retrying(self._try, owner, endpoint, request_id, read_body, tries)

    async def _try(
        self,
        owner: LineOwner,
        endpoint: Endpoint,
        request_id: str,
        read_body: Callable[[], Awaitable[bytes]],
        tries: "_Tries",
    ) -> Answer:
        turn = self._alone if tries.is_suspect else nullcontext()
        async with turn, self._slots.place(owner):
            body, num_before = await read_body(), self._num_served
            answer = await self._post(endpoint, request_id, body)
            return self._judged(answer, tries, self._num_served > num_before)

    def _judged(self, answer: Answer | None, tries: "_Tries", others_were_served: bool) -> Answer:
        """One that is the line's result; what it tells of the routers counts at once.

        Raises _NotNowError.
        """
        if answer is None:
            raise self._refused("none could be reached")
        tries.is_suspect |= answer.code == WORKER_LOST
        match judge(answer, others_were_served=others_were_served):
            case Verdict.LATER:
                raise self._refused(str(answer.status), answer.retry_after_s)
            case Verdict.ALONE:
                raise _NotNowError(max(_LEAST_PAUSE_S, answer.retry_after_s))
            case Verdict.AGAIN if tries.has_more():
                raise _NotNowError
        self._slots.pace.answered()
        self._num_served += 200 <= answer.status < 300
        return answer

    async def _post(self, endpoint: Endpoint, request_id: str, body: bytes) -> Answer | None:
        """None: no router could be reached."""
        router = self._router
        answer: Answer | None
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                answer = await self._ask(self._routers[router] + endpoint, request_id, body)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            answer = None
        except httpx.HTTPError as error:  # it may have been at work on it
            why = f"the connection broke ({type(error).__name__})"
            answer = failed("connection_broken", why)
        except TimeoutError:
            answer = failed("timeout", f"no answer within {self._bounds.timeout_s:g} s")
        if answer is None or judge(answer) in (Verdict.LATER, Verdict.AGAIN):
            self._turn_from(router)
        return answer

    async def _ask(self, url: str, request_id: str, body: bytes) -> Answer:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        pieces: list[bytes] = []
        num_bytes = 0
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            async for piece in response.aiter_bytes():
                num_bytes += len(piece)
                if num_bytes > self._bounds.max_bytes:
                    why = f"the answer has more than {self._bounds.max_bytes} bytes"
                    return failed("answer_too_large", why)
                pieces.append(piece)
        retry_after = response.headers.get("retry-after")
        data = b"".join(pieces)
        return await asyncio.to_thread(read_answer, response.status_code, data, retry_after)

    def _turn_from(self, router: int) -> None:
        """Ask the next, once, however many lines that one has failed together."""
        if self._router == router:
            self._router = (router + 1) % len(self._routers)

    def _refused(self, status: str, retry_after_s: float = 0.0) -> _NotNowError:
        pause_s = max(_LEAST_PAUSE_S, retry_after_s)
        now_s = self._clock()
        self._slots.pace.refused(now_s, pause_s)
        if now_s >= self._tell_at_s:
            self._tell_at_s = now_s + _TELL_EVERY_S
            logger.warning("routers take no lines", extra={"status": status})
        return _NotNowError(pause_s)


class _Tries:
    """Of one line, of those that failed."""

    def __init__(self, most: int) -> None:
        self._num_left = most
        self.is_suspect = False  # workers were lost amid it: it, or one beside it, may end them

    def has_more(self) -> bool:
        """Whether it is tried once more, after one that failed."""
        self._num_left -= 1
        return self._num_left > 0


def _pause_s(state: RetryCallState) -> float:
    """What the router asks for, and on top of it what grows."""
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, _NotNowError)
    return error.retry_after_s + _BACKOFF(state)
