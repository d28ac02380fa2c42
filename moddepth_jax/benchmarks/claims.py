"""Claims of the papers that only a GPU can judge, by rules set before the first result."""

from moddepth_jax.benchmarks.attention_forms import BOTH, PLAIN
from moddepth_jax.benchmarks.model_tables import saving
from moddepth_jax.studies.claims import FAILS, HOLDS

EFFICIENCY = 0.973  # of FlashAttention-2, at T = 64k
SAVING = 0.9  # of what the count allows


def _row(claim_id, claim, paper, rule, ours, holds, reason):
    verdict = HOLDS if holds else FAILS
    row = {'id': claim_id, 'topic': 'GPU', 'claim': claim, 'paper': paper, 'rule': rule}
    return row | {'ours': ours, 'spread': '-', 'verdict': verdict, 'reason': reason}


def _seconds(row, implementation, over):
    """Of both passes; None: not timed."""
    for found in (row or {}).get('rows', ()):
        fields = (found['implementation'], found['over'], found['direction'])
        if fields == (implementation, over, 'fresh') and 'seconds' in found:
            return found['seconds']
    return None


def _efficiency(rows):
    """The time of FlashAttention-2 without slots over the best of ours with them."""
    plain = _seconds(rows.get('time/flash_attention_2/64k'), 'flash_attention_2', PLAIN)
    ours = {
        name: _seconds(rows.get(f'time/{name}/64k'), name, BOTH)
        for name in ('mosaic_gpu', 'mosaic_gpu_fused', 'pallas')
    }
    ours = {name: seconds for name, seconds in ours.items() if seconds}
    if not plain or not ours:
        return []
    best = min(ours, key=ours.get)
    reached = plain / ours[best]
    rule = 'Both passes, T = 65536, G = 8, L = 64, H = 64, bfloat16. Holds: at 97.3% or above.'
    why = f'{best}: {1e3 * ours[best]:.1f} ms with slots; without, in Triton: {1e3 * plain:.1f} ms'
    claim = 'The kernel reaches 97.3% of the efficiency of FlashAttention-2 at T = 64k'
    return [
        _row(
            'kernel_efficiency', claim, '97.3%', rule, f'{reached:.1%}', reached >= EFFICIENCY, why
        )
    ]


def _equal_time(rows):
    """Whether a MoD step is as much faster as its FLOPs are fewer."""
    found = []
    for size in ('124m', '700m'):
        dense, mod = (rows.get(f'step/{size}/{name}') for name in ('dense', 'mod'))
        if not (dense and mod and dense['status'] == mod['status'] == 'ok'):
            continue
        value = saving(mod, dense)
        rule = 'One training step. Holds: (time ratio / FLOP ratio) is at least 0.9.'
        why = f'{1e3 * dense["step_seconds"]:.1f} ms dense, {1e3 * mod["step_seconds"]:.1f} ms MoD'
        claim = f'At equal training FLOPs MoD takes as long to train as the dense model, {size}'
        row = _row(f'equal_time_{size}', claim, 'equal', rule, f'{value:.3f}', value >= SAVING, why)
        found.append(row)
    return found


def judged(rows: dict[str, dict]) -> list[dict]:
    """A row, as claims.json of launch.claims has them, for each claim there is data for.

    Args:
      rows: the newest of each case, by name.
    """
    ok = {name: row for name, row in rows.items() if row['status'] == 'ok' and not row.get('toy')}
    return [*_efficiency(ok), *_equal_time(ok)]
