"""The path of a value's module, from the region's path on."""


def joined(region_path: str | None, module_path: str) -> str:
    """The path of a module in a region, from the outermost module on.

    A region's path may end with the modules that all of its values are made in, which
    their own paths then start with.

    Args:
        region_path: `Region.path`; None where it is not known.
        module_path: The path inside the region; empty for the region itself.

    Example:
        >>> joined("GPT/layers", "layers/mlp/wi"), joined("Net/Block_0", "wi")
        ('GPT/layers/mlp/wi', 'Net/Block_0/wi')
    """
    outer = region_path.split("/") if region_path else []
    inner = module_path.split("/") if module_path else []
    most = min(len(outer), len(inner))
    shared = next((n for n in range(most, 0, -1) if outer[-n:] == inner[:n]), 0)
    return "/".join(outer + inner[shared:])
