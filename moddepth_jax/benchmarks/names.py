"""Names of the benchmarks of `launch.bench`, for what needs no JAX."""

NAMES = ('step', 'decode', 'prompts', 'depth', 'experts', 'attention', 'paper', 'scoring')
