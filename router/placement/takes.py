"""What a worker takes: whoever waits is asked again when it takes what it did not before. Pure."""

from typing import Final, NamedTuple, TypeVar

from router.placement.spare import computes_at_once, has_spare_place
from router.placement.views import DecodeView

_LONG: Final = 16  # one in so many of a worker's blocks; few sequences of a batch need more


class PrefillTakes(NamedTuple):
    """One that computes prompts: one more of them, and whose."""

    has_runway: bool = False  # anybody's
    is_open_beyond: bool = False  # of payers of whom none of ours waits there
    is_idle: bool = False  # a batch's


class DecodeTakes(NamedTuple):
    """One that decodes: one more sequence, and whose."""

    has_room: bool = False  # one of no batch, for which others leave
    has_free_place: bool = False  # any
    has_last_place: bool = False  # but perhaps not everybody's
    computes_at_once: bool = False  # with its prompt, of a batch
    has_spare_place: bool = False  # of a batch that leaves room
    has_long_spare_place: bool = False  # of such a one that needs many blocks


NO_PREFILL: Final = PrefillTakes()
NO_DECODE: Final = DecodeTakes()
T = TypeVar("T", PrefillTakes, DecodeTakes)


def decode_takes(view: DecodeView | None) -> DecodeTakes:
    """None: it may not be used."""
    if view is None:
        return NO_DECODE
    return DecodeTakes(
        view.has_room,
        view.has_free_place,
        view.has_last_place,
        computes_at_once(view),
        has_spare_place(view, 1),
        has_spare_place(view, view.num_blocks // _LONG),
    )


def is_more(now: T, before: T) -> bool:
    """Whether someone may be placed there who could not be."""
    return any(takes and not took for takes, took in zip(now, before, strict=True))
