"""Local tasks of the harness give the numbers computed by hand, for any batch size."""

import json
import math
import pathlib

import numpy as np
import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from tests.inference.conftest import CONTEXT

ROOT = pathlib.Path(__file__).parents[2]
TASKS = ROOT / 'tests/launch/lm_eval_tasks'
OWN_TASKS = ROOT / 'launch/lm_eval_tasks'
SEPARATOR = 256


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Use no hub, and a separate cache; paths in the tasks are relative to the root."""
    import datasets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'cache'))


def choices_by_hand(log_p):
    """Return acc and acc_norm: by the most likely option, and by likelihood per character."""
    right = {'acc': [], 'acc_norm': []}
    for line in (TASKS / 'toy_choice.jsonl').read_text().splitlines():
        doc = json.loads(line)
        sums = []
        for choice in doc['choices']:
            ids = [SEPARATOR, *f'{doc["question"]} {choice}'.encode()][-CONTEXT - 1 :]
            sums.append(log_p(ids)[-len(f' {choice}'.encode()) :].sum())
        lengths = [len(choice) for choice in doc['choices']]
        right['acc'].append(np.argmax(sums) == doc['answer'])
        right['acc_norm'].append(np.argmax(np.divide(sums, lengths)) == doc['answer'])
    return {metric: float(np.mean(values)) for metric, values in right.items()}


def rolling_by_hand(log_p):
    """Return word_perplexity and bits_per_byte over all texts; each token is predicted once."""
    nats = words = num_bytes = 0
    for line in (TASKS / 'toy_rolling.jsonl').read_text().splitlines():
        text = json.loads(line)['text']
        ids = list(text.encode())
        whole = [SEPARATOR, *ids]
        for begin in range(0, len(ids), CONTEXT):
            end = min(begin + CONTEXT, len(ids))
            window = whole[max(0, end - CONTEXT) : end + 1]
            nats -= log_p(window)[begin - end :].sum()
        words, num_bytes = words + len(text.split()), num_bytes + len(ids)
    return {
        'word_perplexity': math.exp(nats / words),
        'bits_per_byte': nats / num_bytes / math.log(2),
    }


@pytest.mark.slow
def test_numbers_are_those_by_hand(small_model, log_p_of):
    """For multiple choice, and for perplexity in windows."""
    from moddepth_jax.inference.harness import HarnessLM
    from moddepth_jax.inference.harness_tasks import HarnessTasks

    def log_p(ids):
        """Return log p of each of `ids` but the first."""
        return log_p_of('both', ids[:-1])[np.arange(len(ids) - 1), ids[1:]]

    want = {'toy_choice': choices_by_hand(log_p), 'toy_rolling': rolling_by_hand(log_p)}
    tasks = HarnessTasks(['toy_group', 'toy_choice'], [str(TASKS)])
    assert tasks.names == ['toy_choice', 'toy_rolling']
    lm, results = HarnessLM(*small_model('both'), make_tokenizer('bytes'), batch_size=3), {}
    for task in tasks.names:
        results |= tasks.run(task, lm)['results']
        found = {metric: results[task][f'{metric},none'] for metric in want[task]}
        assert found == pytest.approx(want[task], rel=1e-5), task
    mean = (want['toy_choice']['acc_norm'] + want['toy_rolling']['bits_per_byte']) / 2
    assert tasks.group_results(results)['toy_group']['mean,none'] == pytest.approx(mean)


def test_shots_and_limit_are_obeyed():
    """Each question has two examples before it, and two of four documents are used."""
    from moddepth_jax.inference.harness_tasks import HarnessTasks

    class Recorder:
        rank, world_size, seen = 0, 1, ()

        def loglikelihood(self, requests):
            self.seen = [request.args[0] for request in requests]
            return [(0.0, False)] * len(requests)

    lm = Recorder()
    tasks = HarnessTasks(['toy_choice'], [str(TASKS)])
    found = tasks.run('toy_choice', lm, num_fewshot=2, limit=2)
    assert found['n-shot'] == {'toy_choice': 2}
    assert found['n-samples']['toy_choice'] == {'original': 4, 'effective': 2}
    assert len(lm.seen) == 5 and all(context.count('\n\n') == 2 for context in lm.seen)


def test_moda_is_ten_tasks_of_the_harness():
    """mmlu is a group of many. Nothing is loaded for it."""
    import lm_eval

    from moddepth_jax.inference.harness_tasks import HarnessTasks

    harness = pathlib.Path(lm_eval.__file__).parent / 'tasks'
    parts = ['piqa', 'hellaswag', 'winogrande', 'openbookqa', 'super_glue', 'sciq', 'arc']
    folders = [str(harness / name) for name in (*parts, 'mmlu/default')]
    tasks = HarnessTasks(['moda'], [*folders, str(OWN_TASKS)])
    mmlu = [name for name in tasks.names if name.startswith('mmlu_')]
    assert len(mmlu) == 57
    assert [name for name in tasks.names if name not in mmlu] == [
        *('piqa', 'hellaswag', 'winogrande', 'openbookqa', 'boolq'),
        *('sciq', 'arc_easy', 'arc_challenge', 'copa'),
    ]
    config = tasks._groups['moda']
    assert list(config['metadata']['mean_of']) == config['task'] and len(config['task']) == 10


@pytest.mark.parametrize(
    ('names', 'folders', 'words'),
    [
        (['toy_missing'], [TASKS], ["'toy_missing'", 'set json', 'not_there.jsonl', 'data_files']),
        (['{}/hub.yaml'], [], ['hub.yaml', 'nobody/nothing', 'HF_HOME', '--include_path']),
        (['{}/wrong.yaml'], [], ['wrong.yaml', "'missing' is undefined"]),
        (['toy_choice'], ['nowhere'], ['nowhere: no such folder']),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_loaded_is_one_line(tmp_path, names, folders, words):
    """The line has its name and what would be right: no file, no network, a missing field."""
    from moddepth_jax.inference.harness_tasks import HarnessTasks

    text = (TASKS / 'toy_choice.yaml').read_text()
    (tmp_path / 'wrong.yaml').write_text(text.replace('{{question}}', '{{missing}}'))
    hub = text.replace('dataset_path: json', 'dataset_path: nobody/nothing')
    (tmp_path / 'hub.yaml').write_text(hub.replace('dataset_kwargs', 'metadata'))
    with pytest.raises(ValueError) as caught:
        tasks = HarnessTasks([name.format(tmp_path) for name in names], list(map(str, folders)))
        tasks.run(tasks.names[0], None)
    assert '\n' not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value
