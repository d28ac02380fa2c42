"""Attention kernels. This package imports nothing else of the project."""

from kernels_pallas.attention import attention

__all__ = ['attention']
