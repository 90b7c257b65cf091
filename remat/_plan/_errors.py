"""The planner's error."""


class PlanError(ValueError):
    """A plan cannot be made, read or applied."""
