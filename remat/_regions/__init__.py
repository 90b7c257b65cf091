"""Find the regions of a function, and give them another policy from outside."""
