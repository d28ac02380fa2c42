"""XLA backends, for CPUs and every other platform; they support every call."""
