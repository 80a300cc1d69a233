"""What a router answered, what that means for a line, and the line of the result file. Pure."""

import enum
import json
import math
from typing import Final, NamedTuple

import jiter

from batch_server.records import Line, LineResult

_LATER: Final = frozenset({401, 429, 502, 503})  # nothing that the line could help
_TOO_SLOW: Final = 408
WORKER_LOST: Final = "worker_lost"  # amid the line, which may be its doing
_UNREACHABLE: Final = "deadline_unreachable"  # without a time to come back: at any time
_OWN: Final = frozenset({_UNREACHABLE, "quota_exceeded"})
_IN_VAIN: Final = frozenset({"queue_timeout", "no_worker"})  # after a wait for workers
_MOST_RETRY_S: Final = 300.0
# JSON has these in strings alone, and readers of text take them for the end of a line.
_LINE_ENDS: Final = {
    "\u0085".encode(): b"\\u0085",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}


class Answer(NamedTuple):
    """Of a router, to one line."""

    status: int
    body: bytes
    """JSON."""
    retry_after_s: float = 0.0
    code: str = ""
    """Of the error, in the router's words."""


class Verdict(enum.Enum):
    """What is done about an answer."""

    KEEP = enum.auto()  # it is the line's result
    LATER = enum.auto()  # the router has no room, or does not serve us: all lines wait
    ALONE = enum.auto()  # it is refused for what this line asks: the line waits, no other does
    AGAIN = enum.auto()  # it failed: a few more tries, then this is the result


def judge(answer: Answer, *, others_were_served: bool = False) -> Verdict:
    """By the answer's status, and by what a router that refuses says why.

    What refuses without a router's error is none: a proxy, say, before routers that start again.
    ``others_were_served``, other lines, while this one waited: then it wants workers that they
    do not need, and of which there are none.
    """
    if answer.status in _LATER and answer.code != WORKER_LOST:
        if answer.code == _UNREACHABLE and not answer.retry_after_s:
            return Verdict.KEEP
        is_own = answer.code in _OWN or (others_were_served and answer.code in _IN_VAIN)
        return Verdict.ALONE if is_own else Verdict.LATER
    is_refused = 400 <= answer.status < 500 and answer.status != _TOO_SLOW and answer.code
    return Verdict.KEEP if is_refused or 200 <= answer.status < 300 else Verdict.AGAIN


def read_answer(status: int, body: bytes, retry_after: str | None) -> Answer:
    """An answer as it came; a good one that is no JSON object (a proxy's page) has failed."""
    retry_after_s = read_retry_after_s(retry_after)
    try:
        content = jiter.from_json(body, allow_inf_nan=False)
    except ValueError:
        content = None
        body = _error("internal", "the answer is not JSON")
    if 200 <= status < 300 and not isinstance(content, dict):
        return failed("internal", "the answer is no JSON object")
    return Answer(status, body, retry_after_s, _code_of(content))


def failed(code: str, message: str) -> Answer:
    """In place of an answer that did not come, or of which nothing can be made."""
    return Answer(500, _error(code, message), code=code)


def read_retry_after_s(header: str | None) -> float:
    """What ``Retry-After`` says in seconds; 0 where it says nothing that makes sense."""
    try:
        seconds = float(header or 0)
    except ValueError:  # a date, which no router sends
        return 0.0
    return min(max(seconds, 0.0), _MOST_RETRY_S) if math.isfinite(seconds) else 0.0


def result_of(line: Line, answer: Answer) -> LineResult:
    """The result, with the router's body as it came, on one line."""
    request_id = json.dumps(line.request_id)
    head = f'{{"status_code": {answer.status}, "request_id": {request_id}, "body": '
    # Between the parts of JSON, the only place where it may have them, they mean nothing.
    body = answer.body.strip().replace(b"\n", b" ").replace(b"\r", b" ")
    for character, escaped in _LINE_ENDS.items():
        body = body.replace(character, escaped)
    is_error = not 200 <= answer.status < 300
    return _result(line, b"".join((head.encode(), body, b"}")), b"null", is_error=is_error)


def unanswered(line: Line, code: str, message: str) -> LineResult:
    """The result of a line that no router answered."""
    error = json.dumps({"code": code, "message": message}).encode()
    return _result(line, b"null", error, is_error=True)


def _result(line: Line, response: bytes, error: bytes, *, is_error: bool) -> LineResult:
    head = (
        f'{{"id": {json.dumps(f"batch_req_{line.request_id}")}, '
        f'"custom_id": {json.dumps(line.custom_id)}, "response": '
    )
    parts = (head.encode(), response, b', "error": ', error, b"}\n")
    return LineResult(line.number, is_error, b"".join(parts))


def _error(code: str, message: str) -> bytes:
    told = {"message": message, "type": "server_error", "param": None, "code": code}
    return json.dumps({"error": told}).encode()


def _code_of(content: object) -> str:
    """Of an error as routers tell it; empty where this is none."""
    error = content.get("error") if isinstance(content, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""
