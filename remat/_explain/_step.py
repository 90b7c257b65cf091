"""Compile a step under a policy and say what the policy did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat._compare._measure import Setup, compiled_report, prepare
from remat._compile._compile import CompileError
from remat._explain._explain import explain_report
from remat._explain._fitting import Fitting, does_not_fit, policies_that_fit
from remat._explain._offload import nested_offloads
from remat._explain._proof import RegionProof, prove
from remat._files import write_text
from remat._finding import Finding
from remat._regions._make_regions import Wanted, made_first
from remat._regions._with_policy import RegionError, with_policy
from remat._report._diff import ReportDiff, diff
from remat._report._read_dump import report_from_dump
from remat._report._recomputed import Expected, expected_recompute
from remat._report._report import MemoryReport
from remat._targets._target import Target
from remat.policies import as_policy, none


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A compiled step, the one it is held against, and what was found."""

    report: MemoryReport
    """The step under the policy."""
    base: MemoryReport | None
    """The step it is held against, if one was asked for."""
    expected: Expected | None = field(repr=False)
    """What the traced step asks to be computed again; None where only a dump is."""
    findings: tuple[Finding, ...]
    """What is remarkable, the worst first."""
    tried: tuple[Fitting, ...] | None = None
    """Where the step does not fit a TPU or GPU: named policies, and if they would."""

    @property
    def proof(self) -> tuple[RegionProof, ...]:
        """Per region: the recompute asked for and that compiled, on one device."""
        return prove(self.report, self.expected) if self.expected else ()

    @property
    def diff(self) -> ReportDiff | None:
        """What changed from the base."""
        return diff(self.base, self.report) if self.base else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready data: the report's, with findings and difference."""
        change = self.diff
        return {
            **self.report.to_dict(),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "expected": dataclasses.asdict(self.expected) if self.expected else None,
            "proof": [dataclasses.asdict(one) for one in self.proof],
            "tried": [dataclasses.asdict(one) for one in self.tried or ()],
            "diff": change.to_dict() if change else None,
        }

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_html(self, path: str | Path | None = None) -> str:
        """All of it as one self-contained page, also written to `path` if given."""
        from remat._show.page import report_page

        text = report_page(self.report, self.diff, self.findings)
        if path is not None:
            write_text(path, text)
        return text

    def write(
        self,
        *,
        json: str | Path | None = None,
        html: str | Path | None = None,
        pprof: str | Path | None = None,
    ) -> list[str | Path]:
        """Writes the files that are named, and says which."""
        if json is not None:
            write_text(json, self.to_json(indent=1) + "\n")
        if html is not None:
            self.to_html(html)
        if pprof is not None:
            self.report.to_pprof(pprof)
        return [path for path in (json, html, pprof) if path is not None]

    def _repr_html_(self) -> str:
        from remat._show.page import notebook_html

        return notebook_html(self.report, self.diff, self.findings)

    def __str__(self) -> str:
        """Report, findings and difference as a terminal shows them."""
        from remat._show.console import as_text
        from remat._show.explanation import explanation_view

        return as_text(explanation_view(self))


def explain(
    loss: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    against: Any = None,
    target: Target | str | None = None,
    regions: Wanted | None = None,
    optimizer: Any = None,
    step: Callable[..., Any] | None = None,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    compiler_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compiles a training step and says what its policy did to memory and work.

    Args:
        loss: `loss(*args, **kwargs) -> scalar`.
        *args: Arrays or `jax.ShapeDtypeStruct`s, or pytrees of them.
        policy: For all regions, or a mapping by region; None leaves each its own.
        against: A policy to compare with, above all `"none"`; it is compiled too.
        target: `"v5e"`, `"h100"`, ...; None for the attached default device.
        regions: Regions to make first, in code that has none: `"scan"`, a pattern of
            module paths such as `"Block_*"`, or a list of these, as
            `remat.with_regions` takes them.
        optimizer: An optax optimizer whose update is part of the step.
        step: `step(loss)` returns the whole step, instead of the default one.
        has_aux: As in `jax.value_and_grad`.
        argnums: As in `jax.value_and_grad`.
        compiler_options: XLA options for the compile.
        on_progress: Called with a line of text as the work goes on.
        **kwargs: Keyword arguments of the loss.

    Returns:
        The report with findings: for a step that does not fit, what it needs and
        which named policies would fit (on a GPU each of those is compiled in full);
        a recompute that XLA removed, a peak that did not fall, a negative saving, and
        what else than residuals rules the peak.

    Raises:
        CompileError: XLA failed for another reason than memory.
        ValueError: For an unknown policy or target, or a loss without regions where a
            policy is given.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w))
        >>> loss = lambda w, x: layer(layer(x, w), w).sum()
        >>> shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> found = explain(loss, shape, shape, target="cpu", against="none")
        >>> found.report.recompute_flops > 0
        True
    """
    loss = made_first(loss, regions)
    setup = Setup.of(
        target,
        args,
        kwargs,
        compiler_options=compiler_options,
        optimizer=optimizer,
        step=step,
        has_aux=has_aux,
        argnums=argnums,
    )
    say = on_progress or (lambda line: None)
    report, expected = _compiled(loss, policy, setup, say)
    base = _compiled(loss, against, setup, say)[0] if against is not None else None
    without = base if against is not None and as_policy(against) == none else None
    findings = explain_report(report, expected=expected, base=without)
    tried = None if report.fits else _tried(loss, setup, say)
    if not report.fits:
        findings = (does_not_fit(report, tried), *findings)
    return Explanation(
        report=report, base=base, expected=expected, findings=findings, tried=tried
    )


def explain_dump(
    path: str | Path,
    *,
    against: str | Path | None = None,
    target: Target | str | None = None,
) -> Explanation:
    """Reads a dump of any job, and says what fills its memory.

    Args:
        path: As `report_from_dump` takes it.
        against: Another dump, to say what changed from.
        target: The device that both were compiled for.

    Returns:
        The report with its findings.

    Raises:
        HloError: A file cannot be read.
        TargetError: The target is missing, not known, or of another kind.
    """
    report = report_from_dump(path, target=target)
    base = None if against is None else report_from_dump(against, target=target)
    findings = explain_report(report)
    if not report.fits:
        findings = (does_not_fit(report), *findings)
    return Explanation(report=report, base=base, expected=None, findings=findings)


def _tried(
    loss: Callable[..., Any], setup: Setup, say: Callable[[str], None]
) -> tuple[Fitting, ...] | None:
    """What named policies would need; on a CPU no peak tells that (see its note)."""
    if setup.target.kind == "cpu":
        return None
    try:
        return policies_that_fit(loss, setup, say)
    except RegionError:  # there is none that could have a policy
        return ()


def _compiled(
    loss: Callable[..., Any], policy: Any, setup: Setup, say: Callable[[str], None]
) -> tuple[MemoryReport, Expected]:
    if policy is not None:
        loss = with_policy(loss, policy)
    say(f"tracing {policy or 'the step'}")
    found: list[Expected] = []
    prepared = prepare(
        loss, setup, on_trace=lambda jaxpr: found.append(expected_recompute(jaxpr))
    )
    try:
        report = compiled_report(
            prepared, setup, on_compile=lambda: say(f"compiling {policy or 'the step'}")
        )
    except CompileError as error:
        if where := nested_offloads(found[0].offloads):
            what = f"a scan inside a scan offloads {where}. {error}"
            raise CompileError(what) from None
        raise
    return report, found[0]
