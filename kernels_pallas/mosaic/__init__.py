"""Kernels for NVIDIA Hopper in Mosaic GPU, compiled, or interpreted on a CPU."""
