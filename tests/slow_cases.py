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
    'tests/model/causal_layers_test.py': [
        'test_only_the_named_layers_obey_the_rule[scan-grow]',
    ],
    'tests/model/causality_test.py': [
        'test_future_tokens_change_no_bit_of_the_past[norm_predictor]',
        'test_future_tokens_change_no_bit_of_the_past[norm_threshold]',
        # Its gate is 1, which later tokens cannot change; its choice is the learned router's.
        'test_future_tokens_change_no_bit_of_the_past[straight_through_aux_loss]',
        'test_future_tokens_change_no_bit_of_the_past[straight_through_predictor]',
        'test_future_tokens_change_no_bit_of_the_past[straight_through_threshold]',
    ],
    'tests/model/depth_scan_test.py': ['test_gradients_of_bfloat16_slots[float32-block]'],
    'tests/model/documents_test.py': [
        'test_depth_mass_of_one_text',
        'test_one_text_or_many[mod and moda]',
        'test_prompt_of_several_documents_is_one_text',
    ],
    'tests/model/experts_decoding_test.py': [
        'test_prompt_and_steps_equal_the_full_forward[row capacity]',
    ],
    'tests/model/experts_models_test.py': [
        'test_rematerialisation_keeps_the_choice[token]',
        'test_scanned_and_rematerialised_equals_unrolled[all routed]',
    ],
    'tests/model/flops_test.py': [
        'test_counted_flops_are_those_of_the_traced_step[routed_unrolled_128]',
    ],
    'tests/model/gpu_lowering_test.py': ['test_step_lowers[mod and moda-block]'],
    'tests/model/initialisation_test.py': [
        'test_selected_gates_average_about_one_in_every_layer[deep]',
        'test_selected_gates_average_about_one_in_every_layer[post]',
    ],
    'tests/model/unrolled_test.py': [
        'test_a_row_decodes_alone_as_among_others[threshold]',
        'test_prompt_and_steps_equal_the_full_forward[position]',
    ],
    'tests/notebooks_test.py': ['test_runs[depth_attention]'],
    'tests/training/evaluate_test.py': [
        'test_losses_of_a_mixture_are_apart_and_weighted_by_its_shares',
    ],
    'tests/training/summary_test.py': ['test_counted_flops_are_those_of_the_trace[learned-64]'],
    'tests/training/threshold_test.py': ['test_the_warm_up_trains_by_top_c'],
    'tests/training/stages_test.py': [
        'test_counted_flops_of_each_stage_are_those_of_its_program[straight_through]',
    ],
}
