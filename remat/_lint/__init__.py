"""What a policy, on a program, would silently not do."""
