"""Writes functions over vector registers as LLVM instructions.

For inner loops that keep many sums in registers: no compiler does so by itself.
Vectors are as wide as the registers of the machine that numba compiles for.
"""

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from diptych.engine.backends.cpu.kernels.processor import LANES

FLOAT32, BFLOAT16, INT8 = range(3)  # kinds of element
ELEMENT_BYTES = (4, 2, 1)


_LINE_BYTES = 64

I8, I16, I32, I64, FLOAT = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(I32, LANES)
ZERO = VECTOR([0.0] * LANES)
_RULES = ("contract", "nsz")


class VectorFunction:
    """One function of 64-bit integers, which may be addresses. ``b`` is its builder."""

    def __init__(self, module: Any, name: str, num_arguments: int) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * num_arguments)
        self.function = ir.Function(module, kind, name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.arguments = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def declared(self, name: str, kind: Any) -> Any:
        """What of LLVM's own is called so, to be called."""
        return cgutils.get_or_insert_function(self.function.module, kind, name)  # type: ignore[no-untyped-call]

    def end(self) -> Any:
        self.b.ret_void()
        return self.function

    def loop(self, end: Any, step: int, body: Callable[..., Any], *carried: Any) -> list[Any]:
        """``for i in range(0, end, step): carried = body(i, *carried)``; returns carried."""
        b = self.b
        entry = b.block
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        index, *inner = phis = [b.phi(value.type) for value in (I64(0), *carried)]
        for phi, value in zip(phis, (I64(0), *carried), strict=True):
            phi.add_incoming(value, entry)
        b.cbranch(b.icmp_signed("<", index, end), inside, after)
        b.position_at_end(inside)
        following = [b.add(index, I64(step)), *(body(index, *inner) or ())]
        for phi, value in zip(phis, following, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return inner

    def at(self, address: Any, *offsets: Any) -> Any:
        """An address plus offsets: numbers of bytes, or (count, bytes of one)."""
        b = self.b
        for offset in offsets:
            count, size = offset if isinstance(offset, tuple) else (offset, 1)
            count = I64(count) if isinstance(count, int) else count
            size = I64(size) if isinstance(size, int) else size
            address = b.add(address, b.mul(count, size))
        return address

    def load(self, address: Any, type_: Any = VECTOR, align: int = 4) -> Any:
        return self.b.load(self.b.inttoptr(address, type_.as_pointer()), align=align)

    def store(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=4)

    def elements(self, kind: int, address: Any) -> Any:
        """A vector of elements of one kind, as floats."""
        b = self.b
        if kind == FLOAT32:
            return self.load(address)
        if kind == INT8:
            loaded = self.load(address, ir.VectorType(I8, LANES), align=1)
            return b.sitofp(b.sext(loaded, INTEGERS), VECTOR)
        loaded = self.load(address, ir.VectorType(I16, LANES), align=2)
        return b.bitcast(b.shl(b.zext(loaded, INTEGERS), INTEGERS([16] * LANES)), VECTOR)

    def fetch(self, address: Any, num_bytes: int, *, to_write: bool = False) -> None:
        """Bring what is needed soon near (the second level of cache)."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        prefetch = self.declared("llvm.prefetch.p0", kind)
        for offset in range(0, num_bytes, _LINE_BYTES):
            place = self.b.inttoptr(self.at(address, offset), I8.as_pointer())
            self.b.call(prefetch, [place, I32(int(to_write)), I32(2), I32(1)])

    def splat(self, number: Any, count: int = LANES) -> Any:
        """A vector that has ``number`` in each of ``count`` lanes."""
        vector = ir.VectorType(number.type, count)
        first = self.b.insert_element(vector(ir.Undefined), number, I32(0))
        return self.shuffle(first, first, [0] * count)

    def shuffle(self, left: Any, right: Any, lanes: Iterable[int]) -> Any:
        """Lanes of two vectors, those of ``right`` counted on from LANES."""
        chosen = list(lanes)
        return self.b.shuffle_vector(left, right, ir.VectorType(I32, len(chosen))(chosen))

    def add(self, left: Any, right: Any) -> Any:
        return self.b.fadd(left, right, flags=_RULES)

    def plus_product(self, total: Any, left: Any, right: Any) -> Any:
        return self.add(total, self.b.fmul(left, right, flags=_RULES))

    def fused(self, left: Any, right: Any, total: Any) -> Any:
        """total + left * right, rounded once."""
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        return self.b.call(self.declared(f"llvm.fma.v{LANES}f32", kind), [left, right, total])

    def larger(self, left: Any, right: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", left, right), left, right)

    def fold_quads(self, fold: Callable[[Any, Any], Any], vector: Any) -> Any:
        """All quads of lanes folded into one, which is in each."""
        width = LANES
        while width > 4:
            width //= 2
            vector = fold(vector, self.shuffle(vector, vector, (i ^ width for i in range(LANES))))
        return vector

    def sum_each(self, vectors: list[Any]) -> Any:
        """Lane i: the sum over vectors[i]. LANES vectors, of which some may be None.

        Lanes of those hold anything that a sum of the others may be.
        """
        width = 1
        while width < LANES:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self._half_sums(left, right, width) for left, right in pairs]
            width *= 2
        return vectors[0]

    def _half_sums(self, left: Any, right: Any, width: int) -> Any:
        """Where i & width is 0 left[i] + left[i ^ width], elsewhere the same of right."""
        if left is None:
            return None
        lanes = range(LANES)
        if right is None:
            return self.add(left, self.shuffle(left, left, (i ^ width for i in lanes)))
        stay = self.shuffle(left, right, (i + LANES * bool(i & width) for i in lanes))
        move = self.shuffle(left, right, ((i ^ width) + LANES * bool(i & width) for i in lanes))
        return self.add(stay, move)

    def transposed(self, vectors: list[Any]) -> list[Any]:
        """Lane j of vector i to lane i of vector j. LANES vectors."""
        vectors, lanes = list(vectors), range(LANES)
        width = 1
        while width < LANES:
            for i in lanes:
                if i & width:
                    continue
                low, high = vectors[i], vectors[i | width]
                vectors[i] = self.shuffle(
                    low, high, (j ^ width | LANES if j & width else j for j in lanes)
                )
                vectors[i | width] = self.shuffle(
                    low, high, (j | LANES if j & width else j ^ width for j in lanes)
                )
            width *= 2
        return vectors

    def exp(self, x: Any) -> Any:
        """Natural exponent of each lane, as :func:`.exponent.exp`."""
        b = self.b

        def constant(number: float) -> Any:
            return VECTOR([number] * LANES)

        def product_plus(left: Any, right: float | Any, plus: float | Any) -> Any:
            right, plus = (constant(v) if isinstance(v, float) else v for v in (right, plus))
            return b.fadd(b.fmul(left, right, flags=["contract"]), plus, flags=["contract"])

        for limit, beyond in ((-87.0, "<"), (87.0, ">")):
            x = b.select(b.fcmp_ordered(beyond, x, constant(limit)), constant(limit), x)
        shifted = product_plus(x, 1.44269504, 128.0)
        whole = b.sub(b.fptosi(shifted, INTEGERS), INTEGERS([128] * LANES))  # rounds down
        number = b.sitofp(whole, VECTOR)
        rest = product_plus(number, -0.693359375, x)
        rest = product_plus(number, 2.12194440e-4, rest)
        f = b.fmul(rest, constant(1.44269504))
        p = constant(2.1612924e-4)
        for coefficient in (
            1.2467844e-3,
            9.6754518e-3,
            5.5485281e-2,
            2.4022931e-1,
            6.9314704e-1,
            1.0,
        ):
            p = product_plus(p, f, coefficient)
        bits = b.shl(b.add(whole, INTEGERS([127] * LANES)), INTEGERS([23] * LANES))
        return b.fmul(p, b.bitcast(bits, VECTOR))


def written(write: Callable[..., Any], *variants: tuple[Any, ...]) -> Any:
    """What ``write`` makes, for compiled loops. With variants, the first argument is which."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        numbers = cgutils.unpack_tuple(builder, arguments[0])  # type: ignore[no-untyped-call]
        if not variants:
            builder.call(write(builder.module), numbers)
            return context.get_dummy_value()
        done = builder.append_basic_block()
        choice = builder.switch(numbers[0], done)
        for number, variant in enumerate(variants):
            block = builder.append_basic_block()
            choice.add_case(I64(number), block)
            builder.position_at_end(block)
            builder.call(write(builder.module, *variant), numbers[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    def declare(_typing: Any, *numbers: Any) -> Any:
        kinds = types.UniTuple(types.int64, len(numbers))  # type: ignore[no-untyped-call]
        return types.void(kinds), emit

    return intrinsic(declare)
