"""Whether a policy's rules by module, size and dtype fit anything at all."""

import warnings
from collections.abc import Iterable, Iterator, Sequence

from remat._naming._naming import values
from remat._regions._errors import UnmatchedRuleWarning, listed, near
from remat._regions._name_check import users_level
from remat._regions._region import Region
from remat._sizes import format_bytes
from remat.policies import Policy, Value
from remat.policies._by_place import LargerThan, OfDtype, place_selectors
from remat.policies._selector import Selector


def check_places(policy: Policy, regions: Sequence[Region]) -> None:
    """Warn of each rule by module, size or dtype that fits no value of the regions.

    Args:
        policy: A policy that may have such rules.
        regions: The regions that get it.
    """
    missing = list(place_selectors(policy))
    if not missing or not regions:
        return
    for value in _values(regions):
        missing = [one for one in missing if not one.matches(value)]
        if not missing:
            return
    for selector in missing:
        message = (
            f"{policy!r}: {selector!r} fits no value of the {len(regions)} regions. "
            f"{_what_there_is(selector, _values(regions))}"
        )
        warnings.warn(UnmatchedRuleWarning(message), stacklevel=users_level())


def _values(regions: Sequence[Region]) -> Iterator[Value]:
    seen: set[tuple[int, str]] = set()
    for region in regions:
        key = (id(region.eqn.params["jaxpr"]), region.path)
        if key not in seen:
            seen.add(key)
            yield from values(region.jaxpr, region_path=region.path)


def _what_there_is(selector: Selector, there: Iterable[Value]) -> str:
    if isinstance(selector, LargerThan):
        largest = max((value.bytes or 0 for value in there), default=0)
        return f"The largest has {format_bytes(largest)} ({largest} bytes)."
    if isinstance(selector, OfDtype):
        dtypes = {aval.dtype.name for value in there for aval in value.out_avals or ()}
        return f"Their dtypes are {listed(sorted(dtypes))}."
    paths = list(dict.fromkeys(value.module_path or "" for value in there))
    paths = [path for path in paths if path]
    if not paths:
        return "They have no module paths: Flax Linen gives them, or jax.named_scope."
    parts = dict.fromkeys(part for path in paths for part in path.split("/"))
    patterns = [str(p).split("/")[-1] for p in getattr(selector, "patterns", ())]
    return f"The modules are: {listed(paths)}.{near(patterns, list(parts))}"
