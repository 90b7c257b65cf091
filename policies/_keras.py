"""Keras' `RematScope` modes."""

from remat.policies._by_kind import elementwise
from remat.policies._by_place import in_module, larger_than
from remat.policies._catalogue import nothing
from remat.policies._checks import checked_strings
from remat.policies._description import Description
from remat.policies._factories import recompute
from remat.policies._policy import Policy
from remat.policies._registry import entry, maker, same

_SOURCE = "Keras, RematScope"

keras_full = same("keras_full", nothing, _SOURCE)
keras_activations = entry(
    "keras_activations",
    recompute(elementwise()),
    Description(
        saves="results of products, convolutions, reductions and moves of data",
        recomputes="elementwise operations: activation functions, sums, products",
        when="activation functions are large and cheap, as in convolutional nets",
        source=_SOURCE,
    ),
)


@maker
def keras_larger_than(n_bytes: int = 4096) -> Policy:
    """Recompute values of more than so many bytes, save the smaller ones.

    Args:
        n_bytes: The size in bytes; Keras counts elements, 1024 by default.

    Returns:
        The policy. It needs binding.

    Raises:
        PolicyError: If it is not a whole number of bytes.

    Example:
        >>> from remat import policies
        >>> policies.keras_larger_than(2**20)
        keras_larger_than(1048576)
    """
    policy = recompute(larger_than(n_bytes))
    code = f"keras_larger_than({n_bytes})"
    return policy.renamed(
        code,
        code,
        Description(
            saves=f"values of at most {n_bytes} bytes",
            recomputes=f"values of more than {n_bytes} bytes",
            when="a few large values fill the memory",
            source=_SOURCE,
        ),
    )


@maker
def keras_list_of_layers(*layers: str) -> Policy:
    """Recompute the values made in some layers, save all others.

    Args:
        *layers: Names of layers, or glob patterns of module paths.

    Returns:
        The policy. It needs binding.

    Raises:
        PolicyError: If none, or something else than strings, is given.

    Example:
        >>> from remat import policies
        >>> policies.keras_list_of_layers("dense_1", "conv_*")
        keras_list_of_layers('dense_1', 'conv_*')
    """
    checked_strings("keras_list_of_layers", "layer", layers)
    code = f"keras_list_of_layers({', '.join(map(repr, layers))})"
    return recompute(in_module(*layers)).renamed(
        code,
        code,
        Description(
            saves="everything outside of these layers",
            recomputes=f"values made in {', '.join(layers)}",
            when="you know which layers' values fill the memory",
            source=_SOURCE,
        ),
    )
