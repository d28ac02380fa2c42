"""Attention kernels. This package imports nothing else of the project."""

from kernels_pallas.attention import attention
from kernels_pallas.decode import decode_attention

__all__ = ['attention', 'decode_attention']
