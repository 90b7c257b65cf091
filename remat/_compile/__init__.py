"""Lower and compile a function for a target, keeping what XLA decided on memory."""
