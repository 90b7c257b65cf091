"""Selectors of values by the primitive that makes them."""

from dataclasses import dataclass

from remat.policies._checks import checked_count, checked_strings
from remat.policies._selector import Selector, call_code
from remat.policies._value import Value, has_batch_dims

MATMULS = frozenset({"dot_general", "scaled_matmul_wrapper"})
CONVOLUTIONS = frozenset({"conv_general_dilated"})
CHOICES = frozenset({"top_k", "approx_top_k", "argmax", "argmin"})
SORT = frozenset({"sort"})
ELEMENTWISE = frozenset(
    """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy
    cos cosh custom_jvp_call custom_jvp_call_jaxpr digamma div eq erf erf_inv erfc
    exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p
    logistic lt max min mul ne neg nextafter not one_minus_square or
    population_count pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
    """.split()
)


@dataclass(frozen=True, slots=True)
class MadeBy(Selector):
    """Values that one of some primitives makes."""

    wanted: frozenset[str]
    """Names of the primitives."""

    def matches(self, value: Value) -> bool:
        return value.primitive in self.wanted

    def primitives(self) -> frozenset[str] | None:
        return self.wanted

    def __repr__(self) -> str:
        return call_code("primitive", *sorted(self.wanted))


@dataclass(frozen=True, slots=True)
class MadeByOrIn(MadeBy):
    """Those too that a `custom_vjp` function makes with one of these primitives.

    A derivative rule may call such a function again, as Pallas' flash attention does
    for its statistics. Its derivative is then not asked for, so JAX shows the call to
    a policy, and nothing of what is in it.
    """

    def matches(self, value: Value) -> bool:
        function = value.params.get("call_jaxpr")
        return value.primitive in self.wanted or (
            value.primitive == "custom_vjp_call"
            and function is not None
            and any(eqn.primitive.name in self.wanted for eqn in function.eqns)
        )

    def __repr__(self) -> str:
        return call_code("primitive", *sorted(self.wanted))


@dataclass(frozen=True, slots=True)
class Dots(MadeBy):
    """Results of matrix products and convolutions."""

    def __repr__(self) -> str:
        return "dots()"


@dataclass(frozen=True, slots=True)
class Elementwise(MadeBy):
    """Results of elementwise primitives."""

    def __repr__(self) -> str:
        return "elementwise()"


@dataclass(frozen=True, slots=True)
class DotsNoBatch(Selector):
    """Results of matrix products without batch dimensions."""

    def matches(self, value: Value) -> bool:
        if value.primitive == "scaled_matmul_wrapper":
            # It always carries one batch dimension, of size 1 where there is none.
            return value.in_avals[0].shape[0] == 1
        is_batched = has_batch_dims(value.primitive, value.params)
        return value.primitive == "dot_general" and not is_batched

    def primitives(self) -> frozenset[str] | None:
        return MATMULS

    def __repr__(self) -> str:
        return "dots_no_batch()"


@dataclass(frozen=True, slots=True)
class Discrete(Selector):
    """Choices: which of several values was taken, or in which order."""

    def matches(self, value: Value) -> bool:
        return value.primitive in CHOICES or _carries_payload(value)

    def primitives(self) -> frozenset[str] | None:
        return CHOICES | SORT

    def __repr__(self) -> str:
        return "discrete()"


def _carries_payload(value: Value) -> bool:
    """Whether it is a sort that says where each element came from (`argsort`)."""
    return value.primitive == "sort" and len(value.in_avals) > value.params["num_keys"]


@dataclass(frozen=True, slots=True)
class EveryNth(Selector):
    """Every n-th value that a selector of primitives matches."""

    selector: Selector
    n: int
    start: int

    def matches(self, value: Value) -> bool:
        if not self.selector.matches(value):
            return False
        assert value.ordinal is not None, "values must be numbered"
        return value.ordinal % self.n == self.start

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.selector.needs(negated) | {"ordinal"}

    def primitives(self) -> frozenset[str] | None:
        return self.selector.primitives()

    def names(self) -> frozenset[str]:
        return self.selector.names()

    def mentions(self, name: str) -> bool:
        return self.selector.mentions(name)

    def __repr__(self) -> str:
        start = f", start={self.start}" if self.start else ""
        return f"every_nth({self.selector!r}, {self.n}{start})"


def primitive(*primitives: str) -> Selector:
    """Values that one of these primitives makes.

    A `custom_vjp` function that a derivative rule calls counts as the primitives in
    it: `primitive("pallas_call")` keeps what flash attention's kernel makes.

    Args:
        *primitives: Names, as a jaxpr prints them.

    Returns:
        The selector.

    Raises:
        PolicyError: If no name, or something else than strings, is given.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.primitive("exp", "reduce_max"))
        save(primitive('exp', 'reduce_max'))
    """
    names = checked_strings("primitive", "primitive", primitives)
    return MadeByOrIn(frozenset(names))


def dots() -> Selector:
    """Results of matrix products and convolutions.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.dots()) == policies.save_dots
        True
    """
    return Dots(MATMULS | CONVOLUTIONS)


def dots_no_batch() -> Selector:
    """Results of matrix products without batch dimensions: those with weights."""
    return DotsNoBatch()


def elementwise() -> Selector:
    """Results of elementwise primitives: activation functions, sums, products."""
    return Elementwise(ELEMENTWISE)


def discrete() -> Selector:
    """Choices: `top_k`, `argmax`, `argmin`, and sorts that carry a payload.

    Computed again with other rounding they can come out otherwise, and a gradient
    then flows along a route that the forward pass did not take. Masks drawn with a
    fixed probability (dropout) come out the same. A mask drawn with a computed one is
    a comparison like any other, and not seen: give it a checkpoint name.
    """
    return Discrete()


def every_nth(selector: Selector, n: int, start: int = 0) -> Selector:
    """Every n-th of a region's values of one kind.

    Args:
        selector: Which values; positions are counted within each kind of them, as
            `numbered` does.
        n: Distance from one to the next.
        start: Position of the first, from 0.

    Returns:
        The selector. It needs binding: JAX does not tell a value's position.

    Raises:
        PolicyError: If `n` or `start` is out of range.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.every_nth(policies.dots_no_batch(), 2))
        save(every_nth(dots_no_batch(), 2))
    """
    checked_count("every_nth", "n", n, 1)
    checked_count("every_nth", "start", start, 0)
    return EveryNth(selector, n, start % n)
