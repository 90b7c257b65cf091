"""Find the largest batch or sequence that fits under each policy, by compiling.

Memory grows with the size, nearly along a line, so the next size to try is where the
line through the last two answers meets the limit, kept inside the bracket of what is
known to fit and known not to. On a TPU a search on floors (a probe takes a fraction of
a second) says where to begin; the answer is from full compiles under the real limit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from remat._compare._candidates import DEFAULT_POLICIES
from remat._compare._compare import compare
from remat._compare._comparison import Failure, Row, versions
from remat._compare._measure import Setup, compiled_report, first_line, prepare
from remat._files import write_text
from remat._regions._with_policy import NoNamesFound, with_policy
from remat._sizes import parse_bytes
from remat._targets._target import Target
from remat._targets._target import target as resolve_target

SCHEMA = "remat.fit/1"

MAX_SIZE = 2**24
"""No larger size is tried: what fits at this size is not limited by memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitRow:
    """The largest size that fits under one policy."""

    policy: str
    """The policy's name."""
    largest: int
    """The largest size that fits; 0 if the smallest does not."""
    row: Row
    """Its figures at that size (at the smallest size, if none fits)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The largest size that fits, for each policy."""

    model: str
    """What was compiled."""
    what: str
    """What was made larger: `batch` or `seq`."""
    multiple_of: int
    """Sizes tried are multiples of this."""
    target: Target
    """The device."""
    budget_bytes: int
    """Device memory that one step may use."""
    rows: tuple[FitRow, ...]
    """One row a policy."""
    skipped: tuple[Failure, ...] = ()
    """Policies without a row, and why."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How it was made."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of what took part."""

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-ready data."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "what": self.what,
            "multiple_of": self.multiple_of,
            "target": self.target.name,
            "budget_bytes": self.budget_bytes,
            "rows": [{"largest": r.largest, **r.row.to_dict()} for r in self.rows],
            "skipped": [dataclasses.asdict(s) for s in self.skipped],
            "options": dict(self.options),
            "versions": dict(self.versions),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The result as JSON text, also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def __str__(self) -> str:
        from remat._show.fit import fit_text

        return fit_text(self)


def fit(
    build: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]],
    *,
    start: int = 1,
    multiple_of: int = 1,
    policies: Sequence[Any] = DEFAULT_POLICIES,
    target: Target | str | None = None,
    budget: int | str | None = None,
    what: str = "batch",
    model: str = "",
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Fit:
    """Finds the largest size that fits the target under each policy.

    Args:
        build: `build(size)` returns `(loss, args)` at that batch or sequence length.
        start: The size to try first.
        multiple_of: Only multiples of this are tried (128 suits sequence lengths).
        policies: As in `compare`.
        target: As in `compare`.
        budget: As in `compare`.
        what: What the size is, for the table.
        model: What is compiled, for the table.
        options: Further facts to record with the result.
        on_progress: Called with a line of text as the work goes on.
        **settings: Further arguments of `compare` (`optimizer`, `regions`, ...).

    Returns:
        The largest size per policy, with the figures at that size.

    Raises:
        ValueError: As `compare`; or if `start` or `multiple_of` is below 1.
    """
    if start < 1 or multiple_of < 1:
        raise ValueError(
            f"start and multiple_of must be at least 1, but are {start}, {multiple_of}"
        )
    device = resolve_target(target)
    limit = parse_bytes(budget) if budget is not None else device.available_bytes
    say = on_progress or (lambda line: None)

    of_setup = {k: v for k, v in settings.items() if k in _OF_SETUP}

    def peak(policy: Any, n: int, probe: bool) -> int:
        say(f"{policy}: trying {what} {n * multiple_of}")
        loss, args = build(n * multiple_of)
        setup = Setup.of(device, args, **of_setup)
        prepared = prepare(
            with_policy(loss, policy, regions=settings.get("regions")), setup
        )
        return compiled_report(prepared, setup, probe=probe).peak_bytes

    rows, skipped = [], []
    for policy in policies:
        try:
            n = _largest(
                partial(peak, policy), max(start // multiple_of, 1), limit, device
            )
        except NoNamesFound as error:
            skipped.append(Failure(policy=str(policy), reason=first_line(error)))
            continue
        loss, args = build(max(n, 1) * multiple_of)
        found = compare(
            loss,
            *args,
            policies=(policy,),
            target=device,
            budget=limit,
            exact=True,
            **settings,
        )
        skipped += found.failed
        rows += [
            FitRow(policy=row.policy, largest=n * multiple_of, row=row)
            for row in found.rows
        ]
    return Fit(
        model=model,
        what=what,
        multiple_of=multiple_of,
        target=device,
        budget_bytes=limit,
        rows=tuple(rows),
        skipped=tuple(skipped),
        options=dict(options or {}),
        versions=versions(),
    )


_OF_SETUP = ("optimizer", "step", "has_aux", "argnums", "compiler_options")


def _largest(peak: Callable[..., int], start: int, limit: int, device: Target) -> int:
    """The largest n whose full compile is within the limit; 0 if n = 1 is not."""
    if device.kind != "tpu":
        return largest_within(lambda n: peak(n, probe=False), limit, start)
    # The compiler squeezes harder under its real limit than in a probe, so the floors'
    # answer is where to begin, not where to end.
    by_floor = largest_within(lambda n: peak(n, probe=True), limit, start)
    return largest_within(lambda n: peak(n, probe=False), limit, max(by_floor, 1))


def largest_within(
    size_of: Callable[[int], int], limit: int, start: int, upper: int = MAX_SIZE + 1
) -> int:
    """The largest n in [1, upper) with `size_of(n) <= limit`, for a growing size.

    Args:
        size_of: Bytes at n; asked as seldom as possible.
        limit: Bytes.
        start: Where to begin.
        upper: A value known, or taken, to be too large.

    Returns:
        That n, or 0 if 1 is too large.

    Example:
        >>> largest_within(lambda n: 100 + 7 * n, limit=1000, start=8)
        128
    """
    known: dict[int, int] = {}
    low, high, n = 0, upper, start
    while high - low > 1:
        known[n] = size_of(n)
        if known[n] <= limit:
            low = n
        else:
            high = n
        n = _next(known, limit, low, high)
    return low


def _next(known: Mapping[int, int], limit: int, low: int, high: int) -> int:
    """Where the line through the answers nearest the limit meets it, in (low, high)."""
    if len(known) > 8:
        # The size is no line; halving is certain to end.
        guess = (low + high) // 2
    else:
        nearest = sorted(known, key=lambda n: abs(known[n] - limit))[:2]
        a, b = (nearest[0], 0) if len(nearest) < 2 else nearest
        rise = known[a] - (known[b] if b else 0)
        guess = (
            a + int((limit - known[a]) * (a - b) // rise)
            if rise * (a - b) > 0
            else 2 * a
        )
    return max(low + 1, min(guess, high - 1))
