"""What the devices of a run could compute, and the memory that it used."""

import re
import resource
import sys

import jax

# FLOP/s of dense bfloat16 matmuls on one device of JAX, by its `device_kind`; the first that
# matches. From the data sheets of NVIDIA (the numbers with sparsity are twice these) and from
# cloud.google.com/tpu/docs (of v2 and v3 a device is one of a chip's two cores).
PEAKS = {
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
    r'TPU v6 (lite|e)': 918e12,
    r'TPU v5 (lite|e)': 197e12,
    r'TPU v5p?': 459e12,
    r'TPU v4': 275e12,
    r'TPU v3': 61.5e12,
    r'TPU v2': 22.5e12,
}


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of dense bfloat16 matmuls that a device reaches at most; None if it is not known."""
    found = [peak for name, peak in PEAKS.items() if re.search(rf'\b{name}\b', device_kind)]
    return found[0] if found else None


def usage(flops_per_second: float) -> dict[str, float]:
    """`mfu`, if the peak is known: counted FLOP/s over that of all devices; `peak_memory_bytes`.

    The memory is the most that a device of this process held since the process began, or where
    devices do not say, as CPUs, its resident set in the host's.
    """
    peak, devices = peak_flops(jax.devices()[0].device_kind), jax.local_devices()
    found = {'mfu': flops_per_second / (peak * jax.device_count())} if peak else {}
    held = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in devices]
    unit = 1 if sys.platform == 'darwin' else 1024
    resident = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found | {'peak_memory_bytes': resident if None in held else max(held)}


def memory_holder() -> str:
    """What `peak_memory_bytes` is a part of."""
    return 'a device' if jax.devices()[0].memory_stats() else 'the host'
