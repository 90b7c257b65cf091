"""What is raised where a model is asked for that cannot be."""


class PresetError(ValueError):
    """A preset, a size or an option that does not exist or cannot be."""
