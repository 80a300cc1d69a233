"""Clients whose keys are in a file."""

from collections.abc import Mapping
from pathlib import Path

from diptych.api_keys import digest, read_keys
from diptych.tenant import Tenant
from router.frontend.callers.watched_file import WatchedFile


class ApiKeys:
    """Knows of each key whose it is, as the file says now. Event loop only."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError: it cannot be read, or makes no sense."""
        self._file: WatchedFile[Mapping[str, Tenant]] = WatchedFile(
            "api-keys", path, read_keys, what="keys"
        )

    def tenant(self, key: str) -> Tenant | None:
        """Whose it is; None: it is not known, or not any more."""
        tenants = self._file.content
        return tenants.get(digest(key)) if key else None

    async def run(self) -> None:
        """Keep them up to date, until cancelled: a change counts within three seconds."""
        await self._file.run()
