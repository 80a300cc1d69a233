"""Speaks with a batch server over HTTP, for the commands of ``diptych batch``."""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import httpx

from diptych.errors import ConfigurationError

_TIMEOUT_S: Final = 60.0
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})


class BatchError(Exception):
    """The server refused, or could not be reached; the text is for people."""


class AwayError(BatchError):
    """It could not be reached, or the connection broke."""


class BatchState(NamedTuple):
    """How far a batch is, as its server tells."""

    batch_id: str
    status: str
    num_lines: int
    num_completed: int
    num_failed: int
    output_file_id: str | None
    error_file_id: str | None
    errors: tuple[str, ...]

    @property
    def done_ratio(self) -> float:
        """Of its lines; 0 as long as nobody knows how many there are."""
        return (self.num_completed + self.num_failed) / self.num_lines if self.num_lines else 0.0


class BatchClient:
    """A connection to one server. A context manager."""

    def __init__(
        self,
        url: str,
        key: str = "",
        ca: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``transport`` in place of the network. Raises ConfigurationError."""
        try:
            trust = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise ConfigurationError(f"--ca: {ca}: {error.strerror or error}") from None
        try:
            self._http = httpx.Client(
                base_url=url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                verify=trust,
                trust_env=False,
                timeout=_TIMEOUT_S,
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"--url: {error}") from None

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
        """Upload a file and make a batch of it. Raises BatchError, ConfigurationError."""
        try:
            with path.open("rb") as file:
                parts = {"file": (path.name, file)}
                uploaded = self._ask("POST", "/v1/files", files=parts, data={"purpose": "batch"})
        except OSError as error:
            raise ConfigurationError(f"--file: {path}: {error.strerror}") from None
        body = {
            "input_file_id": uploaded["id"],
            "endpoint": endpoint,
            "completion_window": completion_window,
        }
        return _state_of(self._ask("POST", "/v1/batches", json=body))

    def state(self, batch_id: str) -> BatchState:
        """How far it is. Raises BatchError."""
        return _state_of(self._ask("GET", f"/v1/batches/{batch_id}"))

    def cancel(self, batch_id: str) -> BatchState:
        """Send no more of it. Raises BatchError."""
        return _state_of(self._ask("POST", f"/v1/batches/{batch_id}/cancel"))

    def content(self, file_id: str) -> Iterator[bytes]:
        """What is in a file, piece by piece. Raises BatchError."""
        with (
            _told(),
            self._http.stream("GET", f"/v1/files/{file_id}/content") as response,
        ):
            if response.status_code != 200:
                response.read()
                raise BatchError(_reason(response))
            yield from response.iter_bytes()

    def _ask(self, method: str, path: str, **sent: object) -> Mapping[str, object]:
        with _told():
            response = self._http.request(method, path, **sent)  # type: ignore[arg-type]
            if response.status_code != 200:
                raise BatchError(_reason(response))
            content: Mapping[str, object] = response.json()
            return content


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong with a connection as a BatchError."""
    try:
        yield
    except httpx.UnsupportedProtocol:
        raise BatchError("--url: expected http://host:port or https://host:port") from None
    except httpx.TransportError as error:
        raise AwayError(str(error) or type(error).__name__) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BatchError(str(error) or type(error).__name__) from None


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def _state_of(told: Mapping[str, object]) -> BatchState:
    counts, errors = told["request_counts"], told["errors"]
    assert isinstance(counts, dict)
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
