"""What is raised where a model is asked for that cannot be."""


class PresetError(ValueError):
    """A preset, a size or an option that does not exist or cannot be."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or holds a model that is not here."""


class TrainError(ValueError):
    """A training run that cannot start, go on or be written down."""
