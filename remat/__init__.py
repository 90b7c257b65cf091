"""Named activation-rematerialization policies for JAX and Flax."""

from remat import policies as policies
