"""Worker settings, as the command line gives them."""

import pytest

from decode_worker.config import DecodeWorkerConfig
from diptych import settings
from diptych.errors import ConfigurationError
from diptych.v1 import worker_pb2
from diptych.worker.config import WorkerConfig, parse_cpus
from prefill_worker.config import PrefillWorkerConfig
from soft_worker.config import SoftWorkerConfig


def load(*args: str) -> DecodeWorkerConfig:
    return settings.load(DecodeWorkerConfig, args, prog="test", env_prefix="DIPTYCH_TEST_")


def test_flags() -> None:
    config = load(
        *("--model", "demo", "--kv-cache-memory", "512MiB", "--num-blocks", "128"),
        *("--max-model-len", "256", "--block-size", "16", "--max-batched-tokens", "64"),
        *("--transfer.transports", "inline", "--timers.drain-s", "3", "--no-local-prefill"),
    )
    assert config.kv_cache_memory == 512 * 2**20
    assert config.transfer.transports == ("inline",)
    assert config.timers.drain_s == 3
    assert config.timers.heartbeat_s == 1
    assert not config.local_prefill


def test_defaults() -> None:
    config = PrefillWorkerConfig(model="demo")
    assert (config.block_size, config.num_blocks, config.cpus) == (16, None, None)
    assert (config.kv_cache_memory, config.gpu_memory_utilization) == (None, 0.9)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--model"),
        (("--model", "demo", "--max-batched-tokens", "8"), "max_num_seqs"),
        (("--model", "demo", "--gpu-memory-utilization", "0"), "gpu-memory-utilization"),
        (("--model", "demo", "--tensor-parallel", "0"), "tensor-parallel"),
        (
            ("--model", "demo", "--tensor-parallel", "2", "--quantization", "int8"),
            r"tensor_parallel \(2\) needs quantization none \(got int8\)",
        ),
        (("--model", "demo", "--gpu-memory-utilization", "1.1"), "gpu-memory-utilization"),
        (("--model", "demo", "--cpus", "3-1"), "counts down"),
        (("--model", "demo", "--cpus", "a"), "expected cores"),
        (("--model", "demo", "--cpus", "0-99999999999"), "there is no core 99999999999"),
        (("--model", "demo", "--blocks", "8"), "blocks"),
        (("--model", "demo", "--dtype", "int8"), "--dtype"),
        (("--model", "demo", "--device", "tpu"), r"--device.*'auto', 'cpu' or 'cuda'"),
        (("--model", "demo", "--kv-cache-dtype", "int4"), r"--kv-cache-dtype.*'int8' or 'fp8'"),
    ],
)
def test_bad_flags_are_one_line(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(*args)
    assert "\n" not in caught.value.message


COUNTS = ["max-batched-tokens", "max-num-seqs", "max-model-len", "num-blocks"]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", ["4294967296", "9" * 400])
@pytest.mark.parametrize("kind", [PrefillWorkerConfig, DecodeWorkerConfig, SoftWorkerConfig])
def test_a_count_that_routers_cannot_be_told_of_is_one_line(
    kind: type[WorkerConfig], name: str, value: str
) -> None:
    args = ["--model", "demo", f"--{name}", value]
    with pytest.raises(ConfigurationError, match=f"^--{name}: .*'{value}'") as caught:
        settings.load(kind, args, prog="test", env_prefix="DIPTYCH_TEST_")
    assert "\n" not in caught.value.message


def test_routers_are_told_of_the_largest_counts() -> None:
    most = str(2**32 - 1)
    config = load("--model", "demo", *(part for name in COUNTS for part in (f"--{name}", most)))
    assert config.num_blocks is not None
    assert config.max_model_len is not None
    worker_pb2.WorkerState(
        max_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        blocks=worker_pb2.BlockCounts(total=config.num_blocks),
    )


@pytest.mark.parametrize("value", ["0", "1e-320", "86400000.1", "inf", "nan"])
def test_the_pace_is_one_that_a_client_could_ask_for(value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--tpot-ms: .*'{value}'"):
        load("--model", "demo", "--tpot-ms", value)
    assert load("--model", "demo", "--tpot-ms", "0.001").tpot_ms == 0.001


def test_cpus() -> None:
    assert parse_cpus("0-2,5") == {0, 1, 2, 5}
