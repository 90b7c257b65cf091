"""The one error of this package."""


class HloError(ValueError):
    """Bytes that are no HLO program, or one that contradicts itself."""
