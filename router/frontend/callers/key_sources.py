"""Where an issuer's keys come from: a file, or the issuer itself, asked over HTTPS."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import httpx

from router.frontend.callers.signing_keys import SigningKeys, read_signing_keys
from router.frontend.callers.watched_file import WatchedFile, trusting

logger = logging.getLogger(__name__)

MAX_EARLY: Final = 64
"""Tokens that wait while the issuer may not be asked yet: anybody can send such ones."""

_ANSWER_S: Final = 5.0  # for all of it, however slowly it comes; so long a token waits, too
_MAX_BYTES: Final = 2**18
_LEAST_BETWEEN_S: Final = 5.0  # two questions that tokens of unknown keys caused
_RETRY_S: Final = 10.0
_DISCOVERY_PATH: Final = "/.well-known/openid-configuration"


class Asked(Protocol):
    """Who tells the keys."""

    async def __call__(self) -> bytes:
        """Its key set. Raises what it likes."""
        ...

    async def run(self) -> None:
        """Follow whatever is needed to ask, until cancelled; it may end if there is nothing."""
        ...


class FileKeys:
    """Those in a file, which may be replaced at any time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError: it cannot be read, or makes no sense."""
        self._file: WatchedFile[SigningKeys] = WatchedFile(
            "jwt.jwks", path, read_signing_keys, what="keys of tokens"
        )

    @property
    def known(self) -> SigningKeys:
        """See :class:`router.frontend.callers.issued_tokens.KeySource`."""
        return self._file.content

    async def newer(self, than: SigningKeys) -> SigningKeys:
        """See KeySource."""
        return self._file.content

    async def run(self) -> None:
        """See KeySource."""
        await self._file.run()


class FetchedKeys:
    """Those that the issuer tells, asked for again and again, and when a token names another.

    An answer that does not come, or makes no sense, changes nothing for keys that are known;
    that is logged once. However many tokens name unknown keys, the issuer is asked each
    ``_LEAST_BETWEEN_S`` at most, and they all wait for one answer. While that time is not over,
    no more than ``MAX_EARLY`` do.
    """

    def __init__(
        self, issuer: Asked, refresh_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuer = issuer
        self._refresh_s = refresh_s
        self._clock = clock
        self._known = SigningKeys()
        self._is_asking = True  # from the start on: who comes before the first answer waits
        self._asked_s = 0.0
        self._num_early = 0
        self._wanted = asyncio.Event()
        self._answered = asyncio.Event()  # another for each time of asking
        self._refused = ""  # why the last answer was no use

    @property
    def known(self) -> SigningKeys:
        """See :class:`router.frontend.callers.issued_tokens.KeySource`."""
        return self._known

    async def newer(self, than: SigningKeys) -> SigningKeys:
        """See KeySource."""
        if self._known is not than:
            return self._known
        is_early = not self._is_asking and self._until_next_s() > 0
        if is_early and self._num_early >= MAX_EARLY:
            return self._known
        self._num_early += is_early
        self._wanted.set()
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._answered.wait()
        except TimeoutError:
            pass
        finally:
            self._num_early -= is_early
        return self._known

    async def run(self) -> None:
        """See KeySource."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._issuer.run())
            tasks.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        while True:
            self._is_asking = True
            self._asked_s = self._clock()
            await self._ask()
            self._is_asking = False
            self._wanted.clear()
            answered, self._answered = self._answered, asyncio.Event()
            answered.set()
            await self._pause()

    async def _pause(self) -> None:
        """Until it is time to ask again."""
        pause_s = min(_RETRY_S, self._refresh_s) if self._refused else self._refresh_s
        try:
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
                await asyncio.sleep(self._until_next_s())
        except TimeoutError:
            pass

    def _until_next_s(self) -> float:
        """Before a token may have the issuer asked."""
        return self._asked_s + _LEAST_BETWEEN_S - self._clock()

    async def _ask(self) -> None:
        try:
            found = read_signing_keys(await self._issuer())
        except Exception as error:  # noqa: BLE001 - whatever it is, those known stay
            why = " ".join(str(error).split()) or type(error).__name__
            if why != self._refused:
                self._refused = why
                extra = {"why": why, "num_known": len(self._known)}
                logger.error("keys of tokens not fetched: those known stay", extra=extra)
            return
        self._refused = ""
        if found != self._known:
            self._known = found
            logger.info("keys of tokens taken over", extra={"num_keys": len(found)})


class Issuer:
    """Asks an issuer for its keys: at the address that is named, or that it says itself."""

    def __init__(self, issuer: str, jwks_url: str | None, ca: Path | None) -> None:
        """``ca``: whom to believe that it is the issuer, as the file says while ``run`` does; None:
        whom the system believes.

        Raises ConfigurationError: the file is missing, or holds no certificate.
        """
        self._issuer = issuer
        self._url = jwks_url
        self._ca = (
            None
            if ca is None
            else WatchedFile("jwt.ca", ca, trusting, what="authority of the issuer")
        )
        self._system = ssl.create_default_context()

    async def run(self) -> None:
        """See Asked."""
        if self._ca is not None:
            await self._ca.run()

    async def __call__(self) -> bytes:
        """The key set as it came. Raises an exception of httpx, TimeoutError or ValueError."""
        trusted = self._system if self._ca is None else self._ca.content
        async with (
            asyncio.timeout(_ANSWER_S),
            httpx.AsyncClient(verify=trusted, trust_env=False, timeout=_ANSWER_S) as client,
        ):
            url = self._url or await self._discover(client)
            return await _get(client, url)

    async def _discover(self, client: httpx.AsyncClient) -> str:
        """What OpenID's discovery says. Each time anew, for the address may change."""
        data = await _get(client, self._issuer.rstrip("/") + _DISCOVERY_PATH)
        try:
            told = json.loads(data)
        except (ValueError, RecursionError):
            raise ValueError(f"{_DISCOVERY_PATH} is not JSON") from None
        if not isinstance(told, dict) or told.get("issuer") != self._issuer:
            raise ValueError(f"{_DISCOVERY_PATH} is of another issuer")
        url = told.get("jwks_uri")
        scheme = self._issuer.partition(":")[0]
        if not isinstance(url, str) or not url.startswith(("https://", f"{scheme}://")):
            raise ValueError(f"{_DISCOVERY_PATH} names no jwks_uri that could be believed")
        return url


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    """An answer of 200, whole and not too long; none that is elsewhere."""
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    data = bytearray()
    async with client.stream("GET", url, headers=headers) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answered {response.status_code}")
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > _MAX_BYTES:
                raise ValueError(f"{url} answered more than {_MAX_BYTES} bytes")
    return bytes(data)
