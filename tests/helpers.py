"""What several test modules share."""

import contextlib
import io
import re

from jax.ad_checkpoint import print_saved_residuals


def saved_residuals(fn, *args) -> list[str]:
    """What the backward pass of a function keeps besides arguments and constants.

    Each as `"named 'y'"` or `"output of dot_general"`, with `"host "` in front where
    it moved there; sorted. Read from what JAX prints for its users.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_saved_residuals(fn, *args)
    kept = []
    for line in printed.getvalue().splitlines():
        aval, _, what = re.split(r" from(?: |$)", line)[0].partition(" ")
        if what:
            kept.append(f"host {what}" if "<host>" in aval else what)
    return sorted(kept)


def stable_id(value: object) -> str:
    """A test id that is the same in every process: no addresses, sets in order."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return re.sub(r"\{([^{}:]*)\}", _in_order, text)


def _in_order(found: re.Match[str]) -> str:
    return "{" + ", ".join(sorted(found[1].split(", "))) + "}"
