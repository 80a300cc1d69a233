"""Settings of a prefill worker."""

from typing import ClassVar

from pydantic import Field

from diptych.worker.config import WorkerConfig
from kvtransfer.config import TransferConfig


class PrefillWorkerConfig(WorkerConfig):
    """One prefill worker. Frozen; built once at start."""

    role: ClassVar[str] = "prefill"

    transfer: TransferConfig = Field(
        TransferConfig(), description="How decode workers may read this worker's KV."
    )
