"""Policies compared on one training step, from compiled programs."""
