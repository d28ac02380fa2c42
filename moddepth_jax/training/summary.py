"""Reports about a run: lines at its start, summary.json at its end."""

import collections
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re

import jax
import numpy as np
from jax.sharding import AbstractMesh

from kernels_pallas.backends import log_lines
from kernels_pallas.xla import sequence
from moddepth_jax.data.directory import check_fields, read_json, write_atomically
from moddepth_jax.host import usable_cpus
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.adapters import ADAPTER
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training import devices
from moddepth_jax.training.checkpoint import state_sha256
from moddepth_jax.training.metrics import replace_nonfinite
from moddepth_jax.training.plan import run_flops, stage_starts
from moddepth_jax.training.progress import format_count
from moddepth_jax.training.run_dir import SUMMARY_FILE
from moddepth_jax.training.teacher import abstract_teacher, step_flops, teacher_flops
from moddepth_jax.training.train_step import TrainState, init_state, train_step
from moddepth_jax.training.trainable import split_params

_LOSSES = ('loss', 'loss_top_c', 'routing_gap', 'bits_per_byte')  # null if not finite
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')
_LAYER_PATH = re.compile(r'(?:stack/(run_\d+/layer_\d+)/(?:block/)?)?(.*)')


def versions() -> dict[str, str]:
    """Return everything that may change the bits of a run: packages, Python, device, threads."""
    return {
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
        'python': platform.python_version(),
        'device': jax.devices()[0].device_kind,
        'num_devices': str(jax.device_count()),
        'cpu_threads': os.environ.get('NPROC', str(usable_cpus())),
    }


def initial_metadata(dataset, num_steps: int, mesh_shape: dict | None = None) -> dict:
    """Return the metadata of a checkpoint before the first step."""
    axes = {f'mesh axis {axis}': str(size) for axis, size in (mesh_shape or {}).items()}
    return {
        'fingerprint': dataset.fingerprint,
        'num_steps': num_steps,
        'versions': versions() | {'processes': str(jax.process_count())} | axes,
        'seconds': 0.0,
        'train_loss': None,
        'learning_rate': None,
        'extended': [],
        'metrics': None,
        'metrics_problems': [],
    }


def num_parameters(params) -> int:
    """Count the elements of a pytree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def active_parameters(hparams: Hparams, params) -> int:
    """Count the parameters that a token uses; of the routed experts, its share at even loads."""
    experts, active = hparams.model.experts, 0.0
    share = experts.top_k / experts.num_choices
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [name for key in path if (name := getattr(key, 'key', None)) != ADAPTER]
        of_experts = names[-3:-1] in [['mlp', name] for name in ('w1', 'w2', 'w3')]
        routed = experts.choice != 'none' and of_experts and leaf.ndim == 4
        active += leaf.size * (share if routed else 1)
    return round(active)


def parameter_lines(params) -> list[str]:
    """Return a table of a Transformer's parts, largest first: layers, parameters and share.

    The parts are embedding, attention, mlp, norms, router, predictor, stream (depth slots), head.
    """
    sizes, layers = collections.Counter(), collections.defaultdict(dict)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        text = jax.tree_util.keystr(path, simple=True, separator='/')
        layer, name = _LAYER_PATH.fullmatch(text).groups()
        part = name.split('/')[0]
        part = 'norms' if part.endswith('_norm') else part
        sizes[part] += leaf.size
        if layer:  # the first axis of a leaf counts the repeats of its layer
            layers[part][layer] = leaf.shape[0]
    total = sizes.total()
    width = max(13, len(f'{total:,}'))
    lines = [f'{"parameters":12}{"layers":>6}  {"all":>{width}}   share']
    for part, size in sizes.most_common():
        count = sum(layers[part].values()) or ''
        lines.append(f'  {part:10}{count:>6}  {size:>{width},}  {size / total:6.1%}')
    return [*lines, f'  {"sum":10}{"":6}  {total:>{width},}']


def _trains_router(routing, params):
    """Return whether the parameters of the router, if it has any, have a gradient."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params))
    names = (getattr(key, 'key', None) for path in paths for key in path)
    return 'router' not in names or routing.gate != 'none' or routing.causal_rule == 'aux_loss'


def describe(hparams: Hparams, num_steps: int, params, dataset) -> list[str]:
    """Return lines for the user about the model, the corpus, the steps and their cost."""
    model = hparams.model
    parameters = f'{format_count(num_parameters(params))} parameters'
    if model.expert_layers:
        active = format_count(active_parameters(hparams, params))
        parameters = f'{parameters}, {active} of them active per token'
    trainable, frozen = split_params(params, hparams.optimizer.trainable)
    starts = stage_starts(hparams, num_steps)
    lines = [f'model     {", ".join(_describe_model(hparams, starts[-1][1]))}; {parameters}']
    if not _trains_router(model.routing, params):
        right = 'choose another model.routing.gate, or causal_rule=aux_loss'
        lines.append(f'note      nothing trains the router, since its gate is none; {right}')
    if frozen:
        patterns = ' '.join(hparams.optimizer.trainable)
        lines.append(f'trainable {num_parameters(trainable):,} parameters: {patterns}')
    lines.append(f'corpus    {dataset.corpus.description}')
    for name, epochs in dataset.domain_epochs(num_steps).items():
        share = f'{dataset.domains[name]:.1%} of the rows'
        lines.append(f'mixture   {name}: {share}, {epochs:.2f} epochs')
    total = run_flops(hparams, num_steps)
    cost = f'{format_count(total / max(1, num_steps))}FLOP = {total:.3g} FLOPs'
    lines.append(f'plan      {num_steps} steps x {cost}, {dataset.epochs(num_steps):.2f} epochs')
    if flops := teacher_flops(hparams):
        weight, temperature = hparams.training.distill_weight, hparams.training.distill_temperature
        how = f'weight {weight:g}, temperature {temperature:g}'
        share = f'{flops / step_flops(hparams):.0%} of the FLOPs of a step'
        lines.append(f'teacher   {hparams.training.distill_from}: {how}; {share}')
    for first, stage in starts if len(starts) > 1 else ():
        lines.append(f'stage     from step {first}: {_describe_selection(hparams, stage)}')
    return lines


def _describe_model(hparams, stage):
    """Return phrases such as ['12 layers of width 256', '6 routed (learned)'] for a stage."""
    model = hparams.model
    parts = [f'{model.num_layers} layers of width {model.d_model}']
    if model.looped:
        parts.append(f'{model.num_blocks} blocks run in {model.loops} loops ({model.loop_order})')
    if model.sized_by_loops:
        parts.append(f'{model.sized_by_loops} of each loop')
    if model.routed_layers:
        what = 'routed loops' if model.routing.routes_loops else 'routed'
        only = '' if model.routing.part == 'block' else f', {model.routing.part} only'
        parts.append(f'{len(model.routed_layers)} {what} ({model.routing.router}{only})')
        parts.append(_describe_selection(hparams, stage))
    elif not model.expert_layers:
        parts.append('dense')
    if model.expert_layers:
        parts.append(_describe_experts(model))
    if words := model.depth.stream_class.describe(model):
        parts.append(words)
    if model.embedding_residual != 'none':
        parts.append(f'{model.embedding_residual} embedding residual')
    if model.value_embeddings != 'none':
        parts.append(f'value embeddings in {model.value_embeddings} layers')
    return parts


def _describe_selection(hparams, stage):
    length, routing = hparams.data.sequence_length, hparams.at(stage).model.routing
    most = routing.num_selected(length)
    if stage.routing != 'top_c':
        most = f'up to {routing.max_selected(length, stage.routing)}'
    if routing.routes_loops:
        most = f'{length} to {most}'
    return f'{most} of {length} tokens by {stage.routing}'


def _describe_experts(model):
    experts = model.experts
    layers = len(model.expert_layers)
    parts = [
        (experts.choice == 'token', f'top {experts.top_k} of {experts.num_routed} experts'),
        (
            experts.choice == 'expert',
            f'{experts.num_routed} experts choose {experts.top_k} a token',
        ),
        (experts.num_noop, f' and {experts.num_noop} that do nothing'),
        (experts.row_capacity, f' (at most {experts.row_capacity} tokens of a row each)'),
        (experts.num_shared, f' + {experts.num_shared} shared'),
        (layers < model.num_blocks, f' in {layers} layers'),
    ]
    return ''.join(text for holds, text in parts if holds)


@functools.cache
def step_flops_report(hparams: Hparams, num_steps: int) -> dict[str, float | None]:
    """Return the FLOPs of a step of the last stage, by formula and by XLA.

    `flops_per_step` is counted by formula. `flops_per_step_xla` is XLA's estimate for the unrolled
    step before optimization, which includes elementwise work and masked query-key pairs; None if
    the device gives no estimate.
    """
    model = dataclasses.replace(hparams.model, remat='none', layer_loop='unrolled')
    unrolled = dataclasses.replace(hparams, model=model)
    row = jax.ShapeDtypeStruct((hparams.data.batch_size, hparams.data.sequence_length), 'int32')
    batch = {name: row for name in ('tokens_BT', 'labels_BT', 'segment_ids_BT')}
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # as on one device
        state = jax.eval_shape(lambda: init_state(unrolled, num_steps))
        with sequence.static_blocks():
            teacher = abstract_teacher(hparams)
            traced = jax.jit(functools.partial(train_step)).trace(state, batch, teacher=teacher)
    return {
        'flops_per_step': step_flops(hparams),
        'flops_per_step_xla': (traced.lower().cost_analysis() or {}).get('flops'),
    }


def by_layer(model: ModelHparams, ratios: dict) -> dict[str, dict]:
    """Return `routing` and `experts` of `ratios` as numbers by layer: layer_00, layer_01, ..."""
    layers = {'routing': model.routed_layers, 'experts': model.expert_layers}
    return {
        group: {
            f'layer_{layer:02d}': {
                name: np.asarray(values[i]).tolist()
                for name, values in ratios.get(group, {}).items()
            }
            for i, layer in enumerate(layers[group])
        }
        for group in layers
    }


def summarize(
    hparams: Hparams, state: TrainState, evaluation: dict, dataset, metadata: dict
) -> dict:
    """Return the content of summary.json.

    `evaluation` is the result of `evaluate_causal`, `metadata` that of the last checkpoint.
    """
    step, groups = int(state.step), by_layer(hparams.model, evaluation)
    total_flops = run_flops(hparams, state.num_steps, step)
    if 'domains' in evaluation:
        shares, epochs = dataset.domains, dataset.domain_epochs(step)
        groups['domains'] = {
            name: {'share': shares[name], 'epochs': epochs[name], **losses}
            for name, losses in evaluation['domains'].items()
        }
    # Runs that draw loops have a single stage, whose steps have different costs.
    mean = total_flops / max(1, step) if hparams.training.loops else None
    stages = [
        {'first_step': first, 'flops_per_step': mean or step_flops(hparams, stage)}
        | {'capacity': stage.capacity, 'routing': stage.routing}
        for first, stage in stage_starts(hparams, state.num_steps)
    ]
    return {
        'final_step': step,
        'train_loss': metadata['train_loss'],
        'eval': {name: value for name, value in evaluation.items() if name not in groups},
        **groups,
        'parameters': num_parameters(state.params),
        'active_parameters': active_parameters(hparams, state.params),
        **step_flops_report(hparams, state.num_steps),
        'flops_per_forward': train_step_flops(hparams) / 3,  # without that of a teacher
        'total_flops': total_flops,
        'flop_budget': hparams.flop_budget,
        'seconds': metadata['seconds'],
        **devices.mfu(total_flops / max(metadata['seconds'], 1e-9), state.step.sharding.mesh.size),
        'peak_memory': metadata.get('peak_memory'),
        'stages': stages,
        'extended': metadata['extended'],
        'metrics_problems': metadata['metrics_problems'],
        'epochs': dataset.epochs(step),
        'skipped_steps': int(state.skipped),
        'corpus_sha256': dataset.corpus.sha256,
        'state_sha256': state_sha256(state),
        'versions': metadata['versions'],
        'attention': log_lines(),
    }


def write_summary(workdir: str | os.PathLike, summary: dict):
    """Write summary.json atomically; numbers that are not finite become null."""
    text = json.dumps(replace_nonfinite(summary), indent=2, allow_nan=False) + '\n'
    write_atomically(pathlib.Path(workdir) / SUMMARY_FILE, text)


def read_summary(workdir: str | os.PathLike, fields: dict | None = None) -> dict | None:
    """Read summary.json and check it for `fields` of `check_fields`; None if it does not exist.

    Raises ValueError, one line, if it is damaged.
    """
    file = pathlib.Path(workdir) / SUMMARY_FILE
    right = 'remove it and start the run again, which writes it from the last checkpoint'
    if (summary := read_json(file, right, {'eval': dict} | (fields or {}))) is not None:
        found = {
            name: value for name in _LOSSES if (value := summary['eval'].get(name)) is not None
        }
        check_fields(found, dict.fromkeys(found, float), f'{file}: eval', right)
    return summary
