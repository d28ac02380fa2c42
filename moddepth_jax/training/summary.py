"""What a finished run leaves behind: summary.json."""

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from kernels_pallas.backends import log_lines
from kernels_pallas.xla import sequence
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import (
    dot_general_flops,
    empty_place_flops,
    masked_attention_flops,
    train_step_flops,
)
from moddepth_jax.training.checkpoint import state_sha256
from moddepth_jax.training.run_dir import write_atomically
from moddepth_jax.training.stages import run_flops, stage_starts
from moddepth_jax.training.train_step import TrainState, init_state, train_step

SUMMARY_FILE = 'summary.json'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')


def versions() -> dict[str, str]:
    """Of everything that may change the bits of a run: packages, Python, device, CPU threads."""
    return {
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
        'python': platform.python_version(),
        'device': jax.devices()[0].device_kind,
        'num_devices': str(jax.device_count()),
        'cpu_threads': os.environ.get('NPROC', str(os.cpu_count())),
    }


def num_parameters(params) -> int:
    """Elements of a pytree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def active_parameters(hparams: Hparams, params) -> int:
    """Parameters that one token passes: all of them but the routed experts that it did not choose.

    Experts that do nothing are taken to have their even share of the choices.
    """
    experts, active = hparams.model.experts, 0.0
    share = experts.top_k / experts.num_choices
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [getattr(key, 'key', None) for key in path]
        of_experts = names[-3:-1] in [['mlp', name] for name in ('w1', 'w2', 'w3')]
        routed = experts.choice != 'none' and of_experts and leaf.ndim == 4
        active += leaf.size * (share if routed else 1)
    return round(active)


def _trace(hparams, num_steps, **changes):
    """The train step as traced, for a model with some knobs changed."""
    hparams = dataclasses.replace(hparams, model=dataclasses.replace(hparams.model, **changes))
    shape = (hparams.data.batch_size, hparams.data.sequence_length)
    row = jax.ShapeDtypeStruct(shape, 'int32')
    batch = {name: row for name in ('tokens_BT', 'labels_BT', 'segment_ids_BT')}
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # as one device would run it
        state = jax.eval_shape(lambda: init_state(hparams, num_steps))
        with sequence.static_blocks():
            return jax.jit(functools.partial(train_step)).trace(state, batch)


def step_flops_report(hparams: Hparams, num_steps: int) -> dict[str, float | None]:
    """The counted FLOPs of a training step beside what its traced programs hold.

    Returns:
      `flops_per_step`, counted by hand: the number that budgets are made of. Of the last stage.
      `flops_per_step_dot_general`, the products in the step as traced without recomputation, less
      the query-key pairs that plain attention computes and hides and the places of experts that no
      token takes; equal to the count within 1%.
      `flops_per_step_executed`, the products in the step as it runs: blocks recomputed, attention
      and experts cut into blocks, loads counted before micro-batches. Under `batched` less than
      runs: the loop that sums the gradients of the experts' matrices counts one round.
      `flops_per_step_xla`, XLA's estimate for the unrolled step before it is optimised, elementwise
      work and hidden pairs included, of each product of experts one block alone; None on a device
      that gives none. For information.
    """
    shape = (hparams.data.batch_size, hparams.data.sequence_length)
    experts = dataclasses.replace(hparams.model.experts, product='ragged_dot')
    # In one batch: micro-batches have the same products, but for a pass that counts loads.
    training = dataclasses.replace(hparams.training, accumulate_steps=1)
    whole = dataclasses.replace(hparams, training=training)
    plain = _trace(whole, num_steps, remat='none', attention='reference', experts=experts)
    unrolled = _trace(hparams, num_steps, remat='none', layer_loop='unrolled')
    given = (hparams, *shape, hparams.stages[-1].routing)
    hidden = 3 * (masked_attention_flops(*given) + empty_place_flops(*given))
    products = dot_general_flops(plain.jaxpr) - hidden
    return {
        'flops_per_step': train_step_flops(hparams),
        'flops_per_step_dot_general': float(products),
        'flops_per_step_executed': float(dot_general_flops(_trace(hparams, num_steps).jaxpr)),
        'flops_per_step_xla': (unrolled.lower().cost_analysis() or {}).get('flops'),
    }


def by_layer(layers: tuple[int, ...], ratios: dict) -> dict[str, dict]:
    """Ratios of layers as one dict for each, named layer_00 and so on, of plain numbers and lists.

    Args:
      layers: indices.
      ratios: of `routing_ratios` or `expert_ratios`, sequences or arrays over these layers.
    """
    return {
        f'layer_{layer:02d}': {
            name: np.asarray(values[i]).tolist() for name, values in ratios.items()
        }
        for i, layer in enumerate(layers)
    }


def summarize(
    hparams: Hparams, state: TrainState, evaluation: dict, dataset, metadata: dict
) -> dict:
    """The content of summary.json, as interfaces of other commands expect it.

    Of a mixture, `domains` holds each member's share of the rows, its epochs, and its losses as
    `evaluate_honestly` gives them.

    Args:
      hparams: of the run.
      state: after the last step.
      evaluation: of `evaluate_honestly`.
      dataset: for the corpus, its fingerprint and epochs.
      metadata: of the last checkpoint: `train_loss` in nats a target, `seconds` of stepping over
        all starts, `versions`.
    """
    layers = {'routing': hparams.model.routed_layers, 'experts': hparams.model.expert_layers}
    parts = {*layers, 'domains'}
    flops = step_flops_report(hparams, state.num_steps)
    step = int(state.step)
    domains = {}
    if 'domains' in evaluation:
        epochs = dataset.domain_epochs(step)
        domains['domains'] = {
            name: {'share': dataset.domains[name], 'epochs': epochs[name], **values}
            for name, values in evaluation['domains'].items()
        }
    stages = [
        {'first_step': first, 'flops_per_step': train_step_flops(hparams, stage)}
        | {'capacity': stage.capacity, 'routing': stage.routing}
        for first, stage in stage_starts(hparams, state.num_steps)
    ]
    return {
        'final_step': step,
        'train_loss': metadata['train_loss'],
        'eval': {name: value for name, value in evaluation.items() if name not in parts},
        **domains,
        **{name: by_layer(layers[name], evaluation.get(name, {})) for name in layers},
        'parameters': num_parameters(state.params),
        'active_parameters': active_parameters(hparams, state.params),
        **flops,
        'total_flops': run_flops(hparams, state.num_steps, step),
        'flop_budget': hparams.flop_budget,
        'seconds': metadata['seconds'],
        'stages': stages,
        'epochs': dataset.epochs(step),
        'skipped_steps': int(state.skipped),
        'corpus_sha256': dataset.corpus.sha256,
        'state_sha256': state_sha256(state),
        'versions': metadata['versions'],
        'attention': log_lines(),
    }


def write_summary(workdir, summary: dict):
    """Writes summary.json whole or not at all; numbers that are not finite become null."""
    text = json.dumps(replace_nonfinite(summary), indent=2, allow_nan=False) + '\n'
    write_atomically(pathlib.Path(workdir) / SUMMARY_FILE, text)


def replace_nonfinite(value):
    """`value` with None for numbers that are not finite, in dicts and lists: JSON has none."""
    if isinstance(value, dict):
        return {name: replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float('inf'):
        return None
    return value


_OF_LAYER = re.compile(r'stack/(run_\d+/layer_\d+)/(?:block/)?(.*)')


class ParameterPart(NamedTuple):
    """Parameters of one part of the model, in all its layers.

    Attributes:
      name: embedding, attention, mlp, norms, router, predictor, stream (depth slots), head.
      layers: how many layers have it; 0: it belongs to none.
      parameters: their number, over all layers.
      arrays: names of its arrays or groups of them, such as `query`; `scale` alone is not told.
    """

    name: str
    layers: int
    parameters: int
    arrays: tuple[str, ...]


def parameter_parts(params) -> list[ParameterPart]:
    """The parts of a Transformer's parameters, the largest first.

    Args:
      params: of a Transformer, arrays or jax.ShapeDtypeStruct.
    """
    layers, sizes, arrays = {}, {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        text = jax.tree_util.keystr(path, simple=True, separator='/')
        match = _OF_LAYER.fullmatch(text)
        name, *inner = (match[2] if match else text).split('/')
        if name.endswith('_norm'):
            name, inner = 'norms', []
        if match:  # a leaf holds one row for each repeat of its layer
            layers.setdefault(name, {})[match[1]] = leaf.shape[0]
        sizes[name] = sizes.get(name, 0) + leaf.size
        arrays.setdefault(name, {}).update(dict.fromkeys(inner[:1]))
    found = [
        ParameterPart(name, sum(layers.get(name, {}).values()), sizes[name], tuple(arrays[name]))
        for name in sizes
    ]
    return sorted(found, key=lambda part: (-part.parameters, part.name))


def parameter_lines(params) -> list[str]:
    """`parts` as lines of text under a header, and their sum."""
    rows = parameter_parts(params)
    total = sum(part.parameters for part in rows)
    size = max(13, len(f'{total:,}'))
    lines = [f'{"parameters":12}{"layers":>6}  {"all":>{size}}   share  arrays']
    for part in rows:
        numbers = (
            f'{part.layers or "":>6}  {part.parameters:>{size},}  {part.parameters / total:6.1%}'
        )
        lines.append(f'  {part.name:10}{numbers}  {" ".join(part.arrays)}'.rstrip())
    return [*lines, f'  {"sum":10}{"":6}  {total:>{size},}']
