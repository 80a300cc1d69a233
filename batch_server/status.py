"""What may happen to a batch, and when. Pure."""

import enum
from typing import Final

from diptych.transitions import Transitions


class BatchStatus(enum.StrEnum):
    """Where a batch is, in the words that clients are told."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class BatchEvent(enum.Enum):
    """What moves it."""

    ACCEPT = enum.auto()  # the whole file is right
    REFUSE = enum.auto()  # it is not
    CLOSE = enum.auto()  # each line has a result, or the time is over
    COMPLETE = enum.auto()
    EXPIRE = enum.auto()  # some lines were never answered
    CANCEL = enum.auto()  # its owner wants no more of it
    CANCELLED = enum.auto()


BATCH_TRANSITIONS: Final = Transitions(
    {
        BatchStatus.VALIDATING: {
            BatchEvent.ACCEPT: BatchStatus.IN_PROGRESS,
            BatchEvent.REFUSE: BatchStatus.FAILED,
            BatchEvent.CANCEL: BatchStatus.CANCELLING,
        },
        BatchStatus.IN_PROGRESS: {
            BatchEvent.CLOSE: BatchStatus.FINALIZING,
            BatchEvent.CANCEL: BatchStatus.CANCELLING,
        },
        BatchStatus.FINALIZING: {
            BatchEvent.COMPLETE: BatchStatus.COMPLETED,
            BatchEvent.EXPIRE: BatchStatus.EXPIRED,
        },
        BatchStatus.CANCELLING: {BatchEvent.CANCELLED: BatchStatus.CANCELLED},
    },
    # Its owner may be faster than what was about to happen, and may say so twice.
    ignored={
        BatchStatus.CANCELLING: (
            BatchEvent.ACCEPT,
            BatchEvent.REFUSE,
            BatchEvent.CLOSE,
            BatchEvent.CANCEL,
        ),
    },
)

ENDED: Final = frozenset(
    {
        BatchStatus.FAILED,
        BatchStatus.COMPLETED,
        BatchStatus.EXPIRED,
        BatchStatus.CANCELLED,
    }
)
