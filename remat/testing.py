"""Assertions for your own tests: gradients equal, saves exactly, peak below.

Each takes a function with regions in it (a loss, a block), and what to call it with.
All but `assert_same_gradients` take `jax.ShapeDtypeStruct`s as well as arrays, and run
nothing.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from remat import testing
    >>> block = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w).sum())
    >>> w, x = jnp.eye(4), jnp.ones((2, 4))
    >>> testing.assert_same_gradients(block, "save_dots", w, x)
    >>> testing.assert_saves(block, "save_dots", ["dot_general"], w, x)
    >>> testing.assert_recomputes(block, "save_dots", {"dot_general": 0}, w, x)
"""

import collections
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from remat import _jax_compat as compat
from remat._naming._residuals import Residual, residuals
from remat._regions._flatten import is_traceable
from remat._regions._with_policy import with_policy
from remat._report._analyze import analyze
from remat._sizes import format_bytes, parse_bytes
from remat._targets._target import Target

_TOLERANCES = {4: 1e-5, 8: 1e-10}
"""By bytes of a float, as a share of a leaf's largest gradient; others 1e-2."""

_AS_WRITTEN = {"xla_allow_excess_precision": False}
"""Round where the program does. By default XLA leaves out roundings to 16 bits within
what it fuses, and it fuses what is recomputed otherwise than what is kept."""


def assert_same_gradients(
    fn: Callable[..., Any],
    policy: Any,
    *args: Any,
    tolerance: float | None = None,
    **kwargs: Any,
) -> None:
    """Assert that a policy changes no value and no gradient.

    Compares `fn` under the policy with `fn` without regions, both jitted, and rounded
    to 16 bits wherever the program says so (`xla_allow_excess_precision` is off).
    Gradients are those of the sum of all outputs, by every floating-point argument.

    Args:
        fn: A function with regions in it.
        policy: What `remat.with_policy` takes.
        *args: Arrays, pytrees of them, and static values.
        tolerance: Largest difference, as a share of the largest value in a leaf. By
            default 1e-5 for 32 bits, 1e-10 for 64 and 1e-2 for fewer. Leaves within a
            tenth of that of zero, as a share of the largest gradient of all, are zero
            but for rounding (as of the bias of attention's keys) and count as equal.
        **kwargs: Keyword arguments of `fn`.

    Raises:
        AssertionError: Names the leaves that differ, and by how much.
    """

    expected = _outputs_and_gradients(with_policy(fn, "none"), args, kwargs)
    given = _outputs_and_gradients(with_policy(fn, policy), args, kwargs)
    largest = _largest(expected["gradients"])
    for path, one in expected["gradients"].items():
        if _is_rounding(
            largest, _tolerance(one, tolerance), one, given["gradients"][path]
        ):
            given["gradients"][path] = one

    def close(expected: Any, given: Any) -> bool:
        return _difference(expected, given) <= _tolerance(expected, tolerance)

    def complaint(expected: Any, given: Any) -> str:
        return (
            f"under {policy!r} it differs by {_difference(expected, given):.2e} of "
            f"its largest value, allowed are {_tolerance(expected, tolerance):.0e}"
        )

    chex.assert_trees_all_equal_comparator(close, complaint, expected, given)


def assert_saves(
    fn: Callable[..., Any],
    policy: Any,
    expected: Sequence[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Assert what exactly a policy keeps beyond what "nothing" keeps.

    Args:
        fn: A function with regions in it.
        policy: What `remat.with_policy` takes.
        expected: What is kept: checkpoint names, primitives (`"dot_general"`) or
            labels of `remat.residuals` (`"attention/query: dot_general"`), globs
            allowed, each as often as you like. `"host: "` in front means offloaded.
        *args: Arrays, `jax.ShapeDtypeStruct`s, pytrees of them, static values.
        **kwargs: Keyword arguments of `fn`.

    Raises:
        AssertionError: Lists what is kept and was not expected, and the reverse.
    """
    kept = _kept_beyond_nothing(fn, policy, args, kwargs)
    surplus = [r for r in kept if not any(_matches(r, entry) for entry in expected)]
    missing = [e for e in expected if not any(_matches(r, e) for r in kept)]
    if not surplus and not missing:
        return
    lines = [f"{policy!r} does not keep exactly what was expected."]
    lines += [f"  expected, and not kept: {entry!r}" for entry in missing]
    lines += [f"  kept, and not expected: {_described(r)}" for r in surplus]
    lines += [f"  kept as expected: {_described(r)}" for r in kept if r not in surplus]
    raise AssertionError("\n".join(lines))


def assert_recomputes(
    fn: Callable[..., Any],
    policy: Any,
    expected: Mapping[str, int],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Assert how many equations of a kind the backward pass computes again.

    Counted in the traced program of value and gradient, scans as often as they run,
    against the same program without regions.

    Args:
        fn: A function with regions in it.
        policy: What `remat.with_policy` takes.
        expected: Primitive name → how many are recomputed, such as
            `{"dot_general": 12}`. Other primitives are not looked at. A kernel counts
            as one equation (`{"pallas_call": 1}`), whatever is inside.
        *args: Arrays, `jax.ShapeDtypeStruct`s, pytrees of them, static values.
        **kwargs: Keyword arguments of `fn`.

    Raises:
        AssertionError: States the counts that differ.
    """
    with_regions = _counts(with_policy(fn, policy), args, kwargs)
    without = _counts(with_policy(fn, "none"), args, kwargs)
    again = {name: with_regions[name] - without[name] for name in expected}
    wrong = {name: n for name, n in again.items() if n != expected[name]}
    if wrong:
        raise AssertionError(
            f"under {policy!r} the backward pass recomputes "
            + ", ".join(
                f"{n} {name} (expected {expected[name]}, the forward pass has "
                f"{without[name]} with the backward pass's own)"
                for name, n in wrong.items()
            )
        )


def assert_peak_below(
    fn: Callable[..., Any],
    limit: int | str,
    *args: Any,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> None:
    """Assert that a compiled function needs no more device memory than a limit.

    Args:
        fn: What is compiled, as it is: give a whole training step, or
            `jax.value_and_grad(loss)`.
        limit: Bytes, or a text such as `"12GiB"`.
        *args: Arrays, `jax.ShapeDtypeStruct`s, pytrees of them, static values.
        target: Where it is to run: a name such as `"v5e"`, which need not be here,
            or None for the attached device. CPU figures do not carry over.
        donate_argnums: Arguments whose memory the outputs may take.
        **kwargs: Keyword arguments of `fn`.

    Raises:
        AssertionError: States the peak, and what holds most of it.
    """
    n_limit = parse_bytes(limit)
    report = analyze(fn, *args, target=target, donate_argnums=donate_argnums, **kwargs)
    if report.peak_bytes <= n_limit:
        return
    least = "" if report.exact else "at least "
    largest = [
        f"  {format_bytes(b.bytes)} {b.category} {b.dtype}{list(b.shape)} "
        f"{b.label or b.module_path or b.source or ''}".rstrip()
        for b in report.buffers[:5]
    ]
    raise AssertionError(
        f"the peak on {report.target} is {least}{format_bytes(report.peak_bytes)}, "
        f"{format_bytes(report.peak_bytes - n_limit)} above the limit of "
        f"{format_bytes(n_limit)}. Largest buffers at the peak:\n" + "\n".join(largest)
    )


# --- values and gradients


def _outputs_and_gradients(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Outputs and gradients by path, in float64 on the host."""
    total, arrays, paths = _summed(fn, args, kwargs)
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        raise TypeError(
            "assert_same_gradients runs the function: give it arrays, not "
            "jax.ShapeDtypeStruct"
        )
    grad = jax.grad(total, argnums=tuple(range(len(arrays))), has_aux=True)
    gradients, out = jax.jit(grad, compiler_options=_AS_WRITTEN)(*arrays)
    return {
        "outputs": _by_path(out),
        "gradients": dict(zip(paths, gradients, strict=True)),
    }


def _summed(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[Any], list[str]]:
    """The sum of what `fn` returns, as a function of its floating-point arguments."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    leaves = [leaf for _, leaf in with_paths]
    varying = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def total(*arrays: Any) -> Any:
        given = dict(zip(varying, arrays, strict=True))
        filled = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        inner_args, inner_kwargs = treedef.unflatten(filled)
        out = fn(*inner_args, **inner_kwargs)
        kept = [leaf for leaf in jax.tree.leaves(out) if _is_inexact(leaf)]
        wide = [jnp.sum(leaf.astype(jnp.promote_types(leaf, "f4"))) for leaf in kept]
        return sum(wide, jnp.zeros(())).real, kept

    paths = [jax.tree_util.keystr(with_paths[i][0]) for i in varying]
    return total, [leaves[i] for i in varying], paths


def _is_inexact(leaf: Any) -> bool:
    return is_traceable(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _by_path(tree: Any) -> dict[str, Any]:
    with_paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}


def _difference(expected: Any, given: Any) -> float:
    """The largest difference as a share of the largest value; inf where one is nan."""
    wide = np.complex128 if jnp.iscomplexobj(expected) else np.float64
    a, b = np.asarray(expected, wide), np.asarray(given, wide)
    if a.size == 0 or np.array_equal(a, b, equal_nan=True):
        return 0.0
    difference = np.abs(a - b).max() / max(np.abs(a).max(), np.finfo(np.float32).tiny)
    return float(difference) if np.isfinite(difference) else np.inf


def _largest(tree: Any) -> float:
    """The largest value in any leaf."""
    leaves = [np.abs(np.asarray(leaf)).max(initial=0) for leaf in jax.tree.leaves(tree)]
    return float(max(leaves, default=0.0))


def _is_rounding(largest: float, tolerance: float, *leaves: Any) -> bool:
    """Whether leaves are zero but for rounding, beside the largest gradient."""
    return _largest(leaves) <= tolerance / 10 * largest


def _tolerance(expected: Any, tolerance: float | None) -> float:
    if tolerance is not None:
        return tolerance
    itemsize = expected.dtype.itemsize // (2 if jnp.iscomplexobj(expected) else 1)
    return _TOLERANCES.get(itemsize, 1e-2)


# --- what is kept


def _kept_beyond_nothing(
    fn: Callable[..., Any], policy: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Residual]:
    nothing = residuals(with_policy(fn, "nothing"), *args, **kwargs)
    return _beyond(residuals(with_policy(fn, policy), *args, **kwargs), nothing)


def _beyond(found: Iterable[Residual], nothing: Iterable[Residual]) -> list[Residual]:
    """Residuals but for those that stand among what "nothing" keeps."""
    always = collections.Counter(map(_key, nothing))
    kept = []
    for residual in found:
        if always[_key(residual)] > 0:
            always[_key(residual)] -= 1
        else:
            kept.append(residual)
    return kept


def _key(residual: Residual) -> tuple[Any, ...]:
    return (
        residual.label,
        residual.source,
        residual.shape,
        residual.dtype,
        residual.on_host,
    )


def _matches(residual: Residual, entry: str) -> bool:
    prefix, _, rest = entry.partition("host: ")
    on_host = not prefix and bool(rest)
    pattern = rest if on_host else entry
    texts = (residual.checkpoint_name, residual.primitive, residual.label)
    return residual.on_host == on_host and any(
        text is not None and fnmatch.fnmatchcase(text, pattern) for text in texts
    )


def _described(residual: Residual) -> str:
    name = residual.checkpoint_name
    shape = f"{residual.dtype}[{','.join(map(str, residual.shape))}]"
    return (
        ("host: " if residual.on_host else "")
        + (f"{name!r}, " if name else "")
        + f"{residual.label} {shape}"
        + (f" x {residual.times}" if residual.times > 1 else "")
        + (f" ({residual.source})" if residual.source else "")
    )


# --- what is recomputed

_KERNELS = frozenset({"pallas_call"})


def _counts(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> collections.Counter[str]:
    """How often each primitive runs in one call of value and gradient."""
    total, arrays, _ = _summed(fn, args, kwargs)
    argnums = tuple(range(len(arrays)))
    step = jax.value_and_grad(total, argnums=argnums, has_aux=True)
    closed, _ = compat.trace(step, *arrays)
    counts: collections.Counter[str] = collections.Counter()
    _count(compat.open_jaxpr(closed), 1, counts)
    return counts


def _count(jaxpr: Any, times: int, counts: collections.Counter[str]) -> None:
    for eqn in _live(jaxpr):
        counts[eqn.primitive.name] += times
        if eqn.primitive.name in _KERNELS:
            continue  # one operation, whatever its program is
        inside = list(compat.subjaxprs(eqn.params))
        if eqn.primitive.name.startswith("custom_"):
            inside = inside[:1]  # the rest are its derivative rules
        for sub in inside:
            n = times * eqn.params.get("length", 1)
            _count(compat.open_jaxpr(sub), n, counts)


def _live(jaxpr: Any) -> list[Any]:
    """The equations whose results are used; compilers drop the others."""
    used = {id(atom) for atom in jaxpr.outvars}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(var) in used for var in eqn.outvars):
            live.append(eqn)
            used.update(id(atom) for atom in eqn.invars)
    return live
