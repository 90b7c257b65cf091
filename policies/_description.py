"""What a policy does, in words."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a policy does, a line each."""

    saves: str
    """What stays in device memory."""
    offloads: str = "nothing"
    """What moves to host memory."""
    recomputes: str = "everything else"
    """What the backward pass computes again."""
    when: str
    """When to use it."""
    source: str = "this library"
    """Project or paper it comes from."""


def describe_either(left: Description, right: Description) -> Description:
    """Of `left | right`."""
    return Description(
        saves=_listed(left.saves, right.saves),
        offloads=_listed(left.offloads, right.offloads),
        when="no single policy keeps what you want kept",
    )


def describe_limited(left: Description, word: str, right: Description) -> Description:
    """Of `left & right` and `left - right`, which keep some of what `left` keeps."""
    limit = f", {word} {_listed(right.saves, right.offloads)}"
    return Description(
        saves=left.saves if left.saves == "nothing" else left.saves + limit,
        offloads=left.offloads if left.offloads == "nothing" else left.offloads + limit,
        when="a named policy keeps too much",
    )


def describe_opposite(description: Description) -> Description:
    """Of `~policy`."""
    kept = _listed(description.saves, description.offloads)
    return Description(
        saves=f"everything but {kept}",
        recomputes=kept,
        when="what to recompute is easier said than what to keep",
    )


def _listed(*parts: str) -> str:
    kept = [part for part in dict.fromkeys(parts) if part != "nothing"]
    return "; ".join(kept) or "nothing"
