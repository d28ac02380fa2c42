"""The train step of the default models, written out by hand: what the library is timed against.

Only plain functions of arrays, AdamW included; of the library it takes the attention kernel and
expert choice. It covers pre-norm, the raw gate, routing every:2 by a learned router with a
predictor (or none), float32, one micro-batch. Parameters are those of the Transformer.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import depth_attention
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.routing import select_top_c
from moddepth_jax.training.optimizer import learning_rate_schedule


def _norm(x, scale, epsilon):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * scale


def _rope(x_BTNH, positions_BT, theta):
    half = x_BTNH.shape[-1] // 2
    angle = positions_BT[..., None, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    x1, x2 = x_BTNH[..., :half], x_BTNH[..., half:]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def _delta(params, x_BTD, positions_BT, segment_ids_BT, model):
    a = params['attention']
    h_BTD = _norm(x_BTD, params['attention_norm']['scale'], model.norm_eps)
    q = jnp.einsum('btd,dnh->btnh', h_BTD, a['query']['kernel'])
    k = jnp.einsum('btd,dkh->btkh', h_BTD, a['key']['kernel'])
    v = jnp.einsum('btd,dkh->btkh', h_BTD, a['value']['kernel'])
    q, k = _rope(q, positions_BT, model.rope_theta), _rope(k, positions_BT, model.rope_theta)
    o = depth_attention(q, k, v, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT)
    attended_BTD = jnp.einsum('btnh,nhd->btd', o, a['out']['kernel'])
    h_BTD = _norm(x_BTD + attended_BTD, params['mlp_norm']['scale'], model.norm_eps)
    m = params['mlp']
    f_BTF = jax.nn.silu(h_BTD @ m['w1']['kernel']) * (h_BTD @ m['w3']['kernel'])
    return attended_BTD + f_BTF @ m['w2']['kernel']


def _routed(params, x_BTD, positions_BT, segment_ids_BT, model):
    scores_BT = x_BTD @ params['router']['w']
    indices_BC = select_top_c(scores_BT, model.routing.num_selected(x_BTD.shape[1]))
    take = jax.vmap(lambda rows, index: rows[index])
    chosen_BCD, gate_BC = take(x_BTD, indices_BC), take(scores_BT, indices_BC)
    positions_BC, segments_BC = take(positions_BT, indices_BC), take(segment_ids_BT, indices_BC)
    delta_BCD = _delta(params['block'], chosen_BCD, positions_BC, segments_BC, model)
    update_BCD = gate_BC[..., None] * delta_BCD
    y_BTD = jax.vmap(lambda x, i, u: x.at[i].add(u))(x_BTD, indices_BC, update_BCD)
    target_BT = jax.vmap(lambda row, i: row.at[i].set(1.0))(jnp.zeros_like(scores_BT), indices_BC)
    h = jax.lax.stop_gradient(x_BTD)
    if model.routing.predictor_width:
        hidden = params['predictor']['hidden']
        h = jax.nn.silu(h @ hidden['kernel'] + hidden['bias'])
    logits_BT = (h @ params['predictor']['out']['kernel'] + params['predictor']['out']['bias'])[
        ..., 0
    ]
    likelihood_BT = jax.nn.log_sigmoid(jnp.where(target_BT > 0, logits_BT, -logits_BT))
    return y_BTD, -jnp.mean(likelihood_BT)


def _loss(params, batch, hparams: Hparams):
    model = hparams.model
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    where = (positions_BT, segment_ids_BT, model)
    checkpoint = jax.checkpoint if model.remat == 'block' else lambda f, **_: f
    dense = checkpoint(lambda p, x: x + _delta(p, x, *where), prevent_cse=False)
    routed = checkpoint(lambda p, x: _routed(p, x, *where), prevent_cse=False)

    def layers(x_BTD, group):
        rule_loss = 0.0
        for _, params in sorted(group.items()):
            if 'router' in params:
                x_BTD, layer_loss = routed(params, x_BTD)
                rule_loss += layer_loss
            else:
                x_BTD = dense(params, x_BTD)
        return x_BTD, rule_loss

    x_BTD, rule_loss = params['embedding'][tokens_BT], 0.0
    for _, run in sorted(params['stack'].items()):
        x_BTD, rule_losses = jax.lax.scan(layers, x_BTD, run)
        rule_loss += jnp.sum(rule_losses)
    rule_loss *= model.routing.predictor_loss_weight / max(1, len(model.routed_layers))
    x_BTD = _norm(x_BTD, params['final_norm']['scale'], model.norm_eps)
    logits_BTV = x_BTD @ params['head']['kernel']
    log_z_BT = jax.nn.logsumexp(logits_BTV, -1)
    picked_BT = jnp.take_along_axis(logits_BTV, batch['labels_BT'][..., None], -1)[..., 0]
    loss = jnp.mean(log_z_BT - picked_BT)
    return loss + hparams.optimizer.z_loss * jnp.mean(log_z_BT**2) + rule_loss, loss


def _clip(gradients, predictor_L, limit):
    """Each of the two sets of leaves by its own global norm."""
    squares = [jnp.sum(g * g) for g in gradients]
    norms = [
        jnp.sqrt(
            sum((s for s, mine in zip(squares, predictor_L, strict=True) if mine is which), 0.0)
        )
        for which in (False, True)
    ]
    factors = [limit / jnp.maximum(norm, limit) for norm in norms]
    return [g * factors[mine] for g, mine in zip(gradients, predictor_L, strict=True)]


@functools.partial(jax.jit, static_argnames=('hparams', 'num_steps'), donate_argnums=0)
def plain_step(carry, batch, *, hparams: Hparams, num_steps: int):
    """One step of (params, first moments, second moments, step); returns the next, and the loss."""
    params, mean, square, step = carry
    (_, loss), gradients = jax.value_and_grad(_loss, has_aux=True)(params, batch, hparams)
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [{key.key for key in path} for path, _ in paths]
    optimizer = hparams.optimizer
    gradients = _clip(
        tree.flatten_up_to(gradients), ['predictor' in n for n in names], optimizer.clip_norm
    )
    rate = learning_rate_schedule(hparams, num_steps)(step)
    count, b1, b2 = step + 1, optimizer.b1, optimizer.b2
    new = []
    moments = map(tree.flatten_up_to, (mean, square))
    leaves = zip([leaf for _, leaf in paths], gradients, *moments, names, strict=True)
    for p, g, m, s, name in leaves:
        m, s = b1 * m + (1 - b1) * g, b2 * s + (1 - b2) * g * g
        update = (m / (1 - b1**count)) / (jnp.sqrt(s / (1 - b2**count)) + optimizer.eps)
        decay = optimizer.weight_decay if name & {'kernel', 'embedding'} else 0.0
        new.append((p - rate * (update + decay * p), m, s))
    return (*(tree.unflatten(part) for part in zip(*new, strict=True)), count), loss


def init_plain_state(params):
    """What `plain_step` starts from; the params are copied, for it donates them."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return (
        jax.tree.map(jnp.array, params),
        zeros,
        jax.tree.map(jnp.zeros_like, params),
        jnp.zeros((), jnp.int32),
    )
