"""The device and the package versions of this machine."""

import contextlib
import importlib.metadata
import json
import subprocess
import sys

PACKAGES = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'jax-triton', 'triton', 'flax', 'numpy')
_PROBE = """
import json, jax
device = jax.devices()[0]
print(json.dumps({
    'platform': device.platform, 'device': device.device_kind,
    'capability': str(getattr(device, 'compute_capability', '')),
    'platform_version': device.client.platform_version}))
"""


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages that may change results."""
    found = {'python': sys.version.split()[0]}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def probe() -> tuple[dict, str]:
    """Ask another process about JAX's first device, so that this process allocates no memory on it.

    Returns the fields of _PROBE ({} if JAX did not start), and the last line on stderr.
    """
    command = [sys.executable, '-c', _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {}, 'JAX did not start within 120 s'
    output, errors = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    found = json.loads(output[-1]) if done.returncode == 0 and output else {}
    return found, errors[-1] if errors else ''
