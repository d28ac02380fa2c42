"""The train step of the default models, written out by hand: what the library is timed against.

Only plain functions of arrays, besides the library's attention kernel, top-C selection and
optimizer. It covers pre-norm, the raw gate, routing every:2 by a learned router with a predictor
(or no router), float32, one micro-batch. Parameters are those of the Transformer.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from kernels_pallas import depth_attention
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.routing import select_top_c
from moddepth_jax.training.optimizer import make_optimizer


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


@functools.partial(jax.jit, static_argnames=('hparams', 'num_steps'), donate_argnums=0)
def plain_step(state, batch, *, hparams: Hparams, num_steps: int):
    """One training step: the next state, (params, state of the optimizer), and the loss.

    `batch` is as of the library's train step; `num_steps` is of the learning rate's schedule.
    """
    params, optimizer_state = state
    with jax.numpy_rank_promotion('allow'):
        (_, loss), gradients = jax.value_and_grad(_loss, has_aux=True)(params, batch, hparams)
    optimizer = make_optimizer(hparams, num_steps)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), loss
