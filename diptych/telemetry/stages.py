"""The stages of a request: one source for span names and histogram labels.

Because spans and metrics are both named here they cannot disagree. The
first three stages tile the time to first token exactly as
``diptych.v1.Timing`` defines it (queue_s + prefill_s + first_write_s = ttft_s);
HANDOFF and DECODE tile the rest. The detail stages hang under those and say
what the time went on::

    the request
        queue, first_write
        prefill, or what is waited for when another attempt begins: handoff, decode
            attempt (linked to the one that it replaces)
                prefill_wait, prefill_compute, local_prefill, recompute
                transfer
                    transfer_exposed
        decode
            decode_run (linked to its attempt)
"""

from enum import StrEnum


class Stage(StrEnum):
    """One stage of a request. The value is the histogram label."""

    # Received until placed on workers: validating, tokenising, waiting for a place.
    QUEUE = "queue"
    # Placed until the first token was sampled.
    PREFILL = "prefill"
    # First token sampled until written to the client.
    FIRST_WRITE = "first_write"
    # First until second token: where an exposed transfer shows.
    HANDOFF = "handoff"
    # Second until last token.
    DECODE = "decode"

    # One try on workers, as the router sees it: asked until it failed or the request ended.
    ATTEMPT = "attempt"
    # EndedRequest by the prefill worker: accepted until its first step; computing.
    PREFILL_WAIT = "prefill_wait"
    PREFILL_COMPUTE = "prefill_compute"
    # EndedRequest by the decode worker: Bind until proven.
    # The part not hidden by prefill lies inside HANDOFF.
    TRANSFER = "transfer"
    # The last range announced until proven.
    TRANSFER_EXPOSED = "transfer_exposed"
    # The decode worker computes KV itself: by choice, or after a failed hand-off.
    LOCAL_PREFILL = "local_prefill"
    RECOMPUTE = "recompute"
    # EndedRequest by the decode worker: started until ended.
    DECODE_RUN = "decode_run"

    @property
    def span_name(self) -> str:
        """Name of the span that covers this stage."""
        return f"diptych.{self.value}"


TTFT_STAGES = (Stage.QUEUE, Stage.PREFILL, Stage.FIRST_WRITE)
REQUEST_STAGES = (*TTFT_STAGES, Stage.HANDOFF, Stage.DECODE)
