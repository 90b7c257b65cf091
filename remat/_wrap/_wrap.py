"""`remat.remat`: make a region of a function, a Flax module or one of its methods.

What `jax.checkpoint`, `flax.linen.remat` and `flax.nnx.remat` do, with their traps
taken out: flags are given by name and stay Python values, parameters keep their
names and initial values, every public method is covered, a bound method's module
is passed rather than captured, and a policy that would do nothing raises.

The call is in three layers. `Arguments` (in `_hold`) sits at the user's edge: it
names arguments and holds static what JAX would not trace. The lifting in the
middle turns a Flax module into arrays, and depends on the kind of target.
`Rule.region` is at the core: a pure function of pytrees, made a region.
"""

import dataclasses
import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax

from remat import _jax_compat as compat
from remat import policies
from remat._regions._effects import naming_callbacks
from remat._wrap._hold import Arguments, accepts_name, argument_names, hold, release
from remat._wrap._rolled_scan import in_rolled_scan_body

Target = TypeVar("Target")
PreventCSE = bool | Literal["auto"]

TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises when Python code needs the value of a traced argument."""


def remat(
    target: Target,
    policy: Any = "nothing",
    prevent_cse: PreventCSE = "auto",
    static_argnames: str | Sequence[str] = (),
) -> Target:
    """Make `target` a region: its backward pass recomputes what `policy` does not keep.

    Args:
        target: A function; a Linen or NNX module class or instance; a method of
            one, bound or not; any callable pytree (an Equinox module); or a
            `functools.partial` of these. A function may take Linen or NNX modules
            as arguments: their rngs, sown values and mutable state are kept up.
        policy: A Policy, a registered name, a JAX policy, or a mapping from region
            pattern to those. `"nothing"` recomputes all; `"none"` makes no region.
        prevent_cse: Whether XLA is kept from merging the recomputation with the
            forward pass, which would undo it. `"auto"` is True, which is right
            wherever the region runs, except where it can be seen to be traced
            straight into the body of a rolled Flax scan, whose loop boundary does
            the same at no cost.
        static_argnames: Arguments that stay Python values as a whole, however
            they are passed. Flags, strings, numbers, functions and None stay so
            without being named; naming one makes a traced value for it an error.

    Returns:
        The same kind of thing as `target`, which is left as it was. A module keeps
        its parameters' names and initial values, so weights saved without the
        region load with it. A class becomes a subclass of the same name.

    Raises:
        PolicyError: The policy is unknown, or names only values that the region
            does not emit (raised at the call).
        StaticArgumentError: An argument named static is traced (at the call).
        TypeError, ValueError: The target or an argument's name is none.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> def block(w, x, train):
        ...     return jnp.tanh(x @ w) if train else x
        >>> block = remat.remat(block, policy="save_dots", static_argnames="train")
        >>> block(jnp.eye(2), jnp.ones((1, 2)), train=False).shape
        (1, 2)
    """
    names = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
    rule = Rule.make(policy, prevent_cse)
    return _wrap(target, rule, tuple(names))


def _traced(fn: Callable[..., Any], args: Any, kwargs: Any) -> compat.AnyJaxpr:
    return compat.trace(lambda: fn(*args, **kwargs))[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How a region is made, whatever is in it."""

    policy: policies.Policy
    """What is kept; a `PolicyMap` chooses by the path of the region."""
    prevent_cse: PreventCSE

    @classmethod
    def make(cls, policy: Any, prevent_cse: PreventCSE) -> "Rule":
        if not isinstance(prevent_cse, bool) and prevent_cse != "auto":
            raise ValueError(
                f"prevent_cse must be True, False or 'auto', got {prevent_cse!r}"
            )
        given = policies.as_policy(policy)
        if "layer" in given.needs:
            raise policies.PolicyError(
                f"{given!r} chooses by layer, and remat.remat sees one module at a "
                "time. Wrap the layers with policy='nothing' and give this policy to "
                "remat.with_policy(loss, policy), which sees them all."
            )
        return cls(given, prevent_cse)

    def region(self, fn: Callable[..., Any], strict: bool = True) -> Callable[..., Any]:
        """`fn`, which must be pure and take pytrees of arrays, as a region.

        Args:
            fn: What the region computes.
            strict: Whether it must emit one of the names that the policy names.
        """
        if self.policy == policies.none:
            return fn
        with compat.remat3_off():  # 0.10 reads the flag here, 0.12 at the call
            by_prevent = {on: self._checkpoint(fn, on, strict) for on in (True, False)}

        @functools.wraps(fn)
        def region(*args: Any, **kwargs: Any) -> Any:
            if self.prevent_cse == "auto":
                prevent = not in_rolled_scan_body()
            else:
                prevent = self.prevent_cse
            traced = functools.partial(_traced, fn, args, kwargs)
            with compat.remat3_off(), naming_callbacks(traced):
                return by_prevent[prevent](*args, **kwargs)

        return region

    def _checkpoint(
        self, fn: Callable[..., Any], prevent_cse: bool, strict: bool
    ) -> Callable[..., Any]:
        # Rules by module or size need the region's values labelled, and names need
        # to be checked against those that the region emits: both need its jaxpr.
        policy = self.policy
        if not policy.needs_binding and not (strict and policy.checkpoint_names):
            return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)
        from remat._regions._with_policy import with_policy

        def flat_region(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = jax.tree.flatten((args, kwargs))
            out_trees = []

            def flat_fn(*leaves: Any) -> list[Any]:
                args, kwargs = treedef.unflatten(leaves)
                out_leaves, out_tree = jax.tree.flatten(fn(*args, **kwargs))
                out_trees.append(out_tree)
                return out_leaves

            flat_fn.__name__ = getattr(fn, "__name__", flat_fn.__name__)
            checkpointed = jax.checkpoint(flat_fn, prevent_cse=prevent_cse)
            out_leaves = with_policy(checkpointed, policy)(*leaves)
            return out_trees[-1].unflatten(out_leaves)

        return flat_region


# --- which kind of target


def _wrap(target: Any, rule: Rule, static: tuple[str, ...]) -> Any:
    if isinstance(target, functools.partial):
        inner = _wrap(target.func, rule, static)
        return type(target)(inner, *target.args, **target.keywords)
    if _is_linen(target):
        from remat._wrap import _linen

        return _linen.wrap(target, rule, static)
    if _is_nnx(target):
        from remat._wrap import _nnx

        return _nnx.wrap(target, rule, static)
    if isinstance(target, type) or not callable(target):
        raise TypeError(
            "remat.remat takes a function, a Linen or NNX module (class or instance), "
            f"a method or a callable pytree, got {_name(target)!r}, "
            f"{'a class of another kind' if isinstance(target, type) else 'an object'}"
            f" ({type(target).__name__}). Wrap an instance of it, or the function "
            "that calls it."
        )
    check_names(static, [target], label_of(target))
    if inspect.ismethod(target) and _is_passable(target.__self__):
        return wrap_function(target, rule, static, target.__func__, (target.__self__,))
    if not _is_single_leaf(target):
        return wrap_function(target, rule, static, type(target).__call__, (target,))
    if hasattr(target, "compact"):  # a method inside a Linen class's definition
        from remat._wrap import _linen

        return _linen.wrap_method(target, rule, static)
    return wrap_function(target, rule, static, target)


def wrap_function(
    target: Callable[..., Any],
    rule: Rule,
    static: tuple[str, ...],
    fn: Callable[..., Any],
    owner: tuple[Any, ...] = (),
) -> Callable[..., Any]:
    """`target` as a region, which is `fn` called with `owner` in front.

    What owns a method is passed as an argument like any other, so that its arrays
    are inputs of the region and not constants in it.
    """
    arguments = Arguments(target, label_of(target), static)

    @functools.wraps(fn)
    def pure(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = release((args, kwargs))
        return hold(fn(*args, **kwargs))

    region = rule.region(pure)

    @functools.wraps(target)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        keep = _flax_objects()
        held_args, held_kwargs = arguments.hold(args, kwargs, keep)
        held_args = (*hold(owner, keep), *held_args)
        try:
            if held_args and is_bound_linen(held_args[0]):
                from remat._wrap import _linen

                return _linen.call(fn, rule, held_args, held_kwargs)
            if _has_nnx((held_args, held_kwargs), keep):
                from remat._wrap import _nnx

                return _nnx.call(fn, rule, held_args, held_kwargs)
            return release(region(*held_args, **held_kwargs))
        except TRACE_ERRORS as error:
            arguments.reraise(error, args, kwargs)

    return wrapped


def check_names(
    names: Sequence[str], fns: Sequence[Callable[..., Any]], label: str
) -> None:
    """Raise unless each static name is an argument of one of the functions."""
    for name in names:
        if not any(accepts_name(fn, name) for fn in fns):
            known = sorted({n for fn in fns for n in argument_names(fn)} - {"self"})
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"static_argnames: {label} has no argument {name!r}"
                + (f"; did you mean {near[0]!r}? " if near else "; ")
                + f"It has {', '.join(known) or 'none'}."
            )


def label_of(target: Any) -> str:
    """What errors call a target: its name, with its class where it has one."""
    owner = getattr(target, "__self__", None)
    name = getattr(target, "__name__", type(target).__name__)
    if owner is not None and not inspect.ismodule(owner):
        return f"{type(owner).__name__}.{name}"
    qualified = getattr(target, "__qualname__", name)
    return qualified.rpartition("<locals>.")[2]


def _name(target: Any) -> str:
    return getattr(target, "__name__", None) or repr(target)[:60]


# --- Flax, when the program uses it; if it is not loaded, nothing is a module


def _linen() -> Any:
    return sys.modules.get("flax.linen")


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _is_a(target: Any, base: type) -> bool:
    return isinstance(target, base) or (
        isinstance(target, type) and issubclass(target, base)
    )


def _is_linen(target: Any) -> bool:
    return _linen() is not None and _is_a(target, _linen().Module)


def _is_nnx(target: Any) -> bool:
    return _nnx() is not None and _is_a(target, _nnx().Module)


def is_bound_linen(value: Any) -> bool:
    linen = _linen()
    return (
        linen is not None
        and isinstance(value, linen.Module)
        and value.scope is not None
    )


def _flax_objects() -> Callable[[Any], bool]:
    """Which objects Flax's own lifting must see whole."""
    kinds: tuple[type, ...] = ()
    if _linen() is not None:
        kinds += (_linen().Variable,)
    if _nnx() is not None:
        kinds += (_nnx().Pytree, _nnx().Variable)

    def keep(value: Any) -> bool:
        return isinstance(value, kinds) or is_bound_linen(value)

    return keep


def _has_nnx(tree: Any, keep: Callable[[Any], bool]) -> bool:
    nnx = _nnx()
    if nnx is None:
        return False
    leaves = jax.tree.leaves(tree, is_leaf=keep)
    return any(isinstance(leaf, nnx.Pytree | nnx.Variable) for leaf in leaves)


def _is_single_leaf(target: Any) -> bool:
    return jax.tree.leaves(target) == [target]


def _is_passable(owner: Any) -> bool:
    """Whether a method's object can be an argument of the region.

    An unbound Linen module (as in `model.apply`) holds no arrays and stays a
    constant; so does any object that is no pytree.
    """
    if isinstance(owner, type):
        return False
    return is_bound_linen(owner) or _is_nnx(owner) or not _is_single_leaf(owner)
