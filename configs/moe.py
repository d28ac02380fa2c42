"""A mixture of experts at a FLOP budget: each token uses two of eight experts and a shared one.

python -m launch.train --config=configs/moe.py
python -m launch.train --config=configs/moe.py:size=6x128,budget=3e13,balance=0.01
python -m launch.train --config=configs/moe.py:capacity=0.5
python -m launch.train --config=configs/moe.py:choice=expert

The experts of a token are together as wide as the mlp of the dense model of that size, so that both
models cost about the same. In the third command, an expert computes at most half of an equal share
of a row's choices, first come first served; this is the baseline for integrated MoDE. In the last
command, experts choose their tokens, and evaluation uses a threshold for each expert.

Held-out bits per byte at 6.4e12 FLOPs and 8 rows per step (--config.data.batch_size=8), seeds 0 to
2: 2.266, 2.178, 2.214; with capacity=0.5 2.171, 2.128, 2.209; with choice=expert 2.225, 2.167,
2.237; the dense model 2.266, 2.229, 2.270. A run takes about three minutes on two CPU cores.
"""

from configs import dense_isoflop, sizes


def apply_experts(config):
    """Put eight routed experts, two of them per token, and a shared one in place of every mlp.

    The three experts of a token are together as wide as that mlp, rounded down.
    """
    experts = config.model.experts
    experts.choice = 'token'
    experts.num_routed, experts.num_shared, experts.top_k = 8, 1, 2
    experts.d_ff = config.model.d_ff // (experts.num_shared + experts.top_k)


def apply_capacity(config, capacity: float):
    """Limit an expert to the share `capacity` of an equal share of a row's choices."""
    experts = config.model.experts
    share = experts.top_k * config.data.sequence_length / experts.num_routed
    experts.row_capacity = max(1, int(capacity * share))


def get_config(arguments: str = ''):
    """Arguments: size, budget, balance (a loss weight), capacity (of an equal share), choice."""
    values = sizes.parse(
        arguments, size='4x128', budget='1.6e13', balance='0.001', capacity='1', choice='token'
    )
    config = dense_isoflop.get_config('size={size},budget={budget}'.format(**values))
    apply_experts(config)
    experts = config.model.experts
    if values['choice'] not in ('token', 'expert'):
        raise ValueError(f'choice={values["choice"]!r}: must be token or expert')
    experts.choice = values['choice']
    experts.balance_weight = sizes.number(values['balance'])
    if not 0 <= experts.balance_weight < float('inf'):
        raise ValueError(f'balance={values["balance"]!r}: must be a number of 0 or more')
    capacity = sizes.number(values['capacity'])
    if not 0 < capacity <= 1:
        raise ValueError(f'capacity={values["capacity"]!r}: must lie in (0, 1]; 1 is no limit')
    if capacity < 1 and experts.choice == 'expert':
        raise ValueError(f'capacity={values["capacity"]!r}: must be 1 with choice=expert')
    if capacity < 1:
        apply_capacity(config, capacity)
    return config
