"""Packaging. The tested versions are pinned in constraints.txt."""

import pathlib

import setuptools

# The GPU build of JAX has the same releases as the CPU build, so they share the bounds.
JAX_BOUNDS = '>=0.10.2,<0.13'
# Executes notebooks, in tests and for rendering.
NOTEBOOKS = ['jupytext>=1.19,<2', 'nbclient>=0.11,<0.12', 'ipykernel>=7,<8']
SENTENCEPIECE = ['sentencepiece>=0.2,<0.3']
LM_EVAL = ['lm_eval>=0.4.13,<0.5']
# Compiles for a GPU on a machine without one; the plugin must have the same release as JAX.
COMPILE = [
    f'jax-cuda13-plugin{JAX_BOUNDS}',
    f'jax-cuda13-pjrt{JAX_BOUNDS}',
    'nvidia-cuda-nvcc>=13,<14',
    'nvidia-nvvm>=13,<14',
    'nvidia-cuda-crt>=13,<14',
]
# Builds the distributions; setuptools is listed because the tests build without a network.
BUILD = ['build>=1.3,<2', 'setuptools>=77,<90']

setuptools.setup(
    name='moddepth-jax',
    version='0.1.0',
    description='Mixture-of-Depths and Mixture-of-Depths Attention in JAX and Flax',
    long_description=(pathlib.Path(__file__).parent / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author='The moddepth-jax authors',
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords=['JAX', 'Flax', 'transformer', 'conditional computation', 'Mixture-of-Depths'],
    classifiers=[
        'Development Status :: 4 - Beta',
        'Environment :: Console',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3 :: Only',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    project_urls={
        'Mixture-of-Depths (Raposo et al. 2024)': 'https://arxiv.org/abs/2404.02258',
        'Mixture-of-Depths Attention (2026)': 'https://arxiv.org/abs/2603.15619',
    },
    packages=setuptools.find_packages(
        include=['moddepth_jax*', 'kernels_pallas*', 'configs*', 'launch*']
    ),
    package_data={
        'launch': ['slurm.sh', 'jobset.yaml', 'lm_eval_tasks/*.yaml'],
        'moddepth_jax.analysis': ['routing_page.html', 'routing_page.js'],
        'moddepth_jax.conversion': ['torch_model/*.py'],
        'moddepth_jax.studies': ['claims.toml', 'page.html'],
    },
    python_requires='>=3.11,<3.14',
    install_requires=[
        f'jax{JAX_BOUNDS}',
        'flax>=0.12.8,<0.13',
        'optax>=0.2.8,<0.3',
        'orbax-checkpoint>=0.12.3,<0.13',
        'grain>=0.2.18,<0.3',
        'ml_collections>=1.1,<2',
        'absl-py>=2.3,<3',
        'numpy>=2.1,<3',
        'rich>=14,<16',
        'tensorboardX>=2.6.2,<3',
        'matplotlib>=3.10,<4',
        'pyarrow>=20,<27',
        'scipy>=1.14,<2',
        'tokenizers>=0.22,<0.24',
        'pygments>=2.17,<3',
        'safetensors>=0.6,<0.9',
    ],
    extras_require={
        'test': [
            'pytest>=9,<10',
            'pytest-xdist>=3.8,<4',
            'ruff>=0.17.5,<0.18',
            *NOTEBOOKS,
            *SENTENCEPIECE,
            *LM_EVAL,
            *BUILD,
        ],
        'compile': COMPILE,
        'gpu': [f'jax[cuda13]{JAX_BOUNDS}', 'jax-triton>=0.3.1,<0.5'],
        'notebooks': [*NOTEBOOKS, 'nbconvert>=7.17,<8', 'treescope>=0.1.10,<0.2'],
        'docs': ['pdoc>=16,<17'],
        'sentencepiece': SENTENCEPIECE,
        'lm_eval': LM_EVAL,
        'wandb': ['wandb>=0.22,<0.32'],
    },
)
