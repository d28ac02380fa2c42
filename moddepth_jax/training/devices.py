"""Peak FLOP/s of known devices, and the memory that a run used."""

import re

import jax

from moddepth_jax.host import peak_bytes

# FLOP/s of dense bfloat16 matmuls on one JAX device, by a pattern of its `device_kind`; the first
# match counts. Sources: NVIDIA's data sheets (numbers with sparsity are twice these) and
# cloud.google.com/tpu/docs (a device of v2 and v3 is one of the two cores of a chip).
PEAKS = {
    r'GB200': 2500e12,
    r'B200': 2250e12,
    r'H100 PCIe': 756e12,
    r'H100 NVL': 835e12,
    r'G?H[12]00': 989e12,
    r'A100': 312e12,
    r'A30': 165e12,
    r'A10': 125e12,
    r'L40S': 362e12,
    r'L4': 121e12,
    r'RTX 4090': 165e12,
    r'TPU v6( lite|e)': 918e12,
    r'TPU v5( lite|e)': 197e12,
    r'TPU v5p?': 459e12,
    r'TPU v4': 275e12,
    r'TPU v3': 61.5e12,
    r'TPU v2': 22.5e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Return the peak FLOP/s of a device in dense bfloat16 matmuls; None if it is not known."""
    found = [peak for name, peak in PEAKS.items() if re.search(rf'\b{name}\b', device_kind)]
    return found[0] if found else None


def mfu(flops_per_second: float, num_devices: int) -> dict[str, float]:
    """Return {'mfu': counted FLOP/s over the peak of the devices}; empty if that is not known."""
    peak = peak_flops(jax.devices()[0].device_kind)
    return {'mfu': flops_per_second / (peak * num_devices)} if peak else {}


def peak_memory() -> tuple[int, str]:
    """Return the peak memory of this process in bytes, and whose memory it is.

    It is the largest peak of a device, or that of the host if devices do not report it, like CPUs.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all('peak_bytes_in_use' in found for found in stats):
        return max(found['peak_bytes_in_use'] for found in stats), 'a device'
    return peak_bytes(), 'the host'
