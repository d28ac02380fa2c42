"""What does not fit is refused in one line, before anything compiles."""

import numpy as np
import pytest

from kernels_pallas import decode_attention, depth_attention


def zeros(*shape):
    return np.zeros(shape, np.float32)


QUERIES, KEYS = zeros(2, 5, 6, 4), zeros(2, 5, 3, 4)
SLOTS = zeros(7, 2, 5, 3, 4)
GIVEN = (QUERIES, KEYS, KEYS, SLOTS, SLOTS)
ROWS = np.zeros((2, 5), np.int32)


@pytest.mark.parametrize(
    ('inputs', 'arguments', 'named'),
    [
        ((QUERIES, KEYS, zeros(2, 4, 3, 4)), {}, r'\(2, 4, 3, 4\)'),
        ((QUERIES, zeros(1, 5, 3, 4), zeros(1, 5, 3, 4)), {}, r'\(1, 5, 3, 4\)'),
        ((QUERIES, zeros(2, 5, 3, 8), zeros(2, 5, 3, 8)), {}, r'\(2, 5, 3, 8\)'),
        ((QUERIES, zeros(2, 5, 4, 4), zeros(2, 5, 4, 4)), {}, r'4 key/value heads .* 6'),
        ((QUERIES, zeros(2, 7, 3, 4), zeros(2, 7, 3, 4)), {}, r'7 keys for 5 .*key_positions'),
        ((QUERIES, KEYS, KEYS), {'window': -3}, r'window=-3'),
        ((QUERIES, KEYS, KEYS), {'implementation': 'xal'}, r"'xal' must be None or one of .*xla"),
        ((QUERIES, KEYS, KEYS), {'positions_BT': np.zeros((2, 4), int)}, r'positions.*\(2, 4\)'),
        ((QUERIES, KEYS, KEYS), {'segment_ids_BT': np.zeros((2, 4), int)}, r'segment.*\(2, 4\)'),
        (
            (QUERIES, zeros(2, 7, 3, 4), zeros(2, 7, 3, 4)),
            {
                'key_positions_BS': np.zeros((2, 7), int),
                'segment_ids_BT': np.zeros((2, 5), int),
            },
            r'key_segment_ids',
        ),
        (
            (QUERIES, KEYS, KEYS),
            {'key_segment_ids_BS': np.zeros((2, 5), int)},
            r'key_segment_ids',
        ),
        (
            (*GIVEN[:3], zeros(7, 2, 4, 3, 4), zeros(7, 2, 4, 3, 4)),
            {},
            r'k_depth.*\(7, 2, 4, 3, 4\)',
        ),
        ((*GIVEN[:3], SLOTS[:, :1], SLOTS), {'slot_rows_BT': ROWS}, r'k_depth.*\[L, 2, R, 3, 4\]'),
        ((*GIVEN[:4], SLOTS[:6]), {}, r'v_depth.*\(6, 2, 5, 3, 4\).*\(7, 2, 5, 3, 4\)'),
        ((*GIVEN[:4], SLOTS[0]), {}, r'v_depth.*\(2, 5, 3, 4\)'),
        (GIVEN[:4], {}, r'v_depth_LBRKH is None'),
        ((*GIVEN[:3], None, SLOTS), {}, r'k_depth_LBRKH is None'),
        (GIVEN[:3], {'num_slots': 1}, r'num_slots needs k_depth_LBRKH'),
        (GIVEN, {'num_slots': 8}, r'num_slots=8 .* 7 slots'),
        (GIVEN, {'num_slots': -1}, r'num_slots=-1 .* 7 slots'),
        (GIVEN, {'slot_window': -2}, r'slot_window=-2'),
        (GIVEN, {'slot_sums': (SLOTS, SLOTS[:6])}, r'slot_sums .*\(6, 2, 5, 3, 4\)'),
        (GIVEN, {'slot_sums': (SLOTS, None)}, r'slot_sums .*None.* must be two arrays'),
        (GIVEN, {'slot_sums': (SLOTS,) * 3}, r'slot_sums .* must be two arrays'),
        (GIVEN, {'slot_sums': (SLOTS.astype(np.float16),) * 2}, r'slot_sums .*both float32'),
        (GIVEN, {'num_slots': 2.0}, r'num_slots .*float32 must be one integer'),
        (GIVEN, {'num_slots': np.ones(1, int)}, r'num_slots of shape \(1,\)'),
        ((QUERIES[0], KEYS, KEYS), {}, r'queries \(5, 6, 4\)'),
        ((QUERIES, KEYS[:, :, :0], KEYS[:, :, :0]), {}, r'K of 1 or more'),
        (GIVEN[:3], {'slot_sums': (SLOTS, SLOTS)}, r'slot_sums needs k_depth_LBRKH'),
        (GIVEN, {'slot_mask_LBR': np.ones((7, 2, 4), bool)}, r'slot_mask.*\(7, 2, 4\)'),
        (GIVEN, {'slot_rows_BT': ROWS[:, :4]}, r'slot_rows.*\(2, 4\)'),
        (GIVEN, {'q_depth_BTNH': KEYS}, r'q_depth.*\(2, 5, 3, 4\)'),
    ],
)
def test_what_does_not_fit_is_refused(inputs, arguments, named):
    """Shapes that do not fit, unknown names and negative windows are refused in one line."""
    with pytest.raises(ValueError, match=named) as error:
        depth_attention(*inputs, **arguments)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('slots', 'named'),
    [
        ({'k_depth_LC1KH': zeros(7, 2, 1, 3, 4)}, r'v_depth_LC1KH is None'),
        ({'slot_window': -1}, r'slot_window=-1'),
    ],
)
def test_decoding_refuses_half_slots_and_negative_windows(slots, named):
    """The checks of the form for one token."""
    q, k, cache = zeros(2, 1, 6, 4), zeros(2, 1, 3, 4), zeros(2, 3, 4, 8)
    with pytest.raises(ValueError, match=named):
        decode_attention(q, k, k, cache, cache, np.ones((2, 8), bool), **slots)
