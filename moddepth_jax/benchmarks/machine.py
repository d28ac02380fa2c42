"""What machine this is: its device, its versions, and in one line why JAX sees no GPU on it."""

import glob
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

# Of setup.py, by the names under which they are imported.
MODULES = {
    'absl': 'absl-py',
    'flax': 'flax',
    'grain': 'grain',
    'ml_collections': 'ml_collections',
    'numpy': 'numpy',
    'optax': 'optax',
    'orbax.checkpoint': 'orbax-checkpoint',
    'rich': 'rich',
    'tensorboardX': 'tensorboardX',
    'matplotlib': 'matplotlib',
    'pyarrow': 'pyarrow',
    'scipy': 'scipy',
    'tokenizers': 'tokenizers',
    'safetensors': 'safetensors',
    'zstandard': 'zstandard',
}
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


def missing_modules() -> list[str]:
    """Packages of setup.py that cannot be imported here."""

    def found(name):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the package that it is in
            return False

    return [package for name, package in MODULES.items() if not found(name)]


def versions() -> dict[str, str]:
    """Of Python, and of those packages that are there and may change a result."""
    known = {'python': sys.version.split()[0]}
    for package in PACKAGES:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return known


def probe(env: dict) -> tuple[dict, str]:
    """Asks another process for JAX's first device, because this one must not hold its memory.

    Args:
      env: environment of that process.

    Returns:
      dict with `platform`, `device`, `capability` and `platform_version`, empty where JAX could not
      start; and the last line of its errors.
    """
    asked = [sys.executable, '-c', _PROBE]
    try:
        done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {}, 'JAX does not start in 120 s'
    said, errors = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    machine = json.loads(said[-1]) if done.returncode == 0 and said else {}
    return machine, errors[-1] if errors else ''


def why_no_gpu(env: dict, error: str = '') -> str:
    """Why JAX sees no GPU, in one line.

    Args:
      env: of the process that looked for one.
      error: the last line of its errors.
    """
    wanted = env.get('JAX_PLATFORMS', '')
    if wanted and not {'cuda', 'gpu'} & set(wanted.split(',')):
        return f'JAX_PLATFORMS={wanted} is set; unset it, or set it to cuda,cpu'
    known, plugins = versions(), _plugins()
    if not plugins:
        return f"JAX has no CUDA plugin; pip install 'jax[cuda13]=={known.get('jax', 'VERSION')}'"
    name, version = plugins[0]
    if version.split('.')[:2] != known.get('jaxlib', '').split('.')[:2]:
        return f'{name} {version} does not fit jaxlib {known.get("jaxlib")}; they must be equal'
    driver = driver_version()
    if driver is None or not (glob.glob('/dev/nvidia[0-9]*') or os.path.exists('/dev/dxg')):
        return f'JAX has {name} {version}, but this machine shows no NVIDIA driver'
    cuda = re.search(r'cuda(\d+)', name)[1]
    oldest = OLDEST_DRIVERS.get(cuda, 0)
    if int(driver.split('.')[0]) < oldest:
        right = f'CUDA {cuda} needs {oldest} or newer'
        return f'the NVIDIA driver {driver} is too old for {name}: {right}'
    hidden = env.get('CUDA_VISIBLE_DEVICES')
    seen = f'; CUDA_VISIBLE_DEVICES={hidden}' if hidden is not None else ''
    return f'driver {driver} and {name} {version} are there{seen}; JAX says: {error or "nothing"}'


def _plugins():
    """(name, version) of the CUDA plugins of JAX."""
    found = []
    for cuda in OLDEST_DRIVERS:
        name = f'jax-cuda{cuda}-plugin'
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as 580.65.06; None: there is none."""
    file = pathlib.Path('/proc/driver/nvidia/version')
    text = file.read_text() if file.exists() else ''
    if found := re.search(r'Kernel Module\D*(\d+(?:\.\d+)+)', text):
        return found[1]
    asked = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'^\d+(\.\d+)+$', done.stdout, re.MULTILINE)
    return found[0] if found else None
