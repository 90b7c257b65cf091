"""Whether the checkpoint names that a policy goes by are emitted at all."""

import os
import sys
import warnings
from collections.abc import Sequence

from remat import policies
from remat._regions._emitted import Emitted, emitted
from remat._regions._errors import MissingNamesWarning, NoNamesFound, listed, near
from remat._regions._region import Region
from remat.policies import Policy


def check_names(policy: Policy, regions: Sequence[Region]) -> None:
    """Refuse checkpoint names that nothing emits; warn where only some are.

    Args:
        policy: A policy that may go by checkpoint names.
        regions: The regions that get it.

    Raises:
        NoNamesFound: No name that the policy spells out, or none that fits its
            patterns, is emitted.
    """
    if not regions:
        return
    wanted = policy.checkpoint_names
    if not wanted:
        return _check_patterns(policy, regions)
    found = emitted((region.jaxpr for region in regions), wanted=wanted)
    missing = tuple(sorted(set(wanted) - set(found.names)))
    if not missing:
        return
    # A registered policy lists the spellings of many models; yours may be a typo.
    is_registered = policy.name in policies.names()
    message = (
        f"{policy!r} names {listed(missing)}, which no region emits. "
        f"{_what_is_emitted(found, () if is_registered else missing)}"
    )
    if len(missing) == len(wanted) and found.is_complete:
        raise NoNamesFound(f"{message} As it is, nothing would be kept by name.")
    warnings.warn(MissingNamesWarning(message, missing), stacklevel=users_level())


def _check_patterns(policy: Policy, regions: Sequence[Region]) -> None:
    """Refuse patterns that no emitted name fits, where nothing else is kept."""
    if not policy.keeps_by_name_only:
        return
    found = emitted(region.jaxpr for region in regions)
    if found.is_complete and not any(map(policy.mentions, found.names)):
        raise NoNamesFound(
            f"{policy!r} keeps values by patterns of their checkpoint names, and no "
            f"region emits one that fits. {_what_is_emitted(found)}"
        )


def _what_is_emitted(found: Emitted, missing: Sequence[str] = ()) -> str:
    if not found.names:
        what = (
            "The regions emit no checkpoint names; mark values with "
            "jax.ad_checkpoint.checkpoint_name(x, name)."
        )
    else:
        what = f"The regions emit: {listed(found.names)}.{near(missing, found.names)}"
    unread = " A derivative rule in them could not be read, and may emit others."
    return what if found.is_complete else what + unread


def users_level() -> int:
    """How many calls up the user's code is, past this package, JAX and Flax."""
    names = [name for name in ("remat", "jax", "flax") if name in sys.modules]
    files = [sys.modules[name].__file__ or "" for name in names]
    packages = tuple(os.path.dirname(file) + os.sep for file in files)
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(packages):
        level, frame = level + 1, frame.f_back
    return level
