"""Asks routers for the answer to a line, until there is one."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.stop import stop_never
from tenacity.wait import wait_random_exponential

from batch_server.records import Endpoint, Line
from batch_server.runner.answers import Answer, Verdict, judge, read_retry_after_s
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


class LineSender:
    """Sends lines to any of several routers. Event loop only; one for all batches.

    A line waits for as long as no router serves it; what failed amid its answer is tried a
    few times, the same each time, seed and id included.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        routers: Sequence[str],
        slots: Slots,
        max_attempts: int,
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
        self._sleep = sleep
        self._clock = clock
        self._tell_at_s = float("-inf")

    async def answer(self, endpoint: Endpoint, line: Line) -> Answer:
        """What becomes the line's result. Returns at last where a router serves it."""
        tries = _Tries(self._max_attempts)
        retrying = AsyncRetrying(
            sleep=self._sleep,
            wait=_pause_s,
            stop=stop_never,
            retry=retry_if_exception_type(_NotNowError),
        )
        return await retrying(self._try, endpoint, line, tries)

    async def _try(self, endpoint: Endpoint, line: Line, tries: "_Tries") -> Answer:
        async with self._slots.place():
            answer = await self._post(endpoint, line)
        match Verdict.LATER if answer is None else judge(answer.status):
            case Verdict.LATER:
                raise self._refused(answer)
            case Verdict.AGAIN if tries.has_more():
                raise _NotNowError
        assert answer is not None
        self._slots.pace.answered()
        return answer

    async def _post(self, endpoint: Endpoint, line: Line) -> Answer | None:
        """None: no router could be reached."""
        router = self._router
        headers = {"content-type": "application/json", "x-request-id": line.request_id}
        answer: Answer | None
        try:
            response = await self._client.post(
                self._routers[router] + endpoint, content=line.body, headers=headers
            )
        except (httpx.ConnectError, httpx.ConnectTimeout):
            answer = None
        except httpx.HTTPError as error:  # it may have been at work on it
            answer = Answer(500, _broken(error))
        else:
            retry_after_s = read_retry_after_s(response.headers.get("retry-after"))
            answer = Answer(response.status_code, response.content, retry_after_s)
        if answer is None or judge(answer.status) is not Verdict.KEEP:
            self._turn_from(router)
        return answer

    def _turn_from(self, router: int) -> None:
        """Ask the next, once, however many lines that one has failed together."""
        if self._router == router:
            self._router = (router + 1) % len(self._routers)

    def _refused(self, answer: Answer | None) -> _NotNowError:
        pause_s = max(_LEAST_PAUSE_S, 0.0 if answer is None else answer.retry_after_s)
        now_s = self._clock()
        self._slots.pace.refused(now_s, pause_s)
        if now_s >= self._tell_at_s:
            self._tell_at_s = now_s + _TELL_EVERY_S
            status = "none could be reached" if answer is None else str(answer.status)
            logger.warning("routers take no lines", extra={"status": status})
        return _NotNowError(pause_s)


class _Tries:
    """Of one line, of those that failed."""

    def __init__(self, most: int) -> None:
        self._num_left = most

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


def _broken(error: httpx.HTTPError) -> bytes:
    told = {
        "message": f"the connection broke ({type(error).__name__})",
        "type": "server_error",
        "param": None,
        "code": "connection_broken",
    }
    return json.dumps({"error": told}).encode()
