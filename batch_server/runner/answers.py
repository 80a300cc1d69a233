"""What a router answered, what that means for a line, and the line of the result file. Pure."""

import enum
import json
import math
from typing import Any, Final, NamedTuple

from batch_server.records import Line, LineResult

_LATER: Final = frozenset({401, 403, 429, 502, 503})  # nothing that the line could help
_FAILED: Final = frozenset({408, 500, 504})
_MOST_RETRY_S: Final = 300.0


class Answer(NamedTuple):
    """Of a router, to one line."""

    status: int
    body: bytes
    retry_after_s: float = 0.0


class Verdict(enum.Enum):
    """What is done about an answer."""

    KEEP = enum.auto()  # it is the line's result
    LATER = enum.auto()  # the router has no room, or does not serve us: the line waits
    AGAIN = enum.auto()  # it failed: a few more tries, then this is the result


def judge(status: int) -> Verdict:
    """By the answer's status."""
    if status in _LATER:
        return Verdict.LATER
    return Verdict.AGAIN if status in _FAILED else Verdict.KEEP


def read_retry_after_s(header: str | None) -> float:
    """What ``Retry-After`` says in seconds; 0 where it says nothing that makes sense."""
    try:
        seconds = float(header or 0)
    except ValueError:  # a date, which no router sends
        return 0.0
    return min(max(seconds, 0.0), _MOST_RETRY_S) if math.isfinite(seconds) else 0.0


def result_of(line: Line, answer: Answer) -> LineResult:
    """The result, with the router's body as it came."""
    response = (
        f'{{"status_code": {answer.status}, "request_id": {json.dumps(line.request_id)}, '
        f'"body": {_body_text(answer)}}}'
    )
    is_error = not 200 <= answer.status < 300
    return _result(line, response, "null", is_error=is_error)


def unanswered(line: Line, code: str, message: str) -> LineResult:
    """The result of a line that no router answered."""
    error = json.dumps({"code": code, "message": message})
    return _result(line, "null", error, is_error=True)


def _result(line: Line, response: str, error: str, *, is_error: bool) -> LineResult:
    text = (
        f'{{"id": {json.dumps(f"batch_req_{line.request_id}")}, '
        f'"custom_id": {json.dumps(line.custom_id)}, "response": {response}, "error": {error}}}\n'
    )
    return LineResult(line.number, is_error, text.encode())


def _body_text(answer: Answer) -> str:
    """JSON on one line; what is none (a proxy's page) is told as an error."""
    try:
        text = answer.body.decode()
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        error = {"message": "the answer is not JSON", "type": "server_error", "param": None}
        return json.dumps({"error": {**error, "code": "internal"}})
    return text.strip() if "\n" not in text.strip() and "\r" not in text else json.dumps(content)
