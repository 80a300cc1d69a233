"""Settings of a decode worker."""

from typing import ClassVar

from pydantic import Field

from diptych.worker.config import WorkerConfig


class DecodeWorkerConfig(WorkerConfig):
    """One decode worker. Frozen; built once at start."""

    role: ClassVar[str] = "decode"

    local_prefill: bool = Field(
        True,
        description="Whether this worker may compute prompts itself: short ones, without a "
        "prefill worker, or after a failed hand-off. Off, each of these is an error.",
    )
    max_unsent_events: int = Field(
        8192, ge=64, description="Events kept for one router that does not read, at the most."
    )
