"""Whose a request is, how urgent, and what it was promised: its claim on workers. Plain data."""

import hashlib
from functools import lru_cache
from typing import Final, NamedTuple

from diptych.request_class import RequestClass


class Claim(NamedTuple):
    """As the request came with it, where it left something open as the settings say."""

    request_class: RequestClass = RequestClass.STANDARD
    tenant: str = ""  # the one without a name is everybody, where nobody is known
    first_token_due_s: float | None = None  # a moment of the monotonic clock; None: no matter
    tpot_s: float | None = None  # between two tokens, on average; None: no matter
    ttft_s: float | None = None  # from its arrival on, by which the first token is due
    has_deadline_first: bool = False  # it is due then because nobody waits for the answer longer
    asks_first_too: bool = False  # and it asked for a first token, which would be due after that

    @property
    def payer(self) -> bytes:
        """By what workers know whose turn it is."""
        return payer_of(self.request_class, self.tenant)

    @property
    def is_batch(self) -> bool:
        return self.request_class is RequestClass.BATCH


@lru_cache(1024)
def payer_of(request_class: RequestClass, tenant: str) -> bytes:
    """By what workers know whose turn it is; who it is they are not told."""
    return hashlib.blake2b(f"{request_class.value} {tenant}".encode(), digest_size=8).digest()


class Asked(NamedTuple):
    """What one that waits asks of workers, as far as their room goes."""

    payer: bytes
    may_be_local: bool = True  # or only a prefill worker computes its prompt, while there is one


NO_CLAIM: Final = Claim()
"""Of a request that said nothing, where nothing is known."""
