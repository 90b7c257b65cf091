"""What can be wrong with a policy, or with what was given for one."""


class PolicyError(ValueError):
    """A policy, or what was given for one, is wrong."""


class UnknownPolicyError(PolicyError):
    """No policy is registered under a name."""


class DuplicatePolicyError(PolicyError):
    """A name is already taken by another policy."""


class UnboundPolicyError(PolicyError):
    """A rule was asked something that JAX alone does not say about a value."""
