"""`remat.remat`: regions of functions and of Flax modules."""
