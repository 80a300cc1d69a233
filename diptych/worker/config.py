"""Settings that both kinds of worker have. Built once at start, see diptych.settings."""

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from diptych.byte_size import SizeInBytes
from diptych.engine.scheduling.step import check_step_limits
from diptych.formats import (
    DeviceName,
    DtypeName,
    KVDtypeName,
    PrefillAttentionName,
    Quantization,
)
from diptych.process import ProcessConfig
from diptych.service_level import ObjectiveMs
from kvtransfer.config import TransferConfig

MAX_COUNT: Final = 2**32 - 1  # that messages hold
_MAX_CORES = 2**16  # more than any machine has


class WorkerConfig(ProcessConfig):
    """One worker: which model, how much memory, how large a step. Frozen."""

    model: str = Field(
        min_length=1, description="Hugging Face folder, .gguf file, hub id, or demo."
    )
    cache_dir: Path | None = Field(
        None, description="Where models are imported and downloaded to. Unset: the user's cache."
    )
    device: DeviceName = Field(
        "cpu",
        description="Where the model runs: cpu, cuda (an NVIDIA GPU; needs the extra cuda), or "
        "auto: cuda if it can be used here, else cpu.",
    )
    prefill_attention: PrefillAttentionName = Field(
        "own",
        description="Whose kernels attend for prompts on a GPU: our own, or flashinfer's (needs "
        "the extra flashinfer and CUDA's compiler, dtype and kv_cache_dtype bfloat16, heads of 64, "
        "128 or 256, and a model without soft caps of scores).",
    )
    dtype: DtypeName = Field(
        "auto",
        description="Element type of weights and arithmetic; auto: float32 on a CPU, elsewhere the "
        "model's own, where that is bfloat16. Both workers of a pair need the same. With auto a "
        "CPU keeps what comes from a GGUF file in that file's own numbers, which stand for the "
        "same float32 weights bit for bit; float32 keeps the weights themselves.",
    )
    quantization: Quantization = Field(
        "none",
        description="Linear layers as loaded (none), in int8 (on a CPU, needs dtype float32): a "
        "quarter of their memory; in int8-weights, inputs not rounded (on a GPU: half their "
        "memory); or in fp8, inputs rounded as well (on a GPU from compute capability 9.0 on, "
        "needs dtype bfloat16).",
    )
    kv_cache_dtype: Literal["auto"] | KVDtypeName = Field(
        "auto",
        description="Element type of the KV cache; auto: that of the weights. int8 has a scale "
        "for each token and head; fp8 (e4m3) has none, and is slow on a CPU. Both workers of a "
        "pair need the same.",
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block.")
    kv_cache_memory: SizeInBytes | None = Field(
        None,
        gt=0,
        description="Memory of the KV pool and the scratch blocks behind it at the most, such as "
        "1GiB, which it is on a CPU if unset. Ignored with num_blocks.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a device's own memory that this worker takes: the KV pool gets what "
        "weights and the largest step leave of it. Ignored with num_blocks or kv_cache_memory, "
        "and on a CPU.",
    )
    num_blocks: int | None = Field(
        None, ge=2, le=MAX_COUNT, description="KV blocks of the pool, instead of by memory."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        le=MAX_COUNT,
        description="Longest sequence, tokens. Unset: the model's context length.",
    )
    max_batched_tokens: int = Field(
        512, ge=1, le=MAX_COUNT, description="Tokens of one step at the most."
    )
    max_num_seqs: int = Field(
        64, ge=1, le=MAX_COUNT, description="Sequences in the running batch at the most."
    )
    step_trials_s: float = Field(
        3.0,
        ge=0,
        description="Before the first request this worker times steps of its own, of prompts and "
        "of decoding for so long each, twice as long where too few ran, s. 0: none; it is sooner "
        "ready, and routers foretell nothing of it until enough requests have run.",
    )
    tpot_ms: ObjectiveMs | None = Field(
        None,
        description="Mean time between tokens that sequences are promised while prompts are "
        "computed beside them, ms: a step has no more of those than leaves nine of ten on time. "
        "Unset: as many as fit.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=_MAX_CORES,
        description="Threads of one model step. Unset: one for each usable core.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that share the model out, each with its part of every layer, of the "
        "KV heads and of the threads; on GPUs each has one of its own. More than one: with weights "
        "as loaded.",
    )
    zone: str = Field(
        "",
        max_length=253,
        description="Where this worker runs, such as a cloud's zone: of pairs that are otherwise "
        "alike routers prefer those in one. Unset: as discovery says.",
    )
    nvlink_domain: str = Field(
        "",
        max_length=253,
        description="Which NVLink domain this worker's GPU is in, by any name: as zone, and "
        "nearer.",
    )
    cpus: str | None = Field(
        None, description="Cores this process may use, such as 0-3,6. Unset: all it has."
    )
    transfer: TransferConfig = Field(
        TransferConfig(), description="How KV moves between this worker and others."
    )

    @field_validator("cpus")
    @classmethod
    def _check_cpus(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cpus(value)
        return value

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        check_step_limits(
            max_batched_tokens=self.max_batched_tokens, max_num_seqs=self.max_num_seqs
        )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.tensor_parallel == 1:
            return self
        if self.quantization != "none":  # scales of parts are not those of a whole
            raise ValueError(
                f"tensor_parallel ({self.tensor_parallel}) needs quantization none "
                f"(got {self.quantization})"
            )
        return self


def parse_cpus(text: str) -> frozenset[int]:
    """Read ``0-3,6`` as core numbers. Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"expected cores such as 0-3,6 (got {text!r})")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise ValueError(f"{part.strip()!r} counts down")
        if high >= _MAX_CORES:
            raise ValueError(f"there is no core {high} (got {text!r})")
        cores.update(range(low, high + 1))
    return frozenset(cores)
