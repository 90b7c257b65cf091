"""What the transformer policies share: tensors by name, and discrete choices."""

from remat.policies._by_kind import discrete
from remat.policies._description import Description
from remat.policies._factories import save, save_and_offload_names
from remat.policies._policy import Policy
from remat.policies._registry import entry

CHOICES = "discrete choices (top-k, argmax, argsort)"


def transformer(
    name: str,
    saved: tuple[str, ...] = (),
    offloaded: tuple[str, ...] = (),
    *,
    saves: str = "",
    offloads: str = "nothing",
    recomputes: str,
    when: str,
    source: str,
) -> Policy:
    """Register a set of tensors to keep in a transformer block.

    Discrete choices are saved beside the tensors: computed again with other
    rounding, a token could go to another expert than in the forward pass.
    """
    tensors = save_and_offload_names(save=saved, offload=offloaded)
    description = Description(
        saves=f"{saves}; {CHOICES}" if saves else CHOICES,
        offloads=offloads,
        recomputes=recomputes,
        when=when,
        source=source,
    )
    return entry(name, tensors | save(discrete()), description)
