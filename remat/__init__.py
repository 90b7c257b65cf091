"""Named activation-rematerialization policies for JAX and Flax."""
