"""Who a client is, by the key that it sends."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from diptych.api_keys import digest, read_keys
from diptych.errors import ConfigurationError, InvalidApiKeyError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_MAX_FILE_BYTES = 2**22
_SCHEME = "bearer "

Metadata = Sequence[tuple[str, str | bytes]]


class Callers(Protocol):
    """Knows clients."""

    def tenant(self, authorization: str | None) -> str:
        """Whose a request is that comes with this ``authorization``. Raises InvalidApiKeyError."""
        ...


class Anybody:
    """Everybody is let in, and all are one tenant."""

    def tenant(self, authorization: str | None) -> str:
        return ""


class ApiKeys:
    """Those whose keys are in a file, which is looked at again each second. Event loop only.

    One that has changed is taken over when it is still the same a second later: it may be
    written to. A file that cannot be read, or makes no sense, changes nothing for the keys that
    are known; that is logged once.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigurationError: it cannot be read, or makes no sense."""
        self._path = path
        self._clock = clock
        self._version: object = None  # of what is known
        self._seen: object = None  # when last looked at
        self._tenants: Mapping[str, str] = {}
        self._refused = ""
        self._looked_s = clock()
        self._read(at_once=True)

    def tenant(self, authorization: str | None) -> str:
        self._look()
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise InvalidApiKeyError("a key is needed: authorization: Bearer KEY")
        key = authorization[len(_SCHEME) :].strip()
        tenant = self._tenants.get(digest(key)) if key else None
        if tenant is None:
            raise InvalidApiKeyError("the key is not known, or not any more")
        return tenant

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now
        try:
            self._read()
            self._refused = ""
        except ConfigurationError as error:
            if self._refused != error.message:
                self._refused = error.message
                logger.error("keys not taken over", extra={"why": error.message})

    def _read(self, *, at_once: bool = False) -> None:
        try:
            status = self._path.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            before, self._seen = self._seen, version
            if version == self._version or not (at_once or version == before):
                return
            if status.st_size > _MAX_FILE_BYTES:
                raise ValueError(f"has more than {_MAX_FILE_BYTES} bytes")
            tenants = read_keys(self._path.read_text())
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigurationError(f"--api-keys: {self._path}: {why}") from None
        if self._version is not None:
            logger.info("keys taken over", extra={"num_keys": len(tenants)})
        self._version, self._tenants = version, tenants


def authorization(metadata: Metadata) -> str | None:
    """What a call's metadata says of who calls; the first counts."""
    return next((str(value) for name, value in metadata if name == "authorization"), None)


def callers_of(path: Path | None) -> Callers:
    """Those of the setting ``--api-keys``. Raises ConfigurationError."""
    return Anybody() if path is None else ApiKeys(path)
