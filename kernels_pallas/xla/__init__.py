"""XLA backends: every platform, every call."""
