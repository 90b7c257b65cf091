"""Private. Equations and programs made by hand; checked on jax 0.10.2 - 0.12.0.1."""
