"""What a run will do, known before anything is compiled or written."""

import os

import jax

from moddepth_jax.data.pipeline import Dataset, make_dataset
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.model.transformer import check_attention, check_dtype
from moddepth_jax.training.mesh import check_mesh, make_mesh
from moddepth_jax.training.progress import format_count
from moddepth_jax.training.stages import run_flops, stage_starts
from moddepth_jax.training.summary import active_parameters, num_parameters


def prepare_run(
    hparams: Hparams, mesh_spec: str, workdir: str | os.PathLike | None = None
) -> tuple[int, Dataset, jax.sharding.Mesh]:
    """The number of steps, the dataset and the mesh of a run, once all of them are known to fit.

    Args:
      hparams: of the run.
      mesh_spec: see `make_mesh`.
      workdir: of the run; a tokenizer that is kept there goes before that of `data.tokenizer`.

    Raises:
      ValueError: one line, for a budget, corpus, tokenizer, vocabulary, dtype or mesh that does
        not fit.
    """
    num_steps = resolve_steps(hparams)
    tokenizer = tokenizer_of(hparams.data, workdir)
    check_vocabulary(hparams, tokenizer)
    dataset = make_dataset(hparams.data, hparams.seed, tokenizer=tokenizer)
    check_dtype(hparams.model)
    check_attention(hparams)
    mesh = make_mesh(mesh_spec)
    check_mesh(hparams, mesh)
    return num_steps, dataset, mesh


def resolve_steps(hparams: Hparams) -> int:
    """Steps of a run: as many as `flop_budget` pays for, or `training.num_steps` without one.

    Raises:
      ValueError: a budget below the cost of one step, or for 2^31 steps and more.
    """
    if not hparams.flop_budget:
        return hparams.training.num_steps
    costs = [train_step_flops(hparams, stage) for stage in hparams.stages]
    cost = max(costs)
    if hparams.flop_budget < cost:
        raise ValueError(
            f'flop_budget={hparams.flop_budget:g}: pays for no step; one step of '
            f'{hparams.data.batch_size} x {hparams.data.sequence_length} tokens costs {cost:.3g}'
        )
    ends = [stage.begins for stage in hparams.stages[1:]] + [1.0]
    shares = [end - stage.begins for stage, end in zip(hparams.stages, ends, strict=True)]
    mean = sum(share * cost for share, cost in zip(shares, costs, strict=True))
    num_steps = int(hparams.flop_budget / mean)
    if num_steps >= 2**31:
        right = 'must be below 2**31 of them; take a larger model or batch'
        raise ValueError(f'flop_budget={hparams.flop_budget:g}: {num_steps} steps, {right}')
    while num_steps > 1 and run_flops(hparams, num_steps) > hparams.flop_budget:
        num_steps -= 1
    while run_flops(hparams, num_steps + 1) <= hparams.flop_budget:
        num_steps += 1  # stages begin at whole steps, so the mean says it only roughly
    return num_steps


def check_vocabulary(hparams: Hparams, tokenizer: Tokenizer):
    """Raises ValueError where the tokenizer has more ids than the model."""
    if hparams.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f'model.vocab_size={hparams.model.vocab_size}: must be at least '
            f'{tokenizer.vocab_size}, the ids of data.tokenizer={hparams.data.tokenizer!r}'
        )


def _places(hparams, stage):
    """Who enters a routed block in a stage, such as '32 of 256 tokens by top_c'."""
    length, routing = hparams.data.sequence_length, hparams.at(stage).model.routing
    most = routing.num_selected(length)
    if stage.routing != 'top_c':
        most = f'up to {routing.max_selected(length, stage.routing)}'
    return f'{most} of {length} tokens by {stage.routing}'


def _experts(model):
    """Such as 'top 2 of 8 experts + 1 shared'."""
    experts = model.experts
    chosen = f'top {experts.top_k} of {experts.num_routed} experts'
    if experts.choice == 'expert':
        chosen = f'{experts.num_routed} experts choose {experts.top_k} a token'
    chosen += f' and {experts.num_noop} that do nothing' * bool(experts.num_noop)
    limit = f' (at most {experts.row_capacity} tokens of a row each)'
    chosen += limit * bool(experts.row_capacity)
    chosen += f' + {experts.num_shared} shared' * bool(experts.num_shared)
    layers = len(model.expert_layers)
    return chosen + f' in {layers} of them' * (layers < model.num_layers)


def describe(hparams: Hparams, num_steps: int, params, dataset) -> list[str]:
    """Lines for the user: the model, the corpus, the steps and what they cost."""
    model = hparams.model
    routed = len(model.routed_layers)
    routing = '' if model.expert_layers else ', dense'
    if routed:
        router = model.routing.router
        routing = f', {routed} routed ({router}), {_places(hparams, hparams.stages[-1])}'
    depth = model.depth
    experts, active = '', ''
    if model.expert_layers:
        experts = f', {_experts(model)}'
        active = f', {format_count(active_parameters(hparams, params))} of them for one token'
    stream = {
        'residual': '',
        'moda': f', moda slots {depth.slots}' + f' {depth.skipped_slots}' * bool(routed),
    }.get(depth.stream, f', {depth.stream} depth stream')
    parameters, total = format_count(num_parameters(params)), run_flops(hparams, num_steps)
    starts = stage_starts(hparams, num_steps)
    stages = [
        f'stage     from step {first}: {_places(hparams, stage)}'
        for first, stage in (starts if len(starts) > 1 else ())
    ]
    mixture = [
        f'mixture   {name}: {dataset.domains[name]:.1%} of the rows, {epochs:.2f} epochs'
        for name, epochs in dataset.domain_epochs(num_steps).items()
    ]
    return [
        f'model     {model.num_layers} layers of width {model.d_model}{routing}{experts}{stream}; '
        f'{parameters} parameters{active}',
        f'corpus    {dataset.corpus.description}',
        *mixture,
        f'plan      {num_steps} steps x {format_count(total / max(1, num_steps))}FLOP = '
        f'{total:.3g} FLOPs, {dataset.epochs(num_steps):.2f} epochs',
        *stages,
    ]
