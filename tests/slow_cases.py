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
    'tests/launch/bench_test.py': ['test_attention_writes_json_and_a_picture'],
    'tests/notebooks_test.py': ['test_runs[depth_attention]'],
}
