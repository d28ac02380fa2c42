"""Attention kernels. This package imports nothing else of the project."""

from kernels_pallas.decode import decode_attention
from kernels_pallas.depth_attention import depth_attention
from kernels_pallas.ordered import order_before_writes

__all__ = ['decode_attention', 'depth_attention', 'order_before_writes']
