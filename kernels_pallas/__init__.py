"""Attention over a sequence and over depth slots. Imports nothing from the rest of the project."""

from kernels_pallas.decode import decode_attention
from kernels_pallas.depth_attention import depth_attention
