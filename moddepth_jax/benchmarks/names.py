"""Names of the benchmarks of `launch.bench`, for what needs no JAX."""

NAMES = (
    'step',
    'decode',
    'prompts',
    'depth',
    'loops',
    'experts',
    'attention',
    'authors',
    'paper',
    'scoring',
    'runs',
)
