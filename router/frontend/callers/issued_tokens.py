"""Clients who come with a token of an issuer's: a JSON Web Token, signed with a key of theirs."""

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from diptych.errors import InvalidApiKeyError
from diptych.tenant import Tenant
from router.frontend.callers.signing_keys import SigningKeys
from router.frontend.callers.tokens import TokenReader, UnknownSigningKeyError

logger = logging.getLogger(__name__)

_TELL_EVERY_S: Final = 1.0


class KeySource(Protocol):
    """Where an issuer's keys come from. Event loop only."""

    @property
    def known(self) -> SigningKeys:
        """The last that were known; the same object while they are."""
        ...

    async def newer(self, than: SigningKeys) -> SigningKeys:
        """Those known after another look, which may have to be waited for; the same if there
        was none in time."""
        ...

    async def run(self) -> None:
        """Keep them up to date, until cancelled; it may end if nothing has to be done for it."""
        ...


class IssuedTokens:
    """See :class:`router.frontend.callers.callers.Tokens`. Event loop only.

    Why a token is refused is logged, each second once at most; nothing of the token is.
    """

    def __init__(
        self,
        reader: TokenReader,
        keys: KeySource,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._keys = keys
        self._clock = clock
        self._tell_at_s = clock()
        self._num_untold = 0

    async def tenant(self, token: str) -> Tenant:
        """See Tokens. One of a key that is not known waits until it was asked for."""
        try:
            return await self._read(token)
        except InvalidApiKeyError as error:
            self._tell(error.message)
            raise

    async def run(self) -> None:
        """See Tokens."""
        await self._keys.run()

    async def _read(self, token: str) -> Tenant:
        known = self._keys.known
        try:
            return self._reader.tenant(token, known)
        except UnknownSigningKeyError:
            newer = await self._keys.newer(known)
            if newer is known:
                raise
            return self._reader.tenant(token, newer)

    def _tell(self, why: str) -> None:
        now = self._clock()
        if now < self._tell_at_s:
            self._num_untold += 1
            return
        logger.warning("token refused", extra={"why": why, "num_untold": self._num_untold})
        self._tell_at_s, self._num_untold = now + _TELL_EVERY_S, 0
