"""A request's body: bytes to a JSON object, and the object to a checked model. Pure."""

from collections.abc import Mapping
from typing import Final, TypeVar

import jiter
from pydantic import BaseModel, ConfigDict, ValidationError

from diptych.errors import InvalidRequestError
from router.frontend.json_values import have_more_values
from router.frontend.validation import MAX_PARTS

FIELD: Final = "body"

_MOST_OTHER_VALUES: Final = 8 * MAX_PARTS  # beside the ids of a prompt

_REASONS: Final = {"missing": "is required"}


class StrictModel(BaseModel):
    """Part of a body. Types are not converted; fields that nobody knows are passed over."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


def parse(data: bytes, max_model_len: int, most_ids: int = 0) -> Mapping[str, object]:
    """The object that ``data`` says, if it has no more values than a request may need.

    ``most_ids``: of several prompts together, more than one has. They are plain numbers, which
    take far less than texts, lists and objects do: of these there are no more than otherwise.

    Raises:
        InvalidRequestError: it is no JSON (so neither NaN nor half of a character is),
            has too many values, is nested too deeply, names a member twice, or is no object.
    """
    _check_num_values(data, max_model_len + _MOST_OTHER_VALUES, most_ids)
    try:
        content = jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise InvalidRequestError(f"is not JSON: {error}", field=FIELD) from None
    if not isinstance(content, dict):
        raise InvalidRequestError("is not a JSON object", field=FIELD)
    return content


def _check_num_values(data: bytes, most: int, most_ids: int) -> None:
    """Before each becomes an object."""
    num_opened = data.count(b"[") + data.count(b"{")
    if num_opened + data.count(b'"') <= most:  # all others are numbers
        most = max(most, most_ids)
    if have_more_values([data], most):
        raise InvalidRequestError(f"has more than {most} values", field=FIELD)


def validated(kind: type[M], content: Mapping[str, object], within: str = "") -> M:
    """``content`` as that model; ``within`` is where in the body it lies.

    Raises InvalidRequestError.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise refusal(error, within) from None


def refusal(error: ValidationError, within: str = "") -> InvalidRequestError:
    """The first field that is wrong; ``within`` is where in the body the value lies."""
    first = error.errors(include_url=False, include_input=False)[0]
    reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    reason = _REASONS.get(first["type"], reason)
    return InvalidRequestError(reason, field=_path(first["loc"], within))


def _path(location: tuple[int | str, ...], within: str) -> str:
    """``messages[0].content``."""
    path = within
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path or FIELD


def as_list(value: object) -> object:
    """For lists that may be left out: null says no more than absence."""
    return [] if value is None else value
