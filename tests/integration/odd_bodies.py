"""Bodies as nobody should send them, made from good ones by a seeded generator. Pure.

What is wrong may be a type, a depth, a number, half of a character, an unknown member, the
text of the JSON, its encoding, or a header beside it. Some of what comes out is good all the same.
"""

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from router.frontend.http import unserved
from router.frontend.http.sampling_fields import SERVED

JSON_TYPE: Final = {"content-type": "application/json"}


class _Raw(NamedTuple):
    """Text to stand in the JSON as it is, whether that is JSON or not."""

    text: str


ODD_VALUES: Final[Sequence[object]] = (
    *(None, True, False, 0, 1, -1, 2, 16, 2**31, 2**32, 2**63, 2**64, 10**400, -(10**400)),
    *(0.5, -0.0, 1e308, 5e-324, "", "a", "\x00", "\u2028", "\U0001f600", "\ud800", "a\udfff"),
    *("x" * 3000, "none", "auto", "required", "system", "function", "text", "5", "nan"),
    *([], {}, [[]], [None], [{}], [0], ["a"], [1, "a"], {"": None}, {"type": "text", "text": 5}),
    *({"type": "function"}, {"type": "json_schema"}, {"0": 1}, {"00": 1}, {"-1": 1}, {"5": 1e300}),
    *(list(range(700)), ["a"] * 70, {str(i): 1.0 for i in range(1100)}),
    *(_Raw("NaN"), _Raw("-Infinity"), _Raw("1e999"), _Raw("01"), _Raw("1" * 5000), _Raw("'a'")),
    *(_Raw('"\\ud83d"'), _Raw('"\\u0000"'), _Raw('"\t"'), _Raw("undefined"), _Raw("1.")),
    *(
        _Raw("[" * 40 + "]" * 40),
        _Raw("[" * 3000 + "]" * 3000),
        _Raw('{"a":' * 300 + "1" + "}" * 300),
    ),
)

ODD_NAMES: Final = sorted(
    {*SERVED, *unserved.OF_CHAT, *unserved.OF_COMPLETION}
    | {"model", "prompt", "messages", "input", "query", "documents", "tokens", "stream", "echo"}
    | {"stream_options", "response_format", "structured_outputs", "guided_json", "guided_regex"}
    | {"tools", "tool_choice", "cache_salt", "priority", "ttft_ms", "chat_template_kwargs", "type"}
    | {
        "role",
        "content",
        "name",
        "tool_calls",
        "function",
        "arguments",
        "unknown",
        "",
        "\u00e9",
        "a.b",
    }
)

_ODD_TYPES: Final = (
    "text/plain",
    "",
    "application/xml",
    "application/json-seq",
    "multipart/form-data",
)
_ODD_HEADERS: Final[Sequence[tuple[str, str]]] = (
    *(("x-request-id", value) for value in ("a b", "", "x" * 129, "\u00e9", "ok-1")),
    *(("x-request-timeout", value) for value in ("nan", "-1", "0", "abc", "1e9", "inf", "60", "")),
    *(
        ("traceparent", value)
        for value in ("00-0-0-01", "ff" * 40, f"00-{'ab' * 16}-{'cd' * 8}-01")
    ),
    *(("tracestate", value) for value in ("a=b", "=,=,=", "x" * 600, "\u00e9=1")),
    *(
        ("content-type", value)
        for value in ("application/json; charset=utf-16", "APPLICATION/JSON")
    ),
    *(
        ("accept", "nothing/at-all"),
        ("content-encoding", "gzip"),
        ("authorization", "Bearer \u00e9"),
    ),
)


class OddBody(NamedTuple):
    """One request's body, and the headers beside it."""

    data: bytes
    headers: Mapping[bytes, bytes]


def odd_body(rng: random.Random, good: Mapping[str, Any]) -> OddBody:
    """A body that went through some changes."""
    content: Any = copy.deepcopy(dict(good))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _change(rng, content)
    data = _written(rng, content)
    if rng.random() < 0.25:
        data = rng.choice(_ON_BYTES)(rng, data)
    headers = dict(JSON_TYPE)
    if rng.random() < 0.03:
        headers["content-type"] = rng.choice(_ODD_TYPES)
    elif rng.random() < 0.08:
        headers |= [rng.choice(_ODD_HEADERS)]
    written = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    return OddBody(data, written)


def _change(rng: random.Random, content: dict[str, Any]) -> None:
    """One place of it, near the top or deep inside."""
    place: Any = rng.choice(list(_containers(content)))
    value = copy.deepcopy(rng.choice(ODD_VALUES))
    if isinstance(place, list):
        index = rng.randrange(len(place) + 1)
        place[index : index + rng.randrange(2)] = [value]
        return
    known = sorted(place)
    match rng.randrange(4) if known else 0:
        case 0:
            place[rng.choice(ODD_NAMES)] = value
        case 1:
            del place[rng.choice(known)]
        case _:
            place[rng.choice(known)] = value


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value[:20]:
            yield from _containers(inner)


def _written(rng: random.Random, content: Any) -> bytes:
    """As JSON, but for what is to stand there raw."""
    raw: list[str] = []

    def stand_in(value: Any) -> Any:
        if isinstance(value, _Raw):
            raw.append(value.text)
            return f"\x01{len(raw) - 1}\x01"
        if isinstance(value, dict):
            return {name: stand_in(inner) for name, inner in value.items()}
        return [stand_in(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(stand_in(content), ensure_ascii=rng.random() < 0.7)
    for index, piece in enumerate(raw):
        text = text.replace(f'"\\u0001{index}\\u0001"', piece)
    return text.encode(errors="surrogatepass")


def _truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _inserted(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]


def _repeated(rng: random.Random, data: bytes) -> bytes:
    """A member twice, or the whole of it."""
    return rng.choice((data + data, b'{"model":"a",' + data[1:], b"[" + data + b"]"))


def _encoded(rng: random.Random, data: bytes) -> bytes:
    text = data.decode(errors="replace")
    return text.encode(rng.choice(("utf-8-sig", "utf-16", "utf-32-le")))


def _noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 20, len(data))))


_ON_BYTES: Final = (_truncated, _flipped, _inserted, _repeated, _encoded, _noise)
