"""Runs tasks of lm-evaluation-harness on a run, under the causal routing of its evaluation.

python -m launch.lm_eval --workdir=runs/mod_isoflop --tasks=arc_easy,sciq --limit=100
python -m launch.lm_eval --workdir=runs/moda --tasks=moda --json=moda.json
python -m launch.lm_eval --workdir=runs/moda --tasks=my_task --include_path=my_tasks --num_fewshot=2

A task is one of the harness, one in a folder of yaml files, or a yaml file. Groups and tags expand
to their tasks; the group moda has the ten tasks of the MoDA paper. Data comes from the Hugging Face
Hub, the cache in HF_HOME, or local files (dataset_path: json). Tasks run one after the other, and
--json is written after each. The model must fit the first device.

Needs lm-evaluation-harness: pip install 'moddepth-jax[lm_eval]'
"""

import contextlib
import importlib.util
import logging
import os
import pathlib

from absl import flags

from launch import cli

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
cli.define_step()
TASKS = flags.DEFINE_list('tasks', None, 'Tasks, groups, tags or yaml files.', required=True)
INCLUDE_PATH = flags.DEFINE_list('include_path', [], 'Folders of task yaml files, read first.')
NUM_FEWSHOT = flags.DEFINE_integer('num_fewshot', None, 'Default: that of the task.', lower_bound=0)
LIMIT = flags.DEFINE_float('limit', None, 'Number of documents per task, or a share if below 1.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', 32, 'Rows that run together.', lower_bound=1)
ROUTING = cli.define_routing()
SEED = flags.DEFINE_integer('seed', 1234, 'Of all sampling.', lower_bound=0, upper_bound=2**31)
JSON = flags.DEFINE_string('json', None, 'File for the results; -: only the results, on stdout.')

OWN_TASKS = pathlib.Path(__file__).parent / 'lm_eval_tasks'
_NOISY = ('lm_eval', 'datasets', 'huggingface_hub', 'evaluate', 'fsspec', 'httpx', 'urllib3')
_BARS = ('TQDM_DISABLE', 'HF_DATASETS_DISABLE_PROGRESS_BARS', 'HF_HUB_DISABLE_PROGRESS_BARS')


def _import():
    """Import the modules that need lm_eval, with its logs and progress bars turned off."""
    for name in _BARS:
        os.environ.setdefault(name, '1')
    from moddepth_jax.inference import harness, harness_tasks

    for name in _NOISY:  # after the import, during which some of them set their level
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return harness, harness_tasks


def _run(tasks, lm, report, file):
    """Fill the report task by task; the file is complete after each task."""
    how = {'num_fewshot': NUM_FEWSHOT.value, 'limit': LIMIT.value, 'seed': SEED.value}
    for name in tasks.names:
        lm.title = name
        with contextlib.redirect_stdout(None):  # the harness prints during bootstrapping
            found = tasks.run(name, lm, **how)
        for part, values in found.items():
            report.setdefault(part, {}).update(values)
        report['cut'] = lm.num_cut
        report['groups'] = tasks.group_results(report['results'])
        if file is not None:
            cli.write_json(report, file)


def _print(report, tasks):
    """Print the harness's table; the tasks of a group that has numbers are only in --json."""
    from lm_eval.utils import make_table

    groups = [name for name, values in report['groups'].items() if 'sample_len' in values]
    hidden = set().union(*map(tasks.members, groups))
    every = report['results'] | report['groups']
    shown = {name: values for name, values in every.items() if name not in hidden}
    print(f'{report["workdir"]}, step {report["step"]} of {report["num_steps"]}')
    print(make_table({**report, 'results': shown}))
    print(f'routing {report["routing"]}, context of {report["context"]} tokens')
    if hidden:
        print(f'the {len(hidden)} tasks of {", ".join(groups)} are only in --json')
    if report['cut']:
        print(f'requests whose context was too long and was cut on the left: {report["cut"]}')
    if report['limit']:
        print(f'--limit={report["limit"]:g}: a trial, not a result')


def main(_):
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of

    if LIMIT.value is not None and not (0 < LIMIT.value < 1 or LIMIT.value in range(1, 2**31)):
        raise ValueError(f'--limit={LIMIT.value:g}: must be a whole number, or a share below 1')
    if importlib.util.find_spec('lm_eval') is None:
        right = "run: pip install 'moddepth-jax[lm_eval]'"
        raise ValueError(f'--tasks: lm-evaluation-harness is not installed; {right}')
    cli.check_run(WORKDIR.value)
    harness, harness_tasks = _import()
    import lm_eval

    with cli.progress_bar('reading the list of tasks', 1):
        tasks = harness_tasks.HarnessTasks(TASKS.value, [str(OWN_TASKS), *INCLUDE_PATH.value])
    run = cli.load_saved_run(WORKDIR.value)
    tokenizer = tokenizer_of(run.hparams.data, WORKDIR.value)
    how = {'batch_size': BATCH_SIZE.value, 'routing': ROUTING.value, 'seed': SEED.value}
    model = run.state.variables, run.hparams_of_stage
    lm = harness.HarnessLM(*model, tokenizer, bar=cli.progress_bar, **how)
    report = {
        'workdir': WORKDIR.value,
        'step': run.step,
        'num_steps': run.num_steps,
        'tokenizer': tokenizer.name,
        'context': lm.max_length,
        'tasks': TASKS.value,
        'num_fewshot': NUM_FEWSHOT.value,
        'limit': LIMIT.value,
        **(how | {'routing': lm.routing}),
        'lm_eval_version': lm_eval.__version__,
        'cut': 0,
        'results': {},
        'groups': {},
    }
    with cli.open_json(JSON.value) as file:
        try:
            _run(tasks, lm, report, file)
        finally:
            if JSON.value == '-':
                cli.write_json(report, None)
            elif report['results']:
                _print(report, tasks)


if __name__ == '__main__':
    cli.run(main)
