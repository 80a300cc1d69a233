"""Settings of a prefill worker."""

from typing import ClassVar

from pydantic import Field

from diptych.worker.config import MAX_COUNT, WorkerConfig


class PrefillWorkerConfig(WorkerConfig):
    """One prefill worker. Frozen; built once at start."""

    role: ClassVar[str] = "prefill"

    # More than a decode worker's: nobody waits between a prompt's tokens, and matrix
    # products with more rows reach more of the machine's rate.
    max_batched_tokens: int = Field(
        1024, ge=1, le=MAX_COUNT, description="Tokens of one step at the most."
    )
