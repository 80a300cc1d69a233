"""Workers from a YAML or JSON file that whoever starts them keeps up to date.

    prefill: ["10.0.0.1:50061"]
    decode: ["10.0.0.2:50062", {address: "10.0.0.3:50062", zone: a, nvlink_domain: rack-7}]

The file is read anew each time, so it may be replaced, also behind symbolic links, as
Kubernetes does with a mounted ConfigMap. Whoever writes it replaces it whole.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from diptych.errors import ConfigurationError
from router.discovery.source import Clock, Doubt, Freshness, Targets
from router.discovery_settings import check_addresses
from router.placement.place import NOWHERE, Place

_MAX_BYTES = 2**18


class _Worker(BaseModel):
    """An address, and where that is as far as it is known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    address: str
    zone: str = ""
    nvlink_domain: str = ""

    @property
    def place(self) -> Place:
        return Place(self.zone, self.nvlink_domain)


def _as_worker(value: object) -> object:
    """Its address alone is enough."""
    if isinstance(value, str):
        return {"address": value}
    if not isinstance(value, dict):
        raise ValueError("should be a string, host:port, or a mapping with an address")
    return value


def _check_workers(workers: list[_Worker]) -> list[_Worker]:
    check_addresses([worker.address for worker in workers])
    return workers


_Workers = Annotated[
    list[Annotated[_Worker, BeforeValidator(_as_worker)]], AfterValidator(_check_workers)
]


class _Pools(BaseModel):
    """What the file says.

    ``decode`` is not optional: a file cut short must not look whole. Without ``prefill`` there
    is no prefill pool; with an empty list there is one, and nobody in it now.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prefill: _Workers | None = None
    decode: _Workers


def read_targets(data: bytes) -> Targets:
    """What such a file says. Raises ValueError: one line that names the field."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"longer than {_MAX_BYTES} bytes")
    try:
        # With it all that is no list or mapping stays text: what a tag makes of it may raise
        # anything. Its twin in C ends the process where lists are nested too deeply.
        pools = _Pools.model_validate(yaml.load(data, Loader=yaml.BaseLoader))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{field}: {first['msg'].removeprefix('Value error, ')}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    prefill = pools.prefill or []
    return Targets(
        prefill=frozenset(worker.address for worker in prefill),
        decode=frozenset(worker.address for worker in pools.decode),
        has_prefill_pool=pools.prefill is not None,
        places={w.address: w.place for w in (*prefill, *pools.decode) if w.place != NOWHERE},
    )


class FileSet:
    """What the set is after each look at the file. Pure; owned by the discovery."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data: bytes | None = None  # of the last file that was right
        self._wrong: bytes | None = None  # what is there now, where that is not right
        self._targets: Targets | None = None  # what it said
        self._doubt = Doubt("the file of workers is wrong: those known stay", path=path)

    @property
    def is_right(self) -> bool:
        """Whether the file was right when it was last looked at."""
        return not self._doubt

    def look(self, found: bytes | OSError) -> Targets | None:
        """Take what was read; the set, if it is another than before.

        A file that is missing or wrong changes nothing, and is told of once.
        Raises ConfigurationError: it was never right yet.
        """
        if found == self._wrong:
            return None
        self._wrong = None
        if isinstance(found, OSError):
            self._complain(found.strerror or str(found))
            return None
        if found == self._data:
            self._doubt.over()
            return None
        try:
            targets = read_targets(found)
        except ValueError as error:
            self._complain(str(error))
            self._wrong = found
            return None
        self._data = found
        self._doubt.over()
        before, self._targets = self._targets, targets
        return None if targets == before else targets

    def _complain(self, problem: str) -> None:
        if self._data is None:
            raise ConfigurationError(f"--file.path: {self._path}: {problem}")
        self._doubt.because(problem)


class FileDiscovery:
    """Looks at a file again and again."""

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float,
        clock: Clock,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._sleep = sleep
        self._set = FileSet(str(path))
        self._freshness = Freshness(clock)

    @property
    def age_s(self) -> float:
        """Since the file was last read and was right; see :class:`Discovery`."""
        return self._freshness.age_s

    async def targets(self) -> AsyncIterator[Targets]:
        """See :class:`router.discovery.source.Discovery`."""
        while True:
            changed = await asyncio.to_thread(self._look)
            if self._set.is_right:
                self._freshness.heard()
            if changed is not None:
                yield changed
            await self._sleep(self._interval_s)

    def _look(self) -> Targets | None:
        """Off the event loop, as the disk may be slow and the file long."""
        return self._set.look(_read(self._path))


def _read(path: Path) -> bytes | OSError:
    """Its content, up to where it is too long; or why there is none."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            return OSError("not a file")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except OSError as error:
        return error
