"""What each CUDA kernel takes of a processor, without one: registers, stack and shared memory.

    python -m tests.bench.kernel_resources

Layers of real shapes are run in bfloat16 on tensors of the host, products with weights of small
numbers too, tokens drawn and blocks digested; each launch is compiled as it would be for a
device, with its own arguments and constants, and not carried out. The figures are cuobjdump's,
of the machine code; it comes with triton. ``--json FILE`` writes them there. What is in
``kernel_record.json`` is not compiled again; after a change of a kernel ``--record`` renews it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from diptych.engine.backends.cuda import kv_memory, sampler
from diptych.engine.backends.cuda.attention import PagedAttention
from diptych.engine.backends.cuda.backend import CudaBackend
from diptych.engine.backends.cuda.float_linear import FloatLinear
from diptych.engine.backends.cuda.fp8_linear import DeviceFp8Linear, DeviceFp8Weights
from diptych.engine.backends.cuda.grouped_linear import GroupedLinear
from diptych.engine.backends.cuda.query_tiles import TileShape
from diptych.engine.inputs import StepInputs, build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.grouped import GroupedWeight, GroupFormat, Numbers
from diptych.engine.model.layers import LayerBuffers, run_layers
from diptych.engine.model.parts import Linear, Rotation
from diptych.engine.model.weights import LayerWeights
from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.sampling_params import SamplingParams
from diptych.word_sums import Words
from tests.bench.kernel_record import PATH, KernelRecord, Taken
from tests.gpu.models import MODELS

MAX_SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # of a program: A100, L40S, H100
CAPABILITIES = tuple(MAX_SHARED_BYTES)
WHOLE = (80, 90)  # for which all is compiled; what others get otherwise is known
_FP8_CAPABILITY = 90  # the first whose products take 8-bit floats with a scale for each row
_AT_89 = (  # what is not as on sm_80: instructions for 8-bit floats, and little shared memory
    ("Llama-3.1-8B", torch.float8_e4m3fn, torch.bfloat16),
    ("Gemma 2 2B", torch.float32, torch.float32),
)
BLOCK_SIZE = 32
_NUM_PROCESSORS = 132  # an H100's: contexts of single tokens are cut into parts

_Launch: TypeAlias = tuple[str, Taken, Mapping[str, Any]]  # a kernel's key, and its constants


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel as it is launched for one model."""

    model: str  # or whose products
    cache: str  # its element type
    kernel: str
    window: int | None  # tokens, of attention
    capability: int
    num_warps: int
    num_registers: int  # of a thread
    num_stack_bytes: int  # of a thread; what did not fit into registers lies there
    num_shared_bytes: int  # of a program


class _Target:
    """What triton asks of a driver before it compiles. It cannot launch anything."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


class _Step(NamedTuple):
    """Of every kind of layer of a model: two single tokens and a chunk of a prompt."""

    config: ModelConfig
    cache: KVCache
    inputs: StepInputs
    dtype: torch.dtype
    shape: TileShape

    @classmethod
    def of(
        cls,
        model: str,
        capability: int,
        cache_dtype: torch.dtype,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "_Step":
        config = ModelConfig.from_hf(MODELS[model])
        kinds = {layer.sliding_window: layer for layer in config.layers}
        config = replace(config, layers=tuple(kinds.values()))
        table = tuple(range(16))
        chunks = (
            Chunk(token_ids=(1,), start=500, block_table=table, sample=None),
            Chunk(token_ids=(1,), start=0, block_table=table[:1], sample=None),
            Chunk(token_ids=tuple(range(300)), start=100, block_table=table, sample=None),
        )
        return cls(
            config,
            KVCache(config, len(table), BLOCK_SIZE, cache_dtype),
            build_inputs(StepPlan(chunks=chunks), BLOCK_SIZE),
            dtype,
            TileShape.of(config.head_dim, dtype, cache_dtype, MAX_SHARED_BYTES[capability]),
        )


class _NoProducts:
    """A linear layer that leaves its result as it is. Implements ``Linear``."""

    in_features = out_features = 0

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x if out is None else out


def measure(
    model: str, capability: int, cache_dtype: torch.dtype, record: KernelRecord
) -> list[Resources]:
    """Of all kernels that a step of prompts and single tokens launches, each variant once."""
    with _compiled_for(capability, record) as launches:
        _run(_Step.of(model, capability, cache_dtype))
        return _each_once(model, _name(cache_dtype), capability, launches)


def measure_attention(
    model: str,
    capability: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    record: KernelRecord,
) -> list[Resources]:
    """Of those alone that write keys and values, and attend."""
    name = model if dtype is torch.bfloat16 else f"{model} in {_name(dtype)}"
    with _compiled_for(capability, record) as launches:
        step = _Step.of(model, capability, cache_dtype, dtype)
        _attend(step, _NUM_PROCESSORS)
        _attend(step, 1)
        return _each_once(name, _name(cache_dtype), capability, launches)


def measure_products(numbers: Numbers, capability: int, record: KernelRecord) -> list[Resources]:
    """Of the products with a weight of small numbers, of one row, few, some and many."""
    linears = []
    for group_size, zero in ((128, 0), (128, 1 << (numbers.bits - 1)), (4096, 0), (32, 0)):
        weight = GroupedWeight.empty(
            GroupFormat(4096, 4096, numbers, group_size), torch.device("cpu")
        )
        if weight.zeros is not None:
            weight.zeros.fill_(zero)
        linears.append(GroupedLinear(weight, num_processors=_NUM_PROCESSORS))
    return _of_products(f"{numbers.name} weights", linears, (1, 16, 64, 65), capability, record)


def measure_float_products(capability: int, record: KernelRecord) -> list[Resources]:
    """Of those of 16-bit floats, but for torch's own: of one row."""
    shapes = ((1024, 3072), (28_672, 4096), (576, 1536))
    linears = [FloatLinear(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    return _of_products("bfloat16 weights", linears, (1,), capability, record)


def measure_fp8_products(capability: int, record: KernelRecord) -> list[Resources]:
    """Of those of 8-bit floats with scales by rows, but for torch's own."""
    store = DeviceFp8Weights(torch.device("cpu"), torch.bfloat16, _NUM_PROCESSORS)
    linears = []
    for num_outputs, num_inputs in ((4096, 14_336), (28_672, 4096)):
        weight = store.allocate(num_outputs, num_inputs)
        linears.append(DeviceFp8Linear(weight, None, _NUM_PROCESSORS))
    products = _of_products("fp8", linears, (1, 16, 64), capability, record)
    return products + _rounding_beside(capability, record)


def _rounding_beside(capability: int, record: KernelRecord) -> list[Resources]:
    """What a layer's other kernels take where they round, once a product asked for that."""
    config = ModelConfig.from_hf(MODELS["Llama-3.1-8B"])
    size, dtype = config.hidden_size, torch.bfloat16
    ops = CudaBackend(torch.device("cpu")).layer_ops(config, dtype)
    x, weight = torch.zeros(1, size, dtype=dtype), torch.ones(size)
    store = DeviceFp8Weights(torch.device("cpu"), dtype, _NUM_PROCESSORS)
    linear = DeviceFp8Linear(store.allocate(size, size), None, _NUM_PROCESSORS)
    with _compiled_for(capability, record) as launches:
        ops.multiply(linear, x, torch.empty_like(x))
        launches.clear()
        ops.norm(x, weight, x)
        ops.add_norm(x, x, None, weight, x)
        return [
            _resources("fp8", "-", capability, taken, constants) for _, taken, constants in launches
        ]


def _of_products(
    model: str,
    linears: Sequence[Linear],
    nums_rows: Sequence[int],
    capability: int,
    record: KernelRecord,
) -> list[Resources]:
    with _compiled_for(capability, record) as launches:
        for linear in linears:
            for num_rows in nums_rows:
                linear(torch.zeros(num_rows, linear.in_features, dtype=torch.bfloat16))
        return _each_once(model, "-", capability, launches)


def _each_once(
    model: str, cache: str, capability: int, launches: Sequence[_Launch]
) -> list[Resources]:
    found: dict[str, Resources] = {}
    for key, taken, constants in launches:
        found.setdefault(key, _resources(model, cache, capability, taken, constants))
    return list(found.values())


@contextmanager
def _compiled_for(capability: int, record: KernelRecord) -> Iterator[list[_Launch]]:
    """Compiles what is launched meanwhile, if it was not yet; in order."""
    launches: list[_Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **constants)
        launches.append((*record.taken(kernel), constants))

    triton.runtime.driver.set_active(_Target(capability))
    triton.knobs.runtime.jit_cache_hook = record.before_compiling
    with mock.patch.object(JITFunction, "run", compile_only):
        yield launches


def _run(step: _Step) -> None:
    """All of it; draws; digests."""
    config, cache, dtype = step.config, step.cache, step.dtype
    backend = CudaBackend(torch.device("cpu"))
    x = torch.zeros(len(step.inputs.token_ids), config.hidden_size, dtype=dtype)
    angles = torch.zeros(len(x), config.head_dim // 2)
    run_layers(
        config,
        [_weights(config)] * config.num_layers,
        backend.layer_ops(config, dtype),
        PagedAttention(config, cache, _NUM_PROCESSORS, step.shape).begin_step(step.inputs),
        {layer.rope: Rotation(angles, angles) for layer in config.layers},
        x,
        LayerBuffers.of(config, lambda _, size: x.new_empty(len(x), size)),
    )
    _attend(step, 1)
    logits = torch.empty(2, config.vocab_size)
    params = (SamplingParams(temperature=0.0), SamplingParams(top_k=40, top_p=0.9))
    sampler.draw(logits, [SampleSpec(params=each, allow_stop=True) for each in params], [9, 9])
    memory, block = cache.memory.bytes.view(torch.int64), np.array([cache.block_bytes // 8])
    for lines in (None, np.zeros((1, 40), np.int64)):
        kv_memory.add_up(memory, Words(block, block, lines))


def _attend(step: _Step, num_processors: int) -> None:
    config = step.config
    attention = PagedAttention(config, step.cache, num_processors, step.shape)
    of_layer = attention.begin_step(step.inputs)
    num_rows = len(step.inputs.token_ids)
    q = torch.zeros(num_rows, config.num_heads, config.head_dim, dtype=step.dtype)
    kv = torch.zeros(num_rows, 2, config.num_kv_heads, config.head_dim, dtype=step.dtype)
    for layer in range(config.num_layers):
        of_layer(layer, q, kv, q)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weights(config: ModelConfig) -> LayerWeights:
    norm, products = torch.ones(config.hidden_size), _NoProducts()
    head_norm = torch.ones(config.head_dim) if config.qk_norm else None
    post_norm = norm if config.post_norms else None
    return LayerWeights(
        input_norm=norm,
        qkv=products,
        q_norm=head_norm,
        k_norm=head_norm,
        output=products,
        post_attention_norm=post_norm,
        mlp_norm=norm,
        gate_up=products,
        down=products,
        post_mlp_norm=post_norm,
    )


def _resources(
    model: str, cache: str, capability: int, taken: Taken, constants: Mapping[str, Any]
) -> Resources:
    window = constants.get("window")
    return Resources(
        model=model, cache=cache, capability=capability, window=window, **asdict(taken)
    )


def largest(found: Sequence[Resources]) -> list[str]:
    """For each kernel the most that any shape takes: lines of a table, in the order of names."""
    lines = ["| kernel | " + " | ".join(f"sm_{each}" for each in CAPABILITIES) + " |"]
    lines.append("|---|" + "---|" * len(CAPABILITIES))
    for kernel in sorted({part.kernel for part in found}):
        cells = [
            f"{max(p.num_registers for p in own)}, {max(p.num_shared_bytes for p in own):,}"
            if own
            else "-"
            for own in (
                [p for p in found if (p.kernel, p.capability) == (kernel, capability)]
                for capability in CAPABILITIES
            )
        ]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file to write instead of a table")
    parser.add_argument("--largest", action="store_true", help="one line for each kernel")
    parser.add_argument(
        "--record", action="store_true", help=f"compile all, and write {PATH.name} anew"
    )
    parser.add_argument(
        "--again", type=int, default=0, help="entries of the record to compile nevertheless"
    )
    arguments = parser.parse_args()
    out: Path | None = arguments.json
    record = KernelRecord(None if arguments.record else PATH, arguments.again)
    kinds = [(model, torch.bfloat16) for model in MODELS]
    kinds += [("Llama-3.1-8B", dtype) for dtype in (torch.int8, torch.float8_e4m3fn)]
    found = [
        part
        for model, cache_dtype in kinds
        for capability in WHOLE
        for part in measure(model, capability, cache_dtype, record)
    ]
    found += [
        part
        for numbers in Numbers
        for capability in WHOLE
        for part in measure_products(numbers, capability, record)
    ]
    found += [part for capability in WHOLE for part in measure_float_products(capability, record)]
    found += [
        part
        for capability in WHOLE
        if capability >= _FP8_CAPABILITY
        for part in measure_fp8_products(capability, record)
    ]
    for model, cache_dtype, dtype in _AT_89:
        found += measure_attention(model, 89, cache_dtype, dtype, record)
    if arguments.record:
        record.write(PATH)
    if out is not None:
        out.write_text(json.dumps([asdict(part) for part in found]))
        sys.stdout.write(f"compiled: {len(record.compiled)}\n")
        return
    if arguments.largest:
        sys.stdout.write("\n".join(largest(found)) + "\n")
        return
    names = list(asdict(found[0]))
    lines = [names, ["---"] * len(names)]
    lines += [["-" if v is None else str(v) for v in asdict(part).values()] for part in found]
    sys.stdout.writelines(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
