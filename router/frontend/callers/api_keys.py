"""Clients whose keys are in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from diptych.api_keys import digest, read_keys
from diptych.tenant import Tenant, Terms
from router.frontend.callers.watched_file import WatchedFile


class _Known(NamedTuple):
    tenants: Mapping[str, Tenant]  # by their keys' digests
    terms: Mapping[str, Terms]  # by their names


class ApiKeys:
    """Knows of each key whose it is, as the file says now. Event loop only."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError: it cannot be read, or makes no sense."""
        self._file: WatchedFile[_Known] = WatchedFile("api-keys", path, _read, what="keys")

    def tenant(self, key: str) -> Tenant | None:
        """Whose it is; None: it is not known, or not any more."""
        return self._file.content.tenants.get(digest(key)) if key else None

    def terms_of(self, name: str) -> Terms:
        """What the file says of the tenant of that name, however it comes."""
        return self._file.content.terms.get(name, Terms())

    async def run(self) -> None:
        """Keep them up to date, until cancelled: a change counts within three seconds."""
        await self._file.run()


def _read(text: str) -> _Known:
    tenants = read_keys(text)
    terms = {name: Terms(limits, classes) for name, limits, classes in tenants.values()}
    return _Known(tenants, terms)
