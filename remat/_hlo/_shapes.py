"""Array shapes of HLO: element types, sizes without padding, memory spaces."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remat._hlo._errors import HloError

# XLA's PrimitiveType numbers: (name as JAX writes it, bits an element).
ELEMENT_TYPES: dict[int, tuple[str, int]] = {
    1: ("bool", 8),
    2: ("int8", 8),
    3: ("int16", 16),
    4: ("int32", 32),
    5: ("int64", 64),
    6: ("uint8", 8),
    7: ("uint16", 16),
    8: ("uint32", 32),
    9: ("uint64", 64),
    10: ("float16", 16),
    11: ("float32", 32),
    12: ("float64", 64),
    15: ("complex64", 64),
    16: ("bfloat16", 16),
    18: ("complex128", 128),
    19: ("float8_e5m2", 8),
    20: ("float8_e4m3fn", 8),
    21: ("int4", 4),
    22: ("uint4", 4),
    23: ("float8_e4m3b11fnuz", 8),
    24: ("float8_e5m2fnuz", 8),
    25: ("float8_e4m3fnuz", 8),
    26: ("int2", 2),
    27: ("uint2", 2),
    28: ("float8_e4m3", 8),
    29: ("float8_e3m4", 8),
    30: ("int1", 1),
    31: ("uint1", 1),
    32: ("float4_e2m1fn", 4),
    33: ("float8_e8m0fnu", 8),
}
_TUPLE = 13
_NO_DATA = {14: "opaque", 17: "token", 34: "buffer"}


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes."""

    dtype: str
    """As JAX writes it (`bfloat16`), or `tuple`, `token`, `opaque`."""
    dimensions: tuple[int, ...]
    element_bits: int
    memory_space: int
    """XLA's number: 0 is the device's main memory, 5 the host's."""
    elements: tuple["Shape", ...] = ()

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    @property
    def size(self) -> int:
        """Number of array elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Bytes of all leaves without padding."""
        if self.is_tuple:
            return sum(element.bytes for element in self.elements)
        return -(-self.size * self.element_bits // 8)

    def dimension(self, position: int) -> int:
        """The size of one dimension.

        Raises:
            HloError: There is no such dimension.
        """
        if not 0 <= position < len(self.dimensions):
            raise HloError(f"no dimension {position} in {list(self.dimensions)}")
        return self.dimensions[position]

    def at(self, index: tuple[int, ...]) -> "Shape":
        """The shape at a tuple index, `()` being the shape itself.

        Raises:
            HloError: There is no such element.
        """
        shape = self
        for position in index:
            if not 0 <= position < len(shape.elements):
                raise HloError(f"no element {list(index)} in a {self.dtype} shape")
            shape = shape.elements[position]
        return shape

    def leaves(self, prefix: tuple[int, ...] = ()) -> Iterator[tuple[tuple, "Shape"]]:
        """Each array in the shape with its index."""
        if not self.is_tuple:
            yield prefix, self
        for position, element in enumerate(self.elements):
            yield from element.leaves((*prefix, position))


class ShapeReader:
    """Turns shape messages into `Shape`s, each distinct array once."""

    def __init__(self) -> None:
        self._seen: dict[tuple, Shape] = {}

    def read(self, message: Any) -> Shape:
        kind = message.element_type
        if kind == _TUPLE:
            elements = tuple(self.read(part) for part in message.tuple_shapes)
            return Shape("tuple", (), 0, 0, elements)
        layout = message.layout
        key = (
            kind,
            tuple(message.dimensions),
            layout.memory_space,
            layout.element_size_in_bits,
        )
        if key not in self._seen:
            self._seen[key] = _array(*key)
        return self._seen[key]


def _array(kind: int, dimensions: tuple[int, ...], space: int, bits: int) -> Shape:
    if kind in ELEMENT_TYPES:
        name, natural_bits = ELEMENT_TYPES[kind]
        if any(size < 0 for size in dimensions):
            raise HloError(f"negative size in shape {list(dimensions)}")
        return Shape(name, dimensions, bits if bits > 0 else natural_bits, space)
    # Types added to XLA later have no size here, so they can hide nothing: a buffer of
    # such a value still has the size that the compiler assigned.
    return Shape(_NO_DATA.get(kind, f"type {kind}"), (), 0, space)
