"""Trains dense and routed models at equal FLOPs, draws what came of it, goes on where it stopped.

python -m launch.isoflop --config=configs/study.py --budgets=6e11,2e12 --sizes=4x64,8x64,4x128
python -m launch.isoflop --config=configs/study.py --budgets=2e12 --sizes=4x64 --variants=dense,mod
python -m launch.isoflop --config=configs/moda.py --steps=600 --sizes=8x64 --variants=dense,moda
python -m launch.isoflop --config=configs/study.py --budgets=2e12 --sizes=4x64 --dry_run

The learning rate is tuned first, with the dense model at the smallest budget, for each width; then
dense, shallow and mod train at every size of every budget, the other variants at the best size of
mod, and at the largest budget all of them with every seed. A finished run is never repeated.
--processes=2 trains two at a time on this machine; --shard=0/4, 1/4, .. share the runs among hosts
that see one --workdir; the first of them leaves study.json, figures and study.html there.
"""

import pathlib

from absl import flags

from launch import cli

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the study. Default: runs/NAME.')
BUDGETS = flags.DEFINE_list('budgets', [], 'Training FLOPs of a run, such as 6e11,2e12.')
STEPS = flags.DEFINE_list('steps', [], 'In place of --budgets: steps of a run, such as 600.')
SIZES = flags.DEFINE_list('sizes', None, 'LAYERSxWIDTH, such as 4x64,8x64.', required=True)
VARIANTS = flags.DEFINE_list(
    'variants',
    ['dense', 'shallow', 'mod', 'random'],
    'What is compared: names in moddepth_jax/studies/plan.py.',
)
SEEDS = flags.DEFINE_list('seeds', ['0'], 'All at the largest budget, the first elsewhere.')
LEARNING_RATES = flags.DEFINE_list(
    'learning_rates', [], "Tried for each width, such as 0.002,0.004. Default: the config's own."
)
PROCESSES = flags.DEFINE_integer('processes', 1, 'Runs at a time on this machine.', lower_bound=1)
SHARD = flags.DEFINE_string('shard', '0/1', 'I/N: which of N equal shares of the runs to train.')
DRY_RUN = flags.DEFINE_boolean('dry_run', False, 'Print the plan and exit; nothing is written.')
DRAW_ONLY = flags.DEFINE_boolean('draw_only', False, 'Train nothing; draw what is finished.')


def _numbers(flag, convert):
    try:
        return tuple(convert(text) for text in flag.value)
    except ValueError:
        kind = 'whole numbers' if convert is int else 'numbers'
        raise ValueError(f'--{flag.name}={",".join(flag.value)}: must be {kind}') from None


def _study(own_rate):
    from moddepth_jax.studies.plan import Study

    if bool(BUDGETS.value) == bool(STEPS.value):
        raise ValueError('--budgets: give these (training FLOPs) or --steps, one of both')
    kind = 'flops' if BUDGETS.value else 'steps'
    budgets = _numbers(BUDGETS, float) or _numbers(STEPS, int)
    rates = _numbers(LEARNING_RATES, float) or (own_rate,)
    names = {'kind': kind, 'budgets': budgets, 'learning_rates': rates}
    names |= {'sizes': tuple(SIZES.value), 'variants': tuple(VARIANTS.value)}
    try:
        return Study(**names, seeds=_numbers(SEEDS, int))
    except ValueError as error:
        raise ValueError(f'--{error}') from None


def _shard():
    index, _, count = SHARD.value.partition('/')
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f'--shard={SHARD.value}: must be I/N with I below N, such as 0/4')
    return int(index), int(count)


def main(_):
    from launch.study_config import StudyConfig
    from moddepth_jax.studies import runner
    from moddepth_jax.studies.plan import Plan
    from moddepth_jax.studies.store import open_study

    flag = flags.FLAGS['config']
    study = _study(CONFIG.value.optimizer.learning_rate)
    shard, overrides = _shard(), flag.override_values
    runner.share_threads(PROCESSES.value)
    study_config = StudyConfig(flag.config_filename, overrides, study.kind)
    plan = Plan(study, study_config.shallower)
    workdir = pathlib.Path(WORKDIR.value or pathlib.Path('runs') / cli.config_name())
    told = {'kind': study.kind, 'config': flag.config_filename, 'overrides': overrides}
    runs = runner.StudyRuns(workdir, plan, study_config.hparams, told)
    runs.check()
    if DRY_RUN.value:
        runs.announce(PROCESSES.value)
        return 0
    names = ('budgets', 'sizes', 'variants', 'seeds', 'learning_rates')
    open_study(workdir, told | {name: getattr(study, name) for name in names})
    if DRAW_ONLY.value:
        return runs.finish()
    if runner.is_child():
        return runs.train(shard)
    runs.announce(PROCESSES.value)
    status = runs.spawn(shard, PROCESSES.value) if PROCESSES.value > 1 else runs.train(shard)
    return status or (runs.finish() if shard[0] == 0 else 0)


if __name__ == '__main__':
    cli.run(main)
