"""The named policies, as a terminal table and a page for one."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat import policies


def policies_table() -> Table:
    """Every named policy with what it keeps and when to use it."""
    table = Table(header_style="bold", show_lines=False)
    table.add_column("policy", no_wrap=True)
    for column in ("saves", "offloads", "when", "from"):
        table.add_column(column)
    for name in policies.names():
        about = policies.get(name).description
        table.add_row(name, about.saves, about.offloads, about.when, about.source)
    return table


def policy_page(name: str) -> RenderableType:
    """One policy in full.

    Raises:
        PolicyError: If there is none of that name.
    """
    policy = policies.as_policy(policies.parse(name))
    about = policy.description
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for label, text in (
        ("saves", about.saves),
        ("offloads", about.offloads),
        ("recomputes", about.recomputes),
        ("when", about.when),
        ("source", about.source),
        ("names", ", ".join(sorted(policy.checkpoint_names)) or "–"),
        ("use", _use(policy)),
    ):
        table.add_row(label, text)
    return Group(Text(policy.name, style="bold"), table)


def _use(policy: policies.Policy) -> str:
    if policy.needs_binding:
        return f"remat.with_policy(loss, {policy.name!r})"
    reader = "get" if policy.name in policies.names() else "parse"
    return f'nn.remat(Block, policy=remat.policies.{reader}("{policy.name}"))'
