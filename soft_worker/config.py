"""Settings of a worker that can have either role, or both."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from decode_worker.config import DecodeWorkerConfig


class SoftWorkerConfig(DecodeWorkerConfig):
    """One worker of either role, or of both on one KV pool. Frozen; built once at start."""

    role: ClassVar[str] = "worker"

    roles: tuple[Literal["prefill", "decode"], ...] = Field(
        ("prefill", "decode"),
        min_length=1,
        description="What this worker does at first: prefill, decode, or both. `diptych admin "
        "roles` changes it while it runs.",
    )

    @field_validator("roles")
    @classmethod
    def _check_roles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"names one twice (got {','.join(value)})")
        return value
