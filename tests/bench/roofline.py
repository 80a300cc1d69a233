"""Bytes and operations of one model step, and the least time a machine needs for them. Pure.

Counted is what cannot be avoided: each weight and each key and value that is
attended to is read once. Activations, norms and looked-up embeddings are left
out, so the time is a lower bound.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from diptych.engine.model.config import ModelConfig


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a step."""

    start: int  # position of the first: tokens whose KV is there already
    num_tokens: int
    sampled: bool  # whether the head is computed for the last one

    @classmethod
    def decode(cls, context_len: int) -> "Span":
        """One token that sees ``context_len`` tokens, itself included."""
        return cls(context_len - 1, 1, sampled=True)


class Storage(NamedTuple):
    """What is kept how, bytes."""

    weight_bytes: float = 4  # of an element of a linear
    row_bytes: int = 0  # besides, per output feature (an int8 weight's scale)
    kv_bytes: int = 0  # keys and values of one token in one layer


class Operation(NamedTuple):
    """A linear or an attention of a step."""

    num_bytes: int
    flops: int
    is_linear: bool


class Ceilings(NamedTuple):
    """What the machine can do."""

    bytes_per_s: float  # reading memory
    flops_per_s: float  # float32 matrix products
    linear_flops_per_s: float  # matrix products with the weights' element type


def operations(config: ModelConfig, storage: Storage, spans: Sequence[Span]) -> list[Operation]:
    """The operations of one step, in the order they run."""
    num_tokens = sum(span.num_tokens for span in spans)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(num_rows: int, columns: int, rows: int) -> Operation:
        num_bytes = int(rows * (columns * storage.weight_bytes + storage.row_bytes))
        return Operation(num_bytes, 2 * num_rows * columns * rows, is_linear=True)

    result = []
    for layer in config.layers:
        num_read = sum(_num_read(span, layer.sliding_window) for span in spans)
        num_pairs = sum(_num_pairs(span, layer.sliding_window) for span in spans)
        result += [
            linear(num_tokens, config.hidden_size, q_size + 2 * kv_size),
            Operation(num_read * storage.kv_bytes, 4 * q_size * num_pairs, is_linear=False),
            linear(num_tokens, q_size, config.hidden_size),
            linear(num_tokens, config.hidden_size, 2 * config.intermediate_size),
            linear(num_tokens, config.intermediate_size, config.hidden_size),
        ]
    num_sampled = sum(span.sampled for span in spans)
    if num_sampled:
        result.append(linear(num_sampled, config.hidden_size, config.vocab_size))
    return result


def num_bytes(ops: Iterable[Operation]) -> int:
    return sum(op.num_bytes for op in ops)


def flops(ops: Iterable[Operation]) -> int:
    return sum(op.flops for op in ops)


def least_s(ops: Iterable[Operation], ceilings: Ceilings) -> float:
    """The roofline: operations run one after another, each bound by memory or arithmetic."""
    return sum(max(_memory_s(op, ceilings), _arithmetic_s(op, ceilings)) for op in ops)


def least_memory_s(ops: Iterable[Operation], ceilings: Ceilings) -> float:
    """Reading alone: what memory bandwidth utilisation (MBU) compares with."""
    return sum(_memory_s(op, ceilings) for op in ops)


def least_arithmetic_s(ops: Iterable[Operation], ceilings: Ceilings) -> float:
    """Arithmetic alone: what model FLOPs utilisation (MFU) compares with."""
    return sum(_arithmetic_s(op, ceilings) for op in ops)


def _memory_s(op: Operation, ceilings: Ceilings) -> float:
    return op.num_bytes / ceilings.bytes_per_s


def _arithmetic_s(op: Operation, ceilings: Ceilings) -> float:
    return op.flops / (ceilings.linear_flops_per_s if op.is_linear else ceilings.flops_per_s)


def _num_read(span: Span, window: int | None) -> int:
    """Tokens whose keys and values a span needs."""
    first = 0 if window is None else max(0, span.start - window + 1)
    return span.start + span.num_tokens - first


def _num_pairs(span: Span, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    lengths = range(span.start + 1, span.start + span.num_tokens + 1)
    return sum(lengths) if window is None else sum(min(length, window) for length in lengths)
