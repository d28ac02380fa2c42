"""Loads and runs tasks of lm-evaluation-harness, one at a time. Needs lm_eval."""

import dataclasses
import pathlib
import random
import traceback

import numpy as np
from lm_eval.api.group import Group
from lm_eval.config.group import GroupConfig
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from moddepth_jax.hparams.checks import did_you_mean

PARTS = ('results', 'versions', 'n-shot', 'higher_is_better', 'n-samples')
_GROUP_KEYS = {field.name for field in dataclasses.fields(GroupConfig)}
_LOCAL = ('arrow', 'csv', 'json', 'parquet', 'text')  # dataset_path of files
_NO_FILES = 'data_files of its yaml must name full files, relative to the current directory'
_NO_DATA = (
    'without a network, fill the cache of HF_HOME on a machine with one, or name local files by '
    'dataset_path: json and data_files in your own yaml (--include_path)'
)


class HarnessTasks:
    """Tasks by name; groups and tags are expanded, so that each task runs separately.

    The harness itself runs a group that changes its tasks, which is not expanded. Numbers of a
    group are those of the harness. If the metadata of a group has `mean_of`, a metric for each
    member, the group also has their unweighted mean. Raises ValueError for an unknown name or a
    missing folder.

    Args:
      names: names of tasks, groups and tags, or paths of yaml files.
      include_paths: folders of yaml files, which take precedence over the harness's own.

    Attributes:
      names: names of the tasks that run, in order.
    """

    def __init__(self, names: list[str], include_paths: list[str]):
        for path in include_paths:
            if not pathlib.Path(path).is_dir():
                raise ValueError(f'{path}: no such folder of task yaml files')
        try:  # without the harness's own files first: there are thousands, which takes seconds
            self._open(names, include_paths, False)
        except ValueError:
            self._open(names, include_paths, True)

    def _open(self, names, include_paths, with_defaults):
        self._manager = TaskManager(include_path=include_paths, include_defaults=with_defaults)
        self._groups, self._tasks, self._built = {}, {}, {}
        self.names = list(dict.fromkeys(piece for name in names for piece in self._pieces(name)))

    def _pieces(self, name):
        entry = self._manager.task_index.get(name)
        if entry is None:
            if pathlib.Path(name).is_file():
                return [name]
            right = 'must be a task, group or tag of lm-evaluation-harness or of --include_path'
            meant = did_you_mean(name, self._manager.all_tasks)
            raise ValueError(f'task {name!r}: {right}, or a yaml file{meant}')
        if entry.kind.name == 'TAG':
            members = sorted(entry.tags)
        elif entry.kind.name == 'GROUP':
            members = entry.cfg.get('task') or []
            plain = isinstance(members, list) and all(isinstance(one, str) for one in members)
            if not plain or entry.cfg.keys() - _GROUP_KEYS:
                return [name]
            self._groups[name] = entry.cfg
        else:
            return [name]
        return [piece for member in members for piece in self._pieces(member)]

    def run(self, name: str, lm, *, num_fewshot=None, limit=None, seed: int = 0) -> dict:
        """Run one of `names`; returns the harness's results, a dict by task for each of PARTS.

        Args:
          name: name of the task.
          lm: HarnessLM.
          num_fewshot: number of examples, unless the task forbids them; by default its own.
          limit: number of documents of each task; below 1, a fraction of them.
          seed: seed of examples and other draws.

        Raises:
          ValueError: for a task without data, a wrong yaml, or requests that the model cannot
            answer.
        """
        random.seed(seed)
        np.random.seed(seed)
        try:
            loaded = self._manager.load([name])
        except Exception as error:  # from the network, the disk or the yaml
            raise ValueError(self._why(name, error)) from error
        for task in loaded['tasks'].values():
            own = task.get_config('num_fewshot')
            if own is None or (num_fewshot is not None and own != 0):
                task.set_config('num_fewshot', num_fewshot or 0)
            task.set_fewshot_seed(seed)
        try:
            found = evaluate(lm, loaded, limit=limit, log_samples=False)
        except ValueError as error:
            raise ValueError(f'task {name!r}: {error}') from error
        self._tasks.update(loaded['tasks'])
        self._built.update(loaded['groups'])
        return {part: found[part] for part in PARTS}

    def _why(self, name, error):
        line = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        frames = traceback.extract_tb(error.__traceback__)
        if not any(frame.name == 'load_dataset' for frame in frames):
            return f'task {name!r}: {line}'
        entry = self._manager.task_index.get(name)
        source = (entry and entry.cfg or {}).get('dataset_path', 'of its yaml')
        right = _NO_FILES if source in _LOCAL else _NO_DATA
        return f'task {name!r}: its data set {source} cannot be read ({line}); {right}'

    def group_results(self, results: dict) -> dict:
        """Return the harness's results of the groups whose tasks have all run, by name."""
        groups = {name: self._group(name) for name in self._groups} | self._built
        groups = {name: group for name, group in groups.items() if group is not None}
        found = {
            n: group.aggregate(results) for n, group in groups.items() if group.has_aggregation
        }
        for name, group in groups.items():
            if metrics := (group.metadata or {}).get('mean_of'):
                values = [(results | found)[one][f'{key},none'] for one, key in metrics.items()]
                found.setdefault(name, {'name': name, 'alias': group.alias or name})
                found[name]['mean,none'] = sum(values) / len(values)
        return found

    def members(self, name: str) -> set[str]:
        """Return the tasks of a group in `group_results`."""
        return {task.task_name for task in self._part(name).get_all_tasks()}

    def _group(self, name):
        """Return the harness's Group; None if one of its tasks has not run."""
        group = Group.from_config(GroupConfig(**self._groups[name]))
        for member in self._groups[name]['task']:
            entry = self._manager.task_index[member]
            for one in sorted(entry.tags) if entry.kind.name == 'TAG' else [member]:
                if (part := self._part(one)) is None:
                    return None
                group.add(part)
        return group

    def _part(self, name):
        """Return the task or group of this name; None if it has not run."""
        if name in self._groups:
            return self._group(name)
        return self._built.get(name) or self._tasks.get(name)
