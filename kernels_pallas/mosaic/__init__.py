"""Pallas kernels compiled by Mosaic GPU for NVIDIA Hopper, or interpreted on a CPU."""
