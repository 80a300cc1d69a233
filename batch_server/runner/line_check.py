"""One line of a file of requests: whether it is right, and what is sent for it. Pure."""

import hashlib
import json
import re
import secrets
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jiter

from batch_server.records import Endpoint, Line, LineError
from batch_server.runner.line_splitter import RawLine
from batch_server.runner.sending_order import SendingKey
from diptych.request_class import RequestClass

_MAX_ID_CHARACTERS: Final = 512
_MAX_TOLD: Final = 200  # characters of what is wrong with a line, and of where
_SEED_BITS: Final = 53  # that any JSON reader keeps
_NO_SEEDS: Final = (None, -1)  # as a router takes them
_PROMPTS: Final[Mapping[Endpoint, tuple[str, ...]]] = {  # as they follow one another
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("instructions", "input"),
    "/v1/embeddings": ("input",),
}
_NO_TEXT: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})  # of an id
_MAYBE_TOO_LARGE: Final = re.compile(rb"[eE]\+?0*[0-9]{3}|[0-9]{200}")  # for a double
_OBJECTIVES: Final = ("ttft_ms", "tpot_ms")  # of clients that wait for an answer


class CheckedLine(NamedTuple):
    """A line that is right; ``body`` has yet to be given its seed."""

    number: int
    custom_id: str
    body: Mapping[str, Any]
    key: SendingKey


class WrongLineError(Exception):
    """What is wrong with a line."""

    def __init__(self, raw: RawLine, code: str, param: str | None, message: str) -> None:
        param, message = None if param is None else _cut(param), _cut(message)
        where = f"line {raw.number}" if param is None else f"line {raw.number}: {param}"
        self.error = LineError(code, f"{where}: {message}", param, raw.number)
        super().__init__(self.error.message)


class LineCheck:
    """Checks the lines of one file, one after the other; of each id there may be one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._seen: set[str] = set()

    def read(self, raw: RawLine) -> CheckedLine:
        """Raises WrongLineError. What a router says of the body is that line's result."""
        content = _parse(raw)
        custom_id = self._read_id(raw, content.get("custom_id"))
        if content.get("method") != "POST":
            raise WrongLineError(raw, "invalid_method", "method", "should be POST")
        if content.get("url") != self._endpoint:
            raise WrongLineError(raw, "mismatched_url", "url", f"should be {self._endpoint}")
        body = content.get("body")
        if not isinstance(body, dict):
            raise WrongLineError(raw, "invalid_body", "body", "should be an object")
        if body.get("stream"):
            raise WrongLineError(raw, "invalid_body", "body.stream", "no batch is streamed")
        for name in _OBJECTIVES:
            if body.get(name) is not None:
                reason = "no line of a batch has an objective"
                raise WrongLineError(raw, "invalid_body", f"body.{name}", reason)
        if not isinstance(body.get("cache_salt", ""), str | None):
            raise WrongLineError(raw, "invalid_body", "body.cache_salt", "should be a text")
        if isinstance(body.get("priority"), str) and body["priority"] != RequestClass.BATCH:
            reason = f"is {RequestClass.BATCH} for every line of a batch"
            raise WrongLineError(raw, "invalid_body", "body.priority", reason)
        return CheckedLine(raw.number, custom_id, body, self._key(raw.number, body))

    def _read_id(self, raw: RawLine, value: object) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_ID_CHARACTERS:
            reason = f"should be a text of 1 to {_MAX_ID_CHARACTERS} characters"
            raise WrongLineError(raw, "invalid_custom_id", "custom_id", reason)
        if any(unicodedata.category(character) in _NO_TEXT for character in value):
            reason = "has control characters, or ends of lines"
            raise WrongLineError(raw, "invalid_custom_id", "custom_id", reason)
        if value in self._seen:
            raise WrongLineError(
                raw, "duplicate_custom_id", "custom_id", "is that of a line before"
            )
        self._seen.add(value)
        return value

    def _key(self, number: int, body: Mapping[str, Any]) -> SendingKey:
        parts = [body.get(name) for name in _PROMPTS[self._endpoint]]
        texts = (p if isinstance(p, str) else json.dumps(p, ensure_ascii=False) for p in parts)
        return SendingKey.of(number, "\n".join(texts))


class LineMaker:
    """Makes what is stored of a line, and sent: its seed and ids are drawn here, once."""

    def __init__(
        self,
        endpoint: Endpoint,
        tenant: str,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(_SEED_BITS),
    ) -> None:
        self._has_seed = endpoint != "/v1/embeddings"
        self._tenant = tenant
        self._draw_seed = draw_seed

    def make(self, checked: CheckedLine, rank: int) -> Line:
        """The line whose place among those that are sent is ``rank``."""
        body = {**checked.body, "priority": RequestClass.BATCH.value}
        if self._has_seed and body.get("seed") in _NO_SEEDS:
            body["seed"] = self._draw_seed()
        if self._tenant:  # the routers see one caller: tenants would share what is cached
            body["cache_salt"] = _salt(self._tenant, body.get("cache_salt") or "")
        data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
        request_id = f"batch-{secrets.token_hex(12)}"
        return Line(checked.number, rank, checked.custom_id, request_id, data)


def _cut(text: str) -> str:
    """What is told: parsers repeat names of a line whole, and errors are kept with their batch."""
    return text if len(text) <= _MAX_TOLD else text[: _MAX_TOLD - 1] + "…"


def _salt(tenant: str, salt: str) -> str:
    return hashlib.sha256(tenant.encode() + b"\0" + salt.encode()).hexdigest()


def _parse(raw: RawLine) -> Mapping[str, Any]:
    try:
        content = jiter.from_json(raw.data, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise WrongLineError(raw, "invalid_json_line", None, f"is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise WrongLineError(raw, "invalid_json_line", None, "is not a JSON object")
    if _MAYBE_TOO_LARGE.search(raw.data):
        try:
            json.dumps(content, allow_nan=False)
        except ValueError:
            reason = "has a number that is too large"
            raise WrongLineError(raw, "invalid_json_line", None, reason) from None
    return content
