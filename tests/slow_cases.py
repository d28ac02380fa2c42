"""Cases that run behind the marker `slow`: `make test` has a sibling of each that is enough by day.

What is slow in itself carries the marker where it is written. Here stand cases of tests whose other
cases are quick, or say the same of another router, dtype or size.
"""

SLOW_CASES = {
    'tests/analysis/depth_mass_test.py': ['test_only_tokens_that_entered_count[masked]'],
    'tests/analysis/report_test.py': ['test_run_with_depth_slots_shows_who_reads_them[none]'],
    'tests/analysis/router_roc_test.py': ['test_random_routing_knows_nothing'],
    'tests/configs_test.py': [
        'test_an_experiment_is_lowered_for_its_own_shapes[dense_700m]',
        'test_an_experiment_is_lowered_for_its_own_shapes[depth_average]',
        'test_an_experiment_is_lowered_for_its_own_shapes[mod_isoflop_paper]',
        'test_an_experiment_is_lowered_for_its_own_shapes[moda_48l]',
        'test_an_experiment_is_lowered_for_its_own_shapes[moda_700m]',
    ],
    'tests/inference/generate_test.py': [
        'test_greedy_texts_are_the_argmax_of_full_forwards[threshold-knobs2]',
        'test_routing_makes_a_difference',
    ],
    'tests/kernels/cudnn_test.py': [
        'test_the_public_residual_is_a_trap',
        'test_the_stock_backward_pass_takes_the_joint_softmax',
    ],
    'tests/kernels/depth_attention_test.py': [
        'test_equals_float64_softmax_over_the_concatenation[fewer_than_the_newest]',
        'test_equals_float64_softmax_over_the_concatenation[group_of_5]',
        'test_equals_float64_softmax_over_the_concatenation[rows_unmasked]',
    ],
    'tests/kernels/joint_test.py': [
        'test_a_backend_without_lse_cotangents_does_not_lose_them[False]',
    ],
    'tests/kernels/sequence_memory_test.py': [
        'test_grows_with_the_tokens[keys of other tokens]',
        'test_grows_with_the_tokens[window]',
        'test_grows_with_the_tokens_on_an_h200[documents]',
        'test_grows_with_the_tokens_on_an_h200[keys of other tokens]',
        'test_grows_with_the_tokens_on_an_h200[window]',
        'test_a_long_row_on_an_h200[False]',
    ],
    'tests/kernels/xla_depth_test.py': [
        'test_tiles_of_tokens_change_nothing[False]',
        'test_sums_take_the_gradients_in_their_own_dtype[pallas]',
    ],
    'tests/launch/bench_test.py': ['test_attention_writes_json_and_a_picture'],
    'tests/notebooks_test.py': ['test_runs[depth_attention]'],
}
