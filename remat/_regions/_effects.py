"""Callbacks that regions do not allow, by the user's line that makes them.

JAX (0.10 - 0.12) differentiates no region with an `io_callback` in it, ordered or not;
its error names neither the callback nor the line. `jax.debug.callback` it runs in both
passes.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax.extend.core as jec

from remat import _jax_compat as compat

_JAX_SAYS = "Effects not supported"


@contextlib.contextmanager
def naming_callbacks(program: Callable[[], compat.AnyJaxpr]) -> Iterator[None]:
    """Have JAX's refusal of an effect in a region name the callback's line.

    Args:
        program: What is differentiated; called where that failed.

    Raises:
        NotImplementedError: JAX's, with the line and what to do.
    """
    try:
        yield
    except NotImplementedError as error:
        if not str(error).startswith(_JAX_SAYS):
            raise
        lines = dict.fromkeys(_io_callbacks(compat.open_jaxpr(program())))
        raise NotImplementedError(
            "JAX differentiates no region with an io_callback in it; here it is called "
            f"at {', '.join(lines) or 'an unknown line'}. Return the value and call "
            "back outside the region, or use jax.debug.callback, which runs in both "
            "passes."
        ) from error


def _io_callbacks(jaxpr: jec.Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "io_callback":
            yield compat.source_line(eqn) or "an unknown line"
        for sub in compat.subjaxprs(eqn.params):
            yield from _io_callbacks(compat.open_jaxpr(sub))
