"""A dense run as the start of a MoD or MoDA run: its parameters, and what the first step loses."""

import functools

KEPT = 1e-3  # nats: a first loss as near to the dense one is called the same


class _HeldIn:
    """The first training batches, as `evaluate` takes held-out ones."""

    domains = {}

    def __init__(self, dataset, num_batches):
        self.num_held_out_batches, self.tokenizer = num_batches, dataset.tokenizer
        self.held_out_batch = dataset.train_batch

    def domain(self, index):
        return None


def start_from(run, hparams, dataset):
    """Parameters and averages of a new run before its first step, and what convert.json says.

    Args:
      run: the SavedRun of a dense model.
      hparams: of the new run.
      dataset: of the new run.

    Raises:
      ValueError: as `check_shared`.
    """
    import jax.numpy as jnp

    from moddepth_jax.conversion.carried import carry, check_shared
    from moddepth_jax.model.transformer import average_shapes

    check_shared(run.hparams.model, hparams.model)
    params, new = carry(run.hparams.model, run.state.params, hparams)
    averages = {name: jnp.zeros(shape) for name, shape in average_shapes(hparams.model).items()}
    averages |= {name: leaf for name, leaf in run.state.averages.items() if name in averages}
    losses = functools.partial(_loss, averages=averages, hparams=hparams.at(hparams.stages[0]))
    held_in = _HeldIn(dataset, hparams.evaluation.num_batches)
    dense_held_in = _loss(
        run.state.params, held_in, averages=run.state.averages, hparams=run.hparams
    )

    params, fitted = _fit(run, hparams, dataset, params, new)
    choices = {
        strength: abs(losses(candidate, held_in) - dense_held_in)
        for strength, candidate in fitted['slots']
    }
    if choices:
        best = min(choices, key=choices.get)
        params = dict(fitted['slots'])[best]

    num_batches = min(hparams.evaluation.num_batches, dataset.num_held_out_batches)
    dense = _loss(run.state.params, dataset, averages=run.state.averages, hparams=run.hparams)
    first = losses(params, dataset)
    note = {
        'from': 'a dense run',
        'source_step': run.step,
        'held_out_batches': num_batches,
        'dense_loss': dense,
        'first_loss': first,
        'difference': first - dense,
        'why': why(hparams, fitted['errors'], abs(first - dense) <= KEPT),
        'new_parameters': new,
    }
    if len(hparams.stages) > 1:
        last = hparams.at(hparams.stages[-1])
        note['loss_at_last_capacity'] = _loss(params, dataset, averages=averages, hparams=last)
    if choices:
        note['slot_key_strength'] = best
    return params, averages, note


def _loss(params, dataset, *, averages, hparams):
    """Nats a target as training counts them: of the first evaluation.num_batches batches, top-C."""
    import jax

    from moddepth_jax.training.evaluate import evaluate
    from moddepth_jax.training.mesh import make_mesh
    from moddepth_jax.training.train_step import model_variables

    mesh, num_batches = make_mesh('data=1'), hparams.evaluation.num_batches
    variables = model_variables(params, averages)
    with jax.set_mesh(mesh):
        return evaluate(variables, hparams, dataset, mesh, num_batches, 'top_c')['loss']


def _fit(run, hparams, dataset, params, new):
    """Parameters with routers fitted; and with slots too, for each strength of their keys."""
    from moddepth_jax.conversion.first_weights import STRENGTHS, fit_routers, fit_slots
    from moddepth_jax.conversion.moments import layer_moments, num_fit_batches

    routers = any(name.endswith('.router.w') for name in new)
    slots = any('_slot.' in name for name in new)
    if not (routers or slots):
        return params, {'errors': {}, 'slots': []}
    batches = (dataset.train_batch(i) for i in range(num_fit_batches(hparams)))
    moments = layer_moments(run.hparams.model, run.state.params, hparams.model, batches)
    params, errors = fit_routers(params, hparams.model, moments)
    candidates = [
        (strength, fit_slots(params, hparams.model, moments, strength))
        for strength in (STRENGTHS if slots else ())
    ]
    return params, {'errors': errors, 'slots': candidates}


def why(hparams, errors: dict[int, float], kept: bool) -> str:
    """What keeps the first loss from being that of the dense model, in plain words.

    Args:
      hparams: of the new run.
      errors: of `fit_routers`.
      kept: whether it is the same after all.
    """
    model, reasons = hparams.model, []
    stage = hparams.stages[0]
    if model.routed_layers and stage.capacity < 1:
        reasons.append(
            f'{1 - stage.capacity:.0%} of the tokens pass by each routed block from the first step '
            'on; model.routing.capacity_stages=1:0.2 would let all in at first'
        )
    if errors:
        worst = max(errors.values())
        reasons.append(
            f'the {model.routing.gate} gate multiplies what a block adds: scores, which have no '
            f'bias, were fitted to a gate of 1 and have a root mean square error of {worst:.0%}'
        )
    depth = model.depth
    if depth.stream == 'attention':
        reasons.append('the attention stream reads mixtures of values in place of the running sum')
    elif depth.stream == 'moda' and depth.slots != 'block' and not depth.attention_slot_projection:
        reasons.append(
            "heads share their softmax with earlier layers' own keys and values, which no new "
            'parameter can hide (model.depth.attention_slot_projection=True has new ones)'
        )
    elif depth.stream == 'moda':
        reasons.append("new slots have values 0, and take a little of each head's softmax")
    if not reasons:
        return 'the same model: every token enters, by gates of 1, and reads the running sum'
    return '; '.join(reasons) + ('; too little to matter here' if kept else '')
