"""Who a client is, by the key or the token that it sends."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from diptych.errors import InvalidApiKeyError
from diptych.tenant import NOBODY, Tenant
from router.frontend.callers.api_keys import ApiKeys

_SCHEME = "bearer "

Metadata = Sequence[tuple[str, str | bytes]]


class Callers(Protocol):
    """Knows clients. Event loop only."""

    async def tenant(self, authorization: str | None) -> Tenant:
        """Whose a request is that comes with this ``authorization``. Raises InvalidApiKeyError."""
        ...

    async def run(self) -> None:
        """Keep what is known of them up to date, until cancelled; it may end if nothing can change.

        A task of the process that serves them.
        """
        ...


class Tokens(Protocol):
    """Knows those who come with a token of an issuer's."""

    async def tenant(self, token: str) -> Tenant:
        """Whose it is. Raises InvalidApiKeyError, which says nothing of the token's content."""
        ...

    async def run(self) -> None:
        """See :class:`Callers`."""
        ...


class Anybody:
    """Everybody is let in, and all are one tenant."""

    async def tenant(self, authorization: str | None) -> Tenant:
        """See :class:`Callers`."""
        return NOBODY

    async def run(self) -> None:
        """See :class:`Callers`."""


class KnownCallers:
    """Those with a key, those with a token, or both: a key is looked for first.

    What a token does not say of its tenant the keys' file may.
    """

    def __init__(self, keys: ApiKeys | None, tokens: Tokens | None = None) -> None:
        self._keys = keys
        self._tokens = tokens

    async def tenant(self, authorization: str | None) -> Tenant:
        """See :class:`Callers`."""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise InvalidApiKeyError("a key is needed: authorization: Bearer KEY")
        given = authorization[len(_SCHEME) :].strip()
        tenant = None if self._keys is None else self._keys.tenant(given)
        if tenant is not None:
            return tenant
        if self._tokens is not None and (self._keys is None or given.count(".") == 2):
            tenant = await self._tokens.tenant(given)
            return tenant if self._keys is None else tenant.over(self._keys.terms_of(tenant.name))
        raise InvalidApiKeyError("the key is not known, or not any more")

    async def run(self) -> None:
        """See :class:`Callers`."""
        async with asyncio.TaskGroup() as tasks:
            for known in (self._keys, self._tokens):
                if known is not None:
                    tasks.create_task(known.run(), name=type(known).__name__)


def authorization(metadata: Metadata) -> str | None:
    """What a call's metadata says of who calls; the first counts."""
    return next((str(value) for name, value in metadata if name == "authorization"), None)
