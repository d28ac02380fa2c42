"""Generic Pallas, compiled by Triton: any NVIDIA or AMD GPU, or interpreted on a CPU."""
