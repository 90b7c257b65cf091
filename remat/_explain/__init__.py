"""Whether a policy did what was meant, told from the compiled program."""
