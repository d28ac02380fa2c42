"""Facts about this machine: its device, its versions, and why JAX sees no GPU."""

import glob
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys

# Of setup.py; JAX itself is looked at by `probe`.
REQUIRED = ('absl-py', 'flax', 'grain', 'ml_collections', 'numpy', 'optax', 'orbax-checkpoint')
REQUIRED += ('rich', 'tensorboardX', 'matplotlib', 'pyarrow', 'scipy', 'tokenizers', 'safetensors')
PACKAGES = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'jax-triton', 'triton', 'flax', 'numpy')
# The oldest driver that runs programs of a CUDA of this major version, on Linux.
OLDEST_DRIVERS = {'12': 525, '13': 580}
_PROBE = """
import json, jax
device = jax.devices()[0]
print(json.dumps({
    'platform': device.platform, 'device': device.device_kind,
    'capability': str(getattr(device, 'compute_capability', '')),
    'platform_version': device.client.platform_version}))
"""


def _installed(packages):
    """Versions of those packages that are there, by the names that pip has for them."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def missing_packages() -> list[str]:
    """Packages of setup.py that are not installed here."""
    return [package for package in REQUIRED if package not in _installed(REQUIRED)]


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that may change a result."""
    return {'python': sys.version.split()[0], **_installed(PACKAGES)}


def probe() -> tuple[dict, str]:
    """Asks another process for JAX's first device, because this one must not hold its memory.

    Returns its facts, as in _PROBE, empty if JAX did not start; and the last line of its errors.
    """
    command = [sys.executable, '-c', _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {}, 'JAX does not start in 120 s'
    output, errors = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    found = json.loads(output[-1]) if done.returncode == 0 and output else {}
    return found, errors[-1] if errors else ''


def why_no_gpu(env: dict, error: str = '') -> str:
    """Why JAX sees no GPU, in one line, by the environment and the last error of a `probe`."""
    wanted = env.get('JAX_PLATFORMS', '')
    if wanted and not {'cuda', 'gpu'} & set(wanted.split(',')):
        return f'JAX_PLATFORMS={wanted} is set; unset it, or set it to cuda,cpu'
    known, plugins = versions(), _installed(f'jax-cuda{cuda}-plugin' for cuda in OLDEST_DRIVERS)
    if not plugins:
        return f"JAX has no CUDA plugin; pip install 'jax[cuda13]=={known.get('jax', 'VERSION')}'"
    name, version = next(iter(plugins.items()))
    if version.split('.')[:2] != known.get('jaxlib', '').split('.')[:2]:
        return f'{name} {version} does not fit jaxlib {known.get("jaxlib")}; they must be equal'
    driver = driver_version()
    if driver is None or not glob.glob('/dev/nvidia[0-9]*'):
        return f'JAX has {name} {version}, but this machine shows no NVIDIA driver'
    cuda = re.search(r'cuda(\d+)', name)[1]
    if int(driver.split('.')[0]) < OLDEST_DRIVERS[cuda]:
        right = f'CUDA {cuda} needs {OLDEST_DRIVERS[cuda]} or newer'
        return f'the NVIDIA driver {driver} is too old for {name}: {right}'
    hidden = env.get('CUDA_VISIBLE_DEVICES')
    seen = f'; CUDA_VISIBLE_DEVICES={hidden}' if hidden is not None else ''
    return f'driver {driver} and {name} {version} are there{seen}; JAX says: {error or "nothing"}'


def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as 580.65.06; None if there is none."""
    file = pathlib.Path('/proc/driver/nvidia/version')
    text = file.read_text() if file.exists() else ''
    found = re.search(r'Kernel Module\D*(\d+(?:\.\d+)+)', text)
    return found and found[1]
