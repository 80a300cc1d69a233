"""What a decode worker can and may do, and the checks that follow from it. Pure."""

import math
from dataclasses import dataclass

from diptych.errors import InvalidRequestError
from diptych.v1 import common_pb2, decode_pb2
from diptych.worker.check_spec import check_spec, check_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Fixed once the engine is loaded. Lengths in tokens."""

    vocab_size: int
    max_model_len: int
    block_size: int
    local_prefill: bool  # may compute prompts itself

    def check_reserve(self, spec: common_pb2.SequenceSpec) -> None:
        """Raise InvalidRequestError unless the sequence can run here."""
        check_spec(spec, vocab_size=self.vocab_size, max_model_len=self.max_model_len)

    def check_start(self, start: decode_pb2.Start, *, num_tokens: int, proven: bool) -> None:
        """Raise InvalidRequestError unless a sequence of ``num_tokens`` may start so."""
        emitted = start.emitted_token_ids
        if num_tokens + len(emitted) >= self.max_model_len:
            raise InvalidRequestError(
                f"{num_tokens + len(emitted)} tokens leave no room in {self.max_model_len}",
                field="start.emitted_token_ids",
            )
        check_token_ids(emitted, vocab_size=self.vocab_size, field="start.emitted_token_ids")
        if not 0.0 <= start.emitted_age_s < math.inf:
            raise InvalidRequestError(
                f"{start.emitted_age_s} is no time", field="start.emitted_age_s"
            )
        if not proven and not start.compute_missing:
            raise InvalidRequestError("the sequence is not proven", field="start.compute_missing")
        if not proven and not self.local_prefill:
            raise InvalidRequestError(
                "local_prefill is off: this worker may not compute prompts",
                field="start.compute_missing",
            )
