"""Speaks with a batch server over HTTP, for the commands of ``diptych batch``."""

import io
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from diptych.cli.batch_client import AwayError, BatchError, nobody_at
from diptych.client.batches import BatchState, name_of
from diptych.errors import ConfigurationError
from diptych.rpc.channel import is_loopback

_TIMEOUT_S: Final = 60.0
_DISK_FULL: Final = 507

T = TypeVar("T")
Told: TypeAlias = Mapping[str, object]


class _RefusedError(BatchError):
    """The server said that it will not do it."""


class _Unchanged(io.FileIO):
    """A file whose size is told before it is sent."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._num_left = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises BatchError: it became longer or shorter meanwhile."""
        data = super().read(size)
        self._num_left -= len(data)
        if self._num_left < 0 or (self._num_left and not data):
            raise BatchError(f"{self._path}: was written to while it was read")
        return data


class HttpBatchClient:
    """See :class:`diptych.cli.batch_client.BatchClient`."""

    def __init__(
        self,
        url: str,
        key: str = "",
        ca: Path | None = None,
        server_name: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``server_name`` is what a certificate has to be of; empty: the host of ``url``.

        ``transport`` in place of the network. A proxy of the environment is gone by as by gRPC's
        clients: not to this machine. Raises ConfigurationError.
        """
        self._url = url
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        try:
            trust = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise ConfigurationError(f"--ca: {ca}: {error.strerror or error}") from None
        try:
            self._http = httpx.Client(
                base_url=url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                verify=trust,
                trust_env=not is_loopback(urlsplit(url).netloc),
                timeout=_TIMEOUT_S,
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"--url: {error}") from None
        except (ValueError, ImportError) as error:  # it is no URL, or of SOCKS
            raise ConfigurationError(f"environment: a proxy: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def submit(self, path: Path, endpoint: str, completion_window: str) -> BatchState:
        """Upload a file and make a batch of it. Raises BatchError, OSError.

        The upload of a batch that is refused is deleted again.
        """
        with _Unchanged(path) as file:
            parts = {"file": (name_of(path), file)}
            data = {"purpose": "batch"}
            file_id = self._ask("POST", "/v1/files", _id_of, files=parts, data=data)
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": completion_window,
        }
        try:
            return self._ask("POST", "/v1/batches", _state_of, json=body)
        except _RefusedError:  # after anything else it may be there
            with suppress(BatchError):
                self._ask("DELETE", f"/v1/files/{_quoted(file_id)}", _id_of)
            raise

    def state(self, batch_id: str) -> BatchState:
        """How far it is. Raises BatchError."""
        return self._ask("GET", f"/v1/batches/{_quoted(batch_id)}", _state_of)

    def cancel(self, batch_id: str) -> BatchState:
        """Send no more of it. Raises BatchError."""
        return self._ask("POST", f"/v1/batches/{_quoted(batch_id)}/cancel", _state_of)

    def content(self, file_id: str) -> Iterator[bytes]:
        """What is in a file, piece by piece. Raises BatchError."""
        path = f"/v1/files/{_quoted(file_id)}/content"
        with (
            self._told(),
            self._http.stream("GET", path, extensions=self._extensions) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise BatchError(_reason(response))
            yield from response.iter_bytes()

    def _ask(self, method: str, path: str, read: Callable[[Told], T], **sent: object) -> T:
        with self._told():
            response = self._http.request(
                method,
                path,
                extensions=self._extensions,
                **sent,  # type: ignore[arg-type]
            )
            if response.status_code != 200:
                raise _error_of(response.status_code)(_reason(response))
            try:
                return read(response.json())
            except (ValueError, KeyError, TypeError):
                raise BatchError(f"{self._url}: what answers there is no batch server") from None

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong with a connection as a BatchError."""
        try:
            yield
        except httpx.ConnectError as error:
            raise nobody_at(self._url, str(error)) from None
        except httpx.TransportError as error:
            raise AwayError(f"{self._url}: {str(error) or type(error).__name__}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BatchError(str(error) or type(error).__name__) from None


def _error_of(status: int) -> type[BatchError]:
    """What an answer with that status is; a server or a proxy that fails may be well soon.

    One whose disk is full is as well as before, and has made nothing.
    """
    if status >= 500 and status != _DISK_FULL:
        return AwayError
    return _RefusedError if status >= 400 else BatchError


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def _quoted(name: str) -> str:
    """An id as one part of a path, whatever is in it."""
    return quote(name, safe="")


def _id_of(told: Told) -> str:
    return str(told["id"])


def _state_of(told: Told) -> BatchState:
    counts, errors = told["request_counts"], told["errors"]
    if not isinstance(counts, dict):
        raise TypeError("request_counts: expected an object")
    wrong = errors["data"] if isinstance(errors, dict) else []
    output, failed = told["output_file_id"], told["error_file_id"]
    return BatchState(
        batch_id=str(told["id"]),
        status=str(told["status"]),
        num_lines=counts["total"],
        num_completed=counts["completed"],
        num_failed=counts["failed"],
        output_file_id=None if output is None else str(output),
        error_file_id=None if failed is None else str(failed),
        errors=tuple(str(error["message"]) for error in wrong),
    )
