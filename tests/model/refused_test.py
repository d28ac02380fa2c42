"""Knobs of a model that do not fit together are refused."""

import pytest

from tests.model.cases import (
    ALL_LOOKED_UP,
    ALL_LOOPED,
    ATTENTION,
    AVERAGE,
    BLOCK_SLOT,
    DENSE,
    EMBEDDED,
    FIRST_KEYS,
    GROWS,
    HYPER,
    LOOPED,
    MASKED,
    MIXED,
    MODA,
    MUDD,
    OF_LOOPS,
    OF_MLP,
    OWN_NORMS,
    OWN_SLOT,
    POST,
    RECURSIONS,
    ROUTED,
    SHARED,
    SOURCES,
    SPARSE,
    TOKEN_CHOICE,
    UNROLLED,
    VALUES,
    experts,
    small_hparams,
)


def depth(**knobs):
    return {f'model.depth.{name}': value for name, value in knobs.items()}


def layers(routed):
    return {'model.routing.layers': routed}


def loops(*counts):
    return {'training.loops': counts}


EXITS = {'model.loop_exit_threshold': 0.1}
SEQUENCE = {'model.loop_order': 'sequence'}
MANY = {'model.loops': 10**4}
ROUTED_LOOPS = LOOPED | {'model.routing.router': 'learned'} | layers('loops')
# For four layers: (knobs, words of the message).
DEPTH = (
    (depth(stream='modal'), "stream='modal': must be one of "),
    (depth(stream='modal'), '; did you mean moda?'),
    (MODA | depth(slots='none'), "slots='none': must be one of auto, attention"),
    (depth(slots='block'), "slots='block': must be auto: the residual stream has no such knob"),
    (depth(slot_keys='rotated'), "slot_keys='rotated': must be auto: "),
    (depth(slot_keys='rotated'), '; use stream moda'),
    (depth(skipped_slots='masked'), "skipped_slots='masked': must be auto"),
    (MODA | MASKED, "skipped_slots='masked': must be auto: no block is routed"),
    (depth(slot_window=2), 'slot_window=2: must be 0: attention reads no slots of stream residual'),
    (OWN_SLOT, 'slot_projection=True: must be False'),
    (
        MODA | BLOCK_SLOT | OWN_SLOT,
        'slot_projection=True: must be False: slots block of stream moda are not attention',
    ),
    (depth(stream='dense'), "layer_loop='scan': must be unrolled: layers of the dense"),
    (ATTENTION | {'model.head_dim': 8}, 'model.d_model=16: must be num_heads x head_dim = 32'),
    (SOURCES | POST, "model.norm_placement='post': must be pre or reordered: post norms"),
    (SOURCES | depth(sublayers_per_source=9), 'sublayers_per_source=9: must be at most 8, the sub'),
    (
        SOURCES | LOOPED | depth(sublayers_per_source=8),
        'sublayers_per_source=8: must divide 4, the sublayers that repeat with model.looped',
    ),
    (
        SOURCES | OWN_SLOT,
        'slot_projection=True: must be False: the attention_residual stream has no such knob; use',
    ),
    (
        depth(sublayers_per_source=2),
        'sublayers_per_source=2: must be 0: the residual stream has no such knob; use stream att',
    ),
    (
        SOURCES | depth(slot_window=2),
        'slot_window=2: must be 0: attention reads no slots of stream attention_residual',
    ),
    (
        SOURCES | depth(skipped_slots='projected'),
        "skipped_slots='projected': must be auto: the attention_residual stream has no such knob",
    ),
    (HYPER | POST, "norm_placement='post': must be pre or reordered: post norms the sum"),
    (HYPER | depth(num_streams=-1), 'model.depth.num_streams=-1'),
    (MODA | depth(num_streams=2), 'num_streams=2: must be 0: the moda stream has no such knob; u'),
    (HYPER | depth(hyper_form='mhc'), "hyper_form='mhc': must be one of"),
    (depth(hyper_form='static'), "hyper_form='static': must be auto: the residual"),
    (
        MUDD | ROUTED,
        "model.routing.router='learned': must be none: a router scores the one array that a bl",
    ),
    (
        MUDD | ALL_LOOPED | loops(1, 2),
        'training.loops=(1, 2): must be (): the mudd stream has weights for each block that runs',
    ),
    (
        MUDD | depth(mudd_ways='qkv'),
        "model.depth.mudd_ways='qkv': must be one of auto, qkvr, one, q, ",
    ),
    (
        MUDD | depth(mudd_weights='dynamics'),
        "mudd_weights='dynamics': must be one of auto, dynamic, static; did you mean dynamic",
    ),
    (
        depth(mudd_ways='one'),
        "mudd_ways='one': must be auto: the residual stream has no such knob; use stream mudd",
    ),
    (
        MIXED | {'model.looped_layers': 'middle:1:1', 'model.loops': 2},
        "model.looped_layers='middle:1:1': must be none: the value_attention stream counts",
    ),
    (
        MIXED | depth(value_stride=5),
        'model.depth.value_stride=5: must be at most 4, which is model.num_layers',
    ),
    (
        MIXED | depth(value_stride=1, recent_layers=1),
        'model.depth.recent_layers=1: must be 0: with value_stride 1 all earlier layers',
    ),
    (
        VALUES | depth(value_stride=2),
        'value_stride=2: must be 0: the value_residual stream has no such knob; use stream value_a',
    ),
    (VALUES | {'model.num_layers': 1}, 'model.num_layers=1: must be 2 or more'),
    (
        VALUES | ROUTED | layers('0,2'),
        "model.routing.layers='0,2': must not route layer 0: the value_residual stream stores",
    ),
    (
        SHARED | ROUTED,
        "model.routing.router='learned': must be none under value_mix shared: a routed block",
    ),
    (
        VALUES | depth(sparse_layers=1),
        'model.depth.sparse_layers=1: must be 0: value_mix learned mixes in all layers',
    ),
    (
        SPARSE | depth(sparse_layers=4),
        'model.depth.sparse_layers=4: must be below model.num_layers=4',
    ),
    (VALUES | depth(value_mix='shard'), "value_mix='shard': must be one of auto, "),
    (VALUES | depth(value_mix='shard'), '; did you mean shared'),
    (
        depth(value_mix='fixed'),
        "value_mix='fixed': must be auto: the residual stream has no such knob; use stream val",
    ),
    (
        depth(sparse_layers=2),
        'sparse_layers=2: must be 0: the residual stream has no such knob; use stream value_resi',
    ),
)
TABLES = (
    *(
        (
            stream | {'model.embedding_residual': value},
            f"model.embedding_residual='{value}': must be none: the "
            f'{stream["model.depth.stream"]} stream carries no',
        )
        for stream in (SOURCES, HYPER, DENSE, AVERAGE, ATTENTION, MUDD)
        for value in ('learned', 'identity')
    ),
    (
        SHARED | ALL_LOOKED_UP,
        "model.value_embeddings='all': must be none under value_mix shared: later layers",
    ),
)
BY_THRESHOLD = {'model.routing.train_rule': 'threshold'}
EXPERTS = (
    (
        experts(choice='expert', num_noop=2),
        'experts.num_noop=2: must be 0 where experts choose',
    ),
    (
        experts(choice='expert', row_capacity=9),
        'experts.row_capacity=9: must be 0 where experts',
    ),
    (experts() | {'model.use_bias': True}, 'use_bias=True: must be False: experts have no biases'),
    (experts(row_capacity=9) | ROUTED, 'experts.row_capacity=9: must be 0 where blocks are'),
    (
        experts(choice='expert') | ROUTED | BY_THRESHOLD,
        "routing.train_rule='threshold': must be top_c where experts",
    ),
    (experts(layers='0,4'), "experts.layers='0,4': must be every:N, middle:FIRST:LAST or a list"),
)
LOOPS = (
    ({'model.loops': 0}, 'model.loops=0: must be'),
    ({'model.loops': 2}, 'model.loops=2: must be 1: no block is looped'),
    (SEQUENCE, "model.loop_order='sequence': must be cycle: no block is looped"),
    (LOOPED | MANY, 'model.loops=10000: must be at most 4999'),
    ({'model.looped_layers': 'middle:2:2'}, "looped_layers='middle:2:2': must be none, all"),
    ({'model.looped_layers': 'every:2'}, "looped_layers='every:2': must be none, all or"),
    (ALL_LOOPED | VALUES, "looped_layers='all': must be middle:1:0 or a later start"),
    (loops(1, 2), 'training.loops=(1, 2): must be (): no block is looped'),
    (LOOPED | loops(2), 'training.loops=(2,): must be (), or two different'),
    (LOOPED | loops(0, 2), 'training.loops=(0, 2): must be (), or two'),
    (LOOPED | ROUTED | loops(1, 2), 'must be () where blocks are routed'),
    (LOOPED | loops(1, 10**4), 'model.loops=10000: must be at most 4999'),
    (LOOPED | UNROLLED | depth(stream='dense'), 'must be none: layers of the dense'),
    (OWN_NORMS, "model.loop_norms='own': must be shared: no block is looped"),
    (OF_LOOPS, "model.loop_embeddings='learned': must be none: no block is looped"),
    (ROUTED_LOOPS | OWN_NORMS, "loop_norms='own': must be shared where model.routing.layers="),
    (ROUTED_LOOPS | OF_LOOPS, "'learned': must be none where model.routing.layers=loops"),
    *(
        (LOOPED | OF_LOOPS | depth(stream=stream), f'none: the {stream} stream carr')
        for stream in ('mudd', 'attention', 'attention_residual', 'hyper_connections')
    ),
    (
        LOOPED | OF_LOOPS | loops(1, 2),
        'must have model.loops=3 as its largest count: each loop has its own embeddings',
    ),
    (
        LOOPED | OWN_NORMS | OF_LOOPS | loops(1, 4),
        'model.loops=3 as its largest count: each loop has its own norms and embeddings',
    ),
    (EXITS, 'model.loop_exit_threshold=0.1: must be 0: no block is looped'),
    (LOOPED | EXITS | SEQUENCE, "'sequence': must be cycle under loop_exit_th"),
    (LOOPED | EXITS | MODA, "stream='moda': must be residual under loop_exit_threshold=0.1"),
    (LOOPED | EXITS | ROUTED, "router='learned': must be none under loop_exit_threshold=0.1"),
    (RECURSIONS | EXITS, "router='learned': must be none under loop_exit_threshold=0.1"),
    (
        TOKEN_CHOICE | {'model.routing.capacity_form': 'log_length'},
        "capacity_form='log_length': must be fraction if model.routing.router is token_choice",
    ),
    (TOKEN_CHOICE | EXITS, "router='token_choice': must be none under loop_exit_threshold=0.1"),
    (LOOPED | EXITS | experts(), "choice='token': must be none under loop_exit_threshold=0.1"),
)
ROUTED_LOOPS_ALONE = (
    ({'model.looped_layers': 'none', 'model.loops': 1}, "looped_layers='none': must"),
    ({'model.loops': 1}, 'loops=1: must be 2 or more where model.routing.layers=loops'),
    (SEQUENCE, "loop_order='sequence': must be cycle"),
    (MODA, "depth.stream='moda': must be residual where model.routing.layers=loops"),
    (experts(), "experts.choice='token': must be none where model.routing.layers=loops"),
    (EMBEDDED, "embedding_residual='learned'"),
    ({'model.routing.select_per': 'segment'}, "select_per='segment': must be row"),
    (OF_MLP, "routing.part='mlp': must be block where"),
    ({'model.routing.router': 'random', 'model.routing.gate': 'auto'}, "router='random'"),
    (
        FIRST_KEYS | {'model.routing.overflow': 'skip'},
        "overflow='skip': must be grow if loop_keys is first",
    ),
    (FIRST_KEYS | layers('every:1'), "loop_keys='first': must be own: no loop is routed"),
    (loops(2, 3), 'training.loops=(2, 3): must be ()'),
)
ROWS = (*DEPTH, *TABLES, *EXPERTS, *LOOPS)
ROWS += tuple((RECURSIONS | GROWS | knobs, words) for knobs, words in ROUTED_LOOPS_ALONE)


@pytest.mark.parametrize(('knobs', 'words'), ROWS, ids=[words for _, words in ROWS])
def test_knobs_that_do_not_fit_are_refused(knobs, words, tiny_config):
    """The error is one line with the knob, its value, and what would be right."""
    with pytest.raises(ValueError, match=r'^(model|training)\.[^\n]*$') as error:
        small_hparams(tiny_config, knobs)
    assert words in str(error.value)
