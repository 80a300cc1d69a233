"""The listener of a sequence that is lost and nothing else."""

from diptych.v1 import decode_pb2


class LastWords:
    """Hears what becomes of a sequence."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []

    def on_tokens(self, tokens: decode_pb2.SequenceTokens) -> None:
        raise AssertionError(tokens)

    def on_decode_event(self, event: decode_pb2.DecodeEvent) -> None:
        if not event.HasField("reserved"):
            raise AssertionError(event)

    def on_reservation_lost(self, sequence_id: int, message: str) -> None:
        self.lost.append((sequence_id, message))
