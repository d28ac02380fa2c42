"""Runs a study: trains dense and routed models at equal FLOPs or steps, and draws the results.

python -m launch.isoflop --config=configs/study.py --budgets=6e11,2e12 --sizes=4x64,8x64,4x128
python -m launch.isoflop --config=configs/moda.py --steps=600 --sizes=8x64 --variants=dense,moda
python -m launch.isoflop --config=configs/study.py --budgets=2e12 --sizes=4x64 --dry_run

docs/isoflop.md describes the plan. The same command resumes; finished runs are not repeated.
--shard=0/4, 1/4, ... share the runs among hosts with a common --workdir. The first shard writes
study.json, the figures and study.html there.
"""

import pathlib

from absl import flags

from launch import cli, config_file

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Directory of the study. Default: runs/isoflop-NAME.'
)
BUDGETS = flags.DEFINE_list('budgets', [], 'Training FLOPs of a run, such as 6e11,2e12.')
STEPS = flags.DEFINE_list('steps', [], 'Steps of a run, such as 600, instead of --budgets.')
SIZES = flags.DEFINE_list('sizes', None, 'LAYERSxWIDTH, such as 4x64,8x64.', required=True)
VARIANTS = flags.DEFINE_list(
    'variants', ['dense', 'shallow', 'mod', 'random'], 'Names in moddepth_jax/studies/plan.py.'
)
SEEDS = flags.DEFINE_list(
    'seeds', ['0'], 'The first chooses the sizes; all run at the best ones of the largest budget.'
)
LEARNING_RATES = flags.DEFINE_list(
    'learning_rates', [], 'Tried for each width. Default: that of the config.'
)
PROCESSES = flags.DEFINE_integer('processes', 1, 'Runs at a time on this machine.', lower_bound=1)
SHARD = flags.DEFINE_string('shard', '0/1', 'I/N: which of N equal shares of the runs to train.')
DRY_RUN = flags.DEFINE_boolean('dry_run', False, 'Print the plan and exit; nothing is written.')
RESULTS = flags.DEFINE_string('results', None, 'Folder for a copy of the results without runs.')
DRAW_ONLY = flags.DEFINE_boolean('draw_only', False, 'Draw the finished runs without training.')


def _numbers(flag, convert):
    try:
        return tuple(convert(text) for text in flag.value)
    except ValueError:
        kind = 'whole numbers, such as 0,1,2' if convert is int else 'numbers, such as 6e11,2e12'
        raise ValueError(f'--{flag.name}={",".join(flag.value)}: must be {kind}') from None


def _study():
    from moddepth_jax.studies.plan import Study

    if bool(BUDGETS.value) == bool(STEPS.value):
        raise ValueError('--budgets: give either --budgets (training FLOPs) or --steps')
    own_rate = CONFIG.value.optimizer.learning_rate
    values = {
        'kind': 'flops' if BUDGETS.value else 'steps',
        'budgets': _numbers(BUDGETS, float) or _numbers(STEPS, int),
        'sizes': tuple(SIZES.value),
        'variants': tuple(VARIANTS.value),
        'seeds': _numbers(SEEDS, int),
        'learning_rates': _numbers(LEARNING_RATES, float) or (own_rate,),
    }
    try:
        return Study(**values)
    except ValueError as error:
        raise ValueError(f'--{error}') from None


def _shard():
    index, _, count = SHARD.value.partition('/')
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f'--shard={SHARD.value}: must be I/N with I below N, such as 0/4')
    return int(index), int(count)


def main(_):
    flag, study, shard = flags.FLAGS['config'], _study(), _shard()
    # Not that of launch.train with the same config, nor that of a target of the Makefile.
    workdir = pathlib.Path(WORKDIR.value or f'runs/isoflop-{cli.config_name()}')

    from launch.study_config import StudyConfig
    from moddepth_jax.studies.folders import check_folder
    from moddepth_jax.studies.plan import Plan

    config = StudyConfig(flag.config_filename, flag.override_values, study.kind)
    for size in study.sizes:
        config.config('dense', size, study.budgets[0])
    if not DRY_RUN.value:
        check_folder(workdir)
    # Errors so far are found without importing JAX.
    from moddepth_jax.studies import runner

    runner.share_threads(PROCESSES.value)
    description = {'kind': study.kind, 'config': flag.config_filename}
    description['overrides'] = flag.override_values
    study_runner = runner.StudyRunner(
        workdir,
        Plan(study, config.shallower),
        config.hparams,
        description,
        cli.enable_compilation_cache,
        RESULTS.value,
        config_file.source(flag.config_filename),
    )
    return study_runner.run(shard, PROCESSES.value, DRY_RUN.value, DRAW_ONLY.value)


if __name__ == '__main__':
    cli.run(main)
