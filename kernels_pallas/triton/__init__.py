"""Pallas kernels compiled by Triton for any NVIDIA or AMD GPU, or interpreted on a CPU."""
