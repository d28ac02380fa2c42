"""What launch.bench runs as `scoring`, with the flags of bench_runs."""

from launch import bench_runs
from moddepth_jax.benchmarks import models as bench_models


def scoring():
    """Yields (result, table) of log-likelihoods, in batches beside one request at a time."""
    from moddepth_jax.benchmarks import scoring as bench_scoring

    size, repeats = bench_runs.SIZE.value or '6x256', bench_runs.REPEATS.value
    models = {name: bench_models.one_model(name, size, 256, 1) for name in ('dense', 'mod')}
    result = bench_scoring.bench_scoring(models, 5 if repeats is None else repeats)
    yield {'size': size} | result, bench_scoring.scoring_table(result, size)
