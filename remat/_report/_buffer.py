"""One buffer of a memory report."""

from dataclasses import dataclass

CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "batch",
    "argument",
    "residuals",
    "temporaries",
    "outputs",
    "constants",
    "unknown",
)
PHASES = ("forward", "backward", "recompute", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A value in memory at the peak; values that share its memory are merged in it."""

    bytes: int
    """As allocated on the target, padding included."""
    unpadded_bytes: int
    """What the shape alone needs."""
    shape: tuple[int, ...]
    """As allocated; for a stack over scan with the stacked dimension."""
    dtype: str
    """As stored, which may be narrower than the program's (TPU)."""
    memory_space: str
    """"device", "host" or "on-chip"."""
    category: str
    """One of `CATEGORIES`."""
    phase: str | None
    """The pass that computes it: one of `PHASES`; None for arguments and constants."""
    module_path: str | None
    """Flax modules and scopes; for an argument, a copy of one, or an output, its
    pytree path."""
    label: str | None
    """Checkpoint name or automatic label of a kept value."""
    source: str | None
    """The user's line, `model.py:12`."""
    n_stacked: int
    """Times the value is stacked under scan; 1 for a value of its own."""
    instruction: str
    """Name of the HLO instruction that writes it."""
    primitive: str | None
    """JAX primitive that computes it, such as `dot_general`."""
    n_runs: int = 1
    """Times that instruction runs (the trip counts of the loops around it)."""

    @property
    def name(self) -> str:
        """What to call it: its module and label, else its primitive or instruction."""
        if self.module_path and self.label:
            return f"{self.module_path} [{self.label}]"
        return self.module_path or self.label or self.primitive or self.instruction
