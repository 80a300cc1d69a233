"""Where a request stands as a whole; those of its lease and its reservation refine it. Pure."""

import enum

from diptych.transitions import Transitions


class RequestState(enum.Enum):
    """Where a request stands."""

    NEW = enum.auto()
    QUEUED = enum.auto()  # nothing held, waits for a placement
    PLACED = enum.auto()  # a lease, a reservation or both were opened
    DECODING = enum.auto()  # the reservation runs
    DONE = enum.auto()  # nothing held, nothing to come


class RequestEvent(enum.Enum):
    """What moves it."""

    QUEUE = enum.auto()
    PLACE = enum.auto()  # open a whole placement
    DECODE = enum.auto()  # the reservation was started
    END = enum.auto()


REQUEST_TRANSITIONS = Transitions(
    {
        RequestState.NEW: {
            RequestEvent.QUEUE: RequestState.QUEUED,
            RequestEvent.END: RequestState.DONE,
        },
        RequestState.QUEUED: {
            RequestEvent.PLACE: RequestState.PLACED,
            RequestEvent.END: RequestState.DONE,
        },
        RequestState.PLACED: {
            RequestEvent.QUEUE: RequestState.QUEUED,
            RequestEvent.PLACE: RequestState.PLACED,
            RequestEvent.DECODE: RequestState.DECODING,
            RequestEvent.END: RequestState.DONE,
        },
        RequestState.DECODING: {
            RequestEvent.QUEUE: RequestState.QUEUED,
            RequestEvent.PLACE: RequestState.PLACED,
            RequestEvent.END: RequestState.DONE,
        },
    },
)
