"""Whose a request is, how urgent, and what it was promised: its claim on workers. Plain data."""

from typing import Final, NamedTuple

from diptych.request_class import RequestClass


class Claim(NamedTuple):
    """As the request came with it, where it left something open as the settings say."""

    request_class: RequestClass = RequestClass.STANDARD
    tenant: str = ""  # the one without a name is everybody, where nobody is known
    first_token_due_s: float | None = None  # a moment of the monotonic clock; None: no matter
    tpot_s: float | None = None  # between two tokens, on average; None: no matter


NO_CLAIM: Final = Claim()
"""Of a request that said nothing, where nothing is known."""
