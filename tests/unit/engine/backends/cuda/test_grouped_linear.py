"""Interpreted products with small numbers by groups, against plain torch on what they stand for."""

from tests.triton_interpreter import INTERPRETED

# isort: split
from pathlib import Path
from weakref import ReferenceType, ref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diptych.engine.backends.cuda import grouped_linear
from diptych.engine.backends.cuda.grouped_linear import GroupedLinear, takes
from diptych.engine.model.grouped import GroupedWeight, GroupFormat, Numbers
from tests.engines import PLAIN, load_decoder
from tests.grouped_weights import Scheme, write_pair
from tests.integration.test_fp8_weights import SCHEMES
from tests.integration.test_fp8_weights import Scheme as FP8Scheme
from tests.integration.test_fp8_weights import write_pair as write_fp8_pair

HOST = torch.device("cpu")


def weight_of(kind: GroupFormat, seed: int, *, in_order: bool = True) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        top = 127 if kind.numbers is Numbers.FP8 else 2**kind.numbers.bits
        return torch.randint(0, top, shape, generator=generator).to(torch.uint8)

    weight = GroupedWeight.empty(kind, HOST)
    weight.pack(numbers(kind.num_rows, kind.num_columns))
    if weight.zeros is not None:
        weight.zeros.copy_(numbers(*weight.zeros.shape))
    weight.scales.copy_(torch.rand(weight.scales.shape, generator=generator) - 0.5)
    if in_order:
        return weight
    return weight._replace(order=torch.randperm(kind.num_columns, generator=generator))


def linear_of(weight: GroupedWeight, bias: Tensor | None = None) -> GroupedLinear:
    return GroupedLinear(weight, bias, num_processors=8)


@settings(deadline=None, max_examples=40)
@given(
    num_rows=st.one_of(st.integers(1, 3), st.integers(4, 70)),
    num_outputs=st.integers(1, 70),
    num_groups=st.one_of(st.integers(1, 3), st.just(32)),
    num_spans=st.one_of(st.integers(1, 6), st.just(32)),
    numbers=st.sampled_from(Numbers),
    in_order=st.booleans(),
    is_symmetric=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(
    num_rows: int,
    num_outputs: int,
    num_groups: int,
    num_spans: int,
    numbers: Numbers,
    in_order: bool,
    is_symmetric: bool,
    has_bias: bool,
    seed: int,
) -> None:
    """Of what is behind the ends nothing is read: that is NaN, or of large numbers."""
    size = 32 * num_spans
    kind = GroupFormat(num_outputs, num_groups * size, numbers, size)
    weight = weight_of(kind, seed, in_order=in_order)
    if is_symmetric and weight.zeros is not None:
        weight.zeros.fill_(1 << (numbers.bits - 1))
    bias = torch.arange(num_outputs).float() if has_bias else None
    x = torch.full((num_rows + 1, kind.num_columns), torch.nan)[:num_rows]
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
    out = torch.full((num_rows + 1, num_outputs), torch.nan)
    assert linear_of(weight, bias)(x, out[:num_rows]).data_ptr() == out.data_ptr()
    want = x.double() @ weight.widened().double().T + (0 if bias is None else bias)
    magnitude = x.abs().double() @ weight.widened().abs().double().T + 100
    assert bool(((out[:num_rows] - want).abs() <= 1e-6 * magnitude).all())
    assert bool(out[num_rows].isnan().all())


def test_of_no_rows() -> None:
    weight = weight_of(GroupFormat(5, 32, Numbers.INT4, 32), 0)
    assert linear_of(weight)(torch.empty(0, 32)).shape == (0, 5)


@pytest.mark.parametrize("numbers", Numbers)
def test_a_row_has_the_same_bits_in_any_batch_of_2_to_16_and_of_17_to_64(numbers: Numbers) -> None:
    """Inputs in parts, as processors are left over."""
    linear = linear_of(weight_of(GroupFormat(40, 2048, numbers, 128), 1), torch.arange(40.0))
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
    for rows, most in ((slice(3, 5), 16), (slice(2, 15), 16), (slice(1, 19), 64)):
        assert torch.equal(linear(x[:most])[rows], linear(x[rows]))


@pytest.mark.parametrize("num_rows", [2, 40, 70])
@pytest.mark.parametrize("numbers", Numbers)
def test_what_is_no_number_stays_in_its_row(numbers: Numbers, num_rows: int) -> None:
    linear = linear_of(weight_of(GroupFormat(40, 128, numbers, 64), 1))
    x = torch.randn(num_rows, 128, generator=torch.Generator().manual_seed(0))
    wanted = linear(x)
    x[1, 3] = torch.nan
    got = linear(x)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[torch.arange(num_rows) != 1], wanted[torch.arange(num_rows) != 1])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("numbers", Numbers)
def test_many_rows_take_a_part_of_a_wide_weight_at_a_time(
    numbers: Numbers, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_linear, "_MAX_WIDENED_BYTES", 4 * 96 * 7)
    weight = weight_of(GroupFormat(40, 96, numbers, 32), 1)
    bias = torch.arange(40.0) if has_bias else None
    x = torch.randn(65, 96, generator=torch.Generator().manual_seed(0))
    want = F.linear(x, weight.widened(), bias)
    torch.testing.assert_close(linear_of(weight, bias)(x), want, rtol=1e-4, atol=1e-3)


def test_one_part_of_a_wide_weight_lies_beside_it_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_linear, "_MAX_WIDENED_BYTES", 4 * 96 * 7)
    widened, parts = GroupedLinear._widened, list[ReferenceType[Tensor]]()

    def counted(self: GroupedLinear, begin: int, end: int, like: Tensor) -> Tensor:
        assert not any(part() is not None for part in parts), "the part before it is still there"
        part = widened(self, begin, end, like)
        parts.append(ref(part))
        return part

    monkeypatch.setattr(GroupedLinear, "_widened", counted)
    linear_of(weight_of(GroupFormat(40, 96, Numbers.INT8, 32), 1))(torch.zeros(65, 96))
    assert len(parts) == 6


@pytest.mark.parametrize("group_size", [16, 24, 96])
def test_other_groups_are_not_taken(group_size: int) -> None:
    assert takes(GroupFormat(8, 4 * group_size, Numbers.INT4, group_size)) == (group_size == 96)
    assert not takes(GroupFormat(8, 4 * group_size + 32, Numbers.INT4, group_size))


@pytest.mark.parametrize(
    ("scheme", "is_kept"),
    [
        (Scheme("gptq"), True),
        (Scheme("gptq", bits=8, act_order=True), True),
        (Scheme("gptq", act_order=True, own_orders=True), False),  # of q, k and v
        (Scheme("gptq_v2", group_size=24), False),
        (Scheme("awq", group_size=-1), True),
    ],
    ids=str,
)
def test_a_checkpoint_is_kept_in_its_numbers(scheme: Scheme, is_kept: bool, tmp_path: Path) -> None:
    small, wide = write_pair(tmp_path, scheme, num_layers=1)
    (ours,), (theirs,) = (
        load_decoder(folder, backend=backend).weights.layers
        for folder, backend in ((small, INTERPRETED), (wide, PLAIN))
    )
    assert isinstance(ours.qkv, GroupedLinear) == is_kept
    assert isinstance(ours.down, GroupedLinear) == (scheme.group_size != 24)
    for one, other in ((ours.qkv, theirs.qkv), (ours.down, theirs.down)):
        x = torch.randn(3, one.in_features)
        torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-5)


def test_every_8_bit_float() -> None:
    """Negative ones, the smallest and the largest; by each of the kernels."""
    bits = torch.arange(256)[(torch.arange(256) & 127) != 127].to(torch.uint8)
    weight = GroupedWeight.empty(GroupFormat(len(bits), 32, Numbers.FP8, 32), HOST)
    weight.pack(bits[:, None].expand(-1, 32))
    weight.scales.fill_(3.0)
    x = torch.zeros(1, 32)
    x[0, 5] = 1.0
    want = 3.0 * bits.view(torch.float8_e4m3fn).float()
    for num_rows in (1, 2, 17, 65):
        got = linear_of(weight)(x.expand(num_rows, -1))
        assert torch.equal(got, want.expand(num_rows, -1))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_checkpoint_in_8_bit_floats_is_kept_so(scheme: FP8Scheme, tmp_path: Path) -> None:
    """But where scales are of blocks of no multiple of 32 inputs."""
    small, wide = write_fp8_pair(tmp_path, scheme)
    ours, theirs = (
        load_decoder(folder, backend=backend).weights.layers[0]
        for folder, backend in ((small, INTERPRETED), (wide, PLAIN))
    )
    assert isinstance(ours.down, GroupedLinear) == (scheme.columns != 40)
    assert isinstance(ours.qkv, GroupedLinear) == (scheme.columns != 40)
    for one, other in ((ours.qkv, theirs.qkv), (ours.down, theirs.down)):
        x = torch.randn(3, one.in_features)
        torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-5)
