"""What the library promises, row by row, and the tests that hold each promise.

A row's tests are node ids below ``tests/`` without parameters. ``gap`` says what of a row is not true yet, or is not
held by a test; it is empty for a row that holds in full. ``python -m tests.contract`` prints the node ids, for
``make test-contract``; `tests/test_contract.py` checks the table itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One promise."""

    promise: str
    tests: tuple[str, ...]
    gap: str = ""


def _row(promise: str, *tests: str, gap: str = "") -> Row:
    return Row(promise, tests, gap)


API = "test_api.py::"
CALLER = "core/test_caller.py::"
EXAMPLES = "test_documented_examples.py::"
NOTEBOOK = "test_notebook.py::"
JUPYTER = "test_jupyter.py::"
MISUSE = "test_misuse.py::"
PIPE = "wrappers/test_pipe.py::"
ENGINE = "runtime/test_engine.py::"
AUTOGRAD = "wrappers/test_autograd.py::"
OPTIMIZER = "runtime/test_optimizer.py::"
OVERLAP = "runtime/test_overlap.py::"
TIMES = "runtime/test_layer_times.py::"
SCALER = "runtime/test_grad_scaler.py::"
MICROBATCH = "runtime/test_microbatch.py::"
CONFIG = "runtime/test_config.py::"
SCHEDULE = "core/test_schedule.py::"
MEMORY = "runtime/test_memory.py::"
RESIDENCY = "runtime/test_residency.py::"
PINNING = "runtime/test_pinning.py::"
TIMELINE = "runtime/test_timeline.py::"
TRAINING = "runtime/test_training.py::"
LOADING = "runtime/test_loading.py::"
REPLICA = "runtime/test_replica.py::"
RECOMPUTE = "runtime/test_recompute.py::"
SAVED = "runtime/test_saved_data.py::"
ERRORS = "runtime/test_errors.py::"
CUDA = "runtime/test_accelerator.py::"
EQUALITY = "test_equality.py::"
ZOO = "zoo/"
CHECKPOINT = "wrappers/test_checkpoint.py::"
IMPORTS = "test_architecture.py::"
TRACER = "fx/test_tracer.py::"
GUARDS = "fx/test_guards.py::"
SHAPES = "fx/test_shapes.py::"
TRAPS = "fx/test_traps.py::"
LAYOUT = "fx/test_layout.py::"
CHANGES = "fx/test_changes.py::"
HIDDEN = "fx/test_hidden_state.py::"
FUZZ = "fx/test_fuzz.py::"
ADVICE = "fx/test_advice.py::"
FORWARDING = "wrappers/test_forwarding.py::"
WRAP = "wrappers/test_wrap.py::"
LATER = "wrappers/test_lazy_outputs.py::"
AUTO = "wrappers/test_auto.py::"
PARTS = "wrappers/test_parts.py::"
EXPLAIN = "tools/test_explain.py::"
CLI = "tools/test_command_line.py::"
API_PARTITION = "test_api_partition.py::"
AUTOGRAD_OUTPUTS = "wrappers/test_autograd_outputs.py::"
CHANGES_IN_CALLS = "fx/test_changes_in_calls.py::"
CHANGES_OF_MODES = "fx/test_changes_of_modes.py::"
CHANGES_OF_WEIGHTS = "fx/test_changes_of_weights.py::"
CHECKPOINT_FAILURES = "wrappers/test_checkpoint_failures.py::"
CHECKPOINT_WEIGHTS = "wrappers/test_checkpoint_weights.py::"
COMMAND_LINE_EXPLAIN = "tools/test_command_line_explain.py::"
COMMAND_LINE_MODELS = "tools/test_command_line_models.py::"
COMPILED_MODULES = "wrappers/test_compiled_modules.py::"
DEADLOCKS = "runtime/test_deadlocks.py::"
DOCUMENTED_TRAINING = "test_documented_training.py::"
HIDDEN_ARGUMENTS = "fx/test_hidden_arguments.py::"
HIDDEN_MODULES = "fx/test_hidden_modules.py::"
MASTER_WEIGHTS = "runtime/test_master_weights.py::"
MERGE = "runtime/test_merge.py::"
PARTS_STATE = "wrappers/test_parts_state.py::"
PIPE_LIFE = "wrappers/test_pipe_life.py::"
PIPE_TRAINING = "wrappers/test_pipe_training.py::"
STALENESS = "runtime/test_staleness.py::"
TIMELINE_DATA = "runtime/test_timeline_data.py::"
TRACER_SURROUNDINGS = "fx/test_tracer_surroundings.py::"
TRAPS_OF_TENSORS = "fx/test_traps_of_tensors.py::"
WORKERS = "runtime/test_workers.py::"
WRAP_OPTIONS = "wrappers/test_wrap_options.py::"
WRAP_UNTRACEABLE = "wrappers/test_wrap_untraceable.py::"

RUNTIME_ROWS: dict[str, Row] = {
    "A1": _row(
        "a Sequential is one layer per child, anything else one layer",
        PIPE + "test_a_sequential_has_one_layer_per_child",
        PIPE + "test_a_child_that_is_there_twice_is_two_layers",
        PIPE + "test_any_other_module_is_one_layer",
    ),
    "A2": _row(
        "the optimizer's copies have the parameter's dtype or the one asked for",
        PIPE_TRAINING + "test_half_precision_weights_with_float32_copies",
        OPTIMIZER + "test_low_precision_weights_with_float32_copies",
        OPTIMIZER + "test_equal_dtypes_hand_the_gradient_over",
        TRAINING + "test_mixed_precision_tracks_plain_pytorch_for_200_steps",
    ),
    "A3": _row(
        "the name is the caller's line by default; it is in traces",
        PIPE + "test_the_name_is_the_callers_line_by_default",
        TIMELINE_DATA + "test_the_trace_has_what_perfetto_needs",
    ),
    "A4": _row(
        "three ways to pin, never more than 1.1 times the model's bytes",
        RESIDENCY + "test_host_memory_of_packed_weights",
        RESIDENCY + "test_packing_never_holds_two_models",
        RESIDENCY + "test_pin_model_off_leaves_memory_where_it_is",
        RESIDENCY + "test_weights_mapped_from_a_file_stay_there",
        PIPE_LIFE + "test_bad_options_say_what_is_allowed",
        CUDA + "test_host_buffers_are_pinned_and_exact",
        CUDA + "test_registered_memory_is_pinned",
        PINNING + "test_host_memory_of_a_model_is_bounded",
        PINNING + "test_large_tensors_are_pinned_where_they_are_and_small_ones_packed",
        PINNING + "test_closing_and_collecting_give_pages_back",
        PINNING + "test_register_without_cuda_says_what_is_possible",
        PINNING + "test_a_refusal_warns_once_with_the_limit",
        PINNING + "test_pinned_allocations_degrade",
        CUDA + "test_memory_is_registered_where_it_is_until_the_model_is_closed",
        CUDA + "test_a_refusal_to_pin_costs_speed_only",
    ),
    "A5": _row(
        "attributes are the model's, modes follow, hooks of layers fire",
        PIPE + "test_attributes_are_those_of_the_model",
        PIPE + "test_attributes_are_those_of_the_original_model_if_one_is_set",
        PIPE + "test_modes_follow_the_model",
        REPLICA + "test_hooks_fire_with_the_layers_inputs_and_outputs",
        DOCUMENTED_TRAINING + "test_the_original_model_answers_for_its_parts",
        FORWARDING + "test_attributes_are_read_written_and_deleted_on_the_model",
        FORWARDING + "test_utilities_of_modules",
        FORWARDING + "test_a_compiled_model_is_converted_and_loaded",
        COMPILED_MODULES + "test_generate_after_synchronize_is_the_trained_models",
        COMPILED_MODULES + "test_torch_compile_of_the_original",
        COMPILED_MODULES + "test_torch_compile_of_the_wrapper_runs_it_as_it_is",
        FORWARDING + "test_a_deep_copy_is_another_wrapper_of_another_model",
        FORWARDING + "test_what_can_not_be_copied_says_what_to_do",
    ),
    "A6": _row(
        "model.model is the wrapped module",
        PIPE + "test_attributes_are_those_of_the_model",
        AUTO + "test_the_users_model_can_be_saved",
    ),
    "A7": _row(
        "devices is a rotation in which an entry may be repeated",
        WORKERS + "test_bits_do_not_depend_on_the_number_of_workers",
        EQUALITY + "test_result_does_not_depend_on_the_number_of_workers",
        PIPE_LIFE + "test_an_accelerator_that_is_not_there_is_refused",
        CUDA + "test_repeated_devices_give_the_same_bits_and_draws",
    ),
    "A8": _row(
        "importing starts nothing; close, with and garbage collection end everything",
        IMPORTS + "test_importing_starts_nothing_asks_nothing_and_prints_nothing",
        PIPE_LIFE + "test_nothing_starts_before_the_first_call",
        PIPE_LIFE + "test_a_deleted_model_ends_its_threads",
        PIPE_TRAINING + "test_closing_ends_threads_also_if_a_step_failed",
        PIPE_LIFE + "test_a_process_ends_with_an_open_model",
        MEMORY + "test_closing_gives_everything_back",
        NOTEBOOK + "test_a_deleted_model_frees_threads_and_memory",
        NOTEBOOK + "test_a_cell_can_run_again",
        JUPYTER + "test_a_cell_runs_again_and_its_model_is_deleted",
        "runtime/test_dropped_chains.py::test_dropped_traces_are_forgotten",
    ),
    "B1": _row(
        "model(...) is model.forward(...), without the config keyword",
        API_PARTITION + "test_the_config_keyword_is_not_passed_on",
    ),
    "B2": _row(
        "split, run, merge; nothing is kept without grad",
        EXAMPLES + "test_outputs_are_merged",
        AUTOGRAD_OUTPUTS + "test_without_grad_nothing_is_kept",
        AUTOGRAD_OUTPUTS + "test_training_after_a_first_call_without_grad",
        MEMORY + "test_forward_without_grad_keeps_no_activations",
        MEMORY + "test_the_order_of_peaks",
        CHANGES_OF_WEIGHTS + "test_code_that_asks_for_gradients_gets_the_callers_answer",
        CHANGES_OF_WEIGHTS + "test_the_question_for_gradients_is_noticed_wherever_code_has_it_from",
        CHANGES_OF_MODES + "test_a_mode_set_before_the_backward_is_the_next_calls",
    ),
    "B3": _row(
        "outputs support backward, and gradients flow on into what made the inputs",
        AUTOGRAD + "test_backward_through_outputs",
        AUTOGRAD + "test_modules_before_and_after",
        AUTOGRAD_OUTPUTS + "test_several_outputs_of_which_some_get_gradients",
        AUTOGRAD_OUTPUTS + "test_hooks_of_the_callers_graph_run",
        API_PARTITION + "test_gradients_flow_to_and_through_the_inputs",
        AUTOGRAD_OUTPUTS + "test_gradients_of_inputs_alone_leave_those_of_parameters",
        AUTOGRAD_OUTPUTS + "test_part_of_the_outputs_is_as_in_eager",
        AUTOGRAD + "test_a_second_backward_says_what_to_do",
        AUTOGRAD + "test_an_argument_written_before_the_backward_is_an_error_as_in_eager",
    ),
    "B4": _row(
        "inputs on the CPU or on a device",
        CUDA + "test_forward_and_backward_apart",
        AUTOGRAD + "test_backward_through_outputs",
    ),
    "C1": _row(
        "forward_backward is the loop over microbatches",
        DOCUMENTED_TRAINING + "test_forward_backward_is_the_loop_over_microbatches",
        ENGINE + "test_equals_eager_for_every_plan",
        EQUALITY + "test_loss_gradients_and_buffers_equal_eager",
    ),
    "C2": _row(
        "a sequence of losses gives a list of sums",
        DOCUMENTED_TRAINING + "test_a_sequence_of_losses_gives_a_list_of_sums",
        ENGINE + "test_a_loss_with_several_parts",
        CUDA + "test_equals_eager_on_the_cpu",
    ),
    "C3": _row(
        "return_outputs gives the loss and the merged outputs",
        DOCUMENTED_TRAINING + "test_forward_backward_is_the_loop_over_microbatches",
    ),
    "C4": _row(
        "gradients add up until zeroed",
        ENGINE + "test_calls_accumulate",
        OPTIMIZER + "test_gradients_accumulate_over_rounds",
        PIPE_TRAINING + "test_zero_grad_drops_what_was_accumulated",
    ),
    "C5": _row(
        "stages interleave; the last one recomputes nothing",
        RECOMPUTE + "test_each_layer_runs_once_more_and_the_fused_tail_does_not",
        WORKERS + "test_two_workers_compute_at_the_same_time",
        SCHEDULE + "test_the_table_is_the_one_in_the_docstring",
        OVERLAP + "test_the_next_round_begins_beside_the_last_backward_stages",
    ),
    "C6": _row("a scaled loss, divided by the number of microbatches", DOCUMENTED_TRAINING + "test_patterns_of_step"),
    "D1": _row(
        "optimizer parameters: trainable ones only, under their original names",
        MASTER_WEIGHTS + "test_names_ties_and_frozen_parameters",
        MASTER_WEIGHTS + "test_freezing_and_thawing",
        TRAINING + "test_any_optimizer_trains_as_in_eager",
        TRAINING + "test_lbfgs_evaluates_the_model_in_a_step_that_is_not_asynchronous",
        TRAINING + "test_parameters_frozen_and_thawed_between_steps",
        MEMORY + "test_frozen_weights_have_no_gradients_on_the_device",
        DOCUMENTED_TRAINING + "test_optimizer_parameters_have_their_own_dtype_and_the_models_names",
    ),
    "D2": _row(
        "async steps are one step behind, sync steps are eager's",
        PIPE_TRAINING + "test_asynchronous_steps_are_one_step_behind",
        PIPE_TRAINING + "test_an_asynchronous_step_does_not_block",
        PIPE_TRAINING + "test_synchronous_steps_follow_eager",
        OPTIMIZER + "test_async_steps_are_one_step_behind",
        OPTIMIZER + "test_mixed_steps",
        MASTER_WEIGHTS + "test_an_interrupted_step_was_made_or_not",
        STALENESS + "test_the_trajectory_is_that_of_one_step_of_staleness",
        OVERLAP + "test_what_the_caller_changes_after_the_call_is_not_seen",
        EQUALITY + "test_five_steps_equal_eager",
        DOCUMENTED_TRAINING + "test_arguments_of_step_reach_the_function",
    ),
    "D3": _row(
        "inside step_fn the model's parameters are the optimizer's",
        PIPE_TRAINING + "test_parameters_inside_step_fn_are_the_optimizers",
        MASTER_WEIGHTS + "test_parameters_are_the_optimizers_inside_step_fn",
    ),
    "D4": _row(
        "scaler, clipping and schedulers in step_fn; a scaler that is safe with async steps",
        DOCUMENTED_TRAINING + "test_patterns_of_step",
        MASTER_WEIGHTS + "test_clipping_and_scheduler",
        SCALER + "test_sync_steps_are_torchs",
        SCALER + "test_async_gradients_are_divided_by_their_own_scale",
        SCALER + "test_a_stale_overflow_backs_off_once",
        SCALER + "test_state_is_interchangeable_with_torchs",
    ),
    "D5": _row(
        "synchronize shows the latest weights and all gradients, and loses none",
        PIPE_TRAINING + "test_synchronize_before_step_loses_nothing",
        OPTIMIZER + "test_synchronize_before_step_loses_nothing",
        OPTIMIZER + "test_synchronize_shows_what_the_step_left",
        OVERLAP + "test_gradients_are_whole_wherever_they_are_asked_for",
        OVERLAP + "test_buffers_are_there_with_the_losses",
        DOCUMENTED_TRAINING + "test_evaluation_saving_and_inspection",
    ),
    "D6": _row(
        "an exception in step_fn is raised at the next call, as it was",
        PIPE_TRAINING + "test_an_exception_in_step_fn_is_raised_at_the_next_call",
        MASTER_WEIGHTS + "test_async_error_is_raised_at_the_next_call_and_loses_no_gradient",
        MASTER_WEIGHTS + "test_async_error_is_raised_by_step_synchronize_and_close",
        TRAINING + "test_after_an_exception_in_step_fn_training_goes_on",
    ),
    "D7": _row(
        "load_state_dict reaches the optimizer's copies",
        PIPE_TRAINING + "test_loading_a_state_reaches_the_optimizer",
        MASTER_WEIGHTS + "test_refresh_starts_from_the_models_weights",
        LOADING + "test_a_load_into_the_users_model_reaches_the_optimizer",
        LOADING + "test_a_load_into_a_part_of_the_model_reaches_the_optimizer",
        LOADING + "test_parameters_that_a_load_replaces_are_trained",
    ),
    "D8": _row(
        "checkpoints: whole after a crash, the original keys, any number of devices",
        CHECKPOINT + "test_resuming_is_equal_bit_for_bit",
        CHECKPOINT_WEIGHTS + "test_a_compiled_model_resumes_on_other_devices",
        CHECKPOINT_FAILURES + "test_killed_at_any_moment_the_last_complete_checkpoint_loads",
        CHECKPOINT + "test_scheduler_and_scaler_go_on",
        CHECKPOINT + "test_random_generators_go_on",
    ),
    "G1": _row(
        "call over model over built-in, field by field, for that call alone",
        CONFIG + "test_call_over_model_over_built_in",
        CONFIG + "test_fields_of_both_are_joined",
        DOCUMENTED_TRAINING + "test_a_call_overrides_the_model_for_that_call_alone",
    ),
    "G2": _row(
        "one microbatch more than devices; more of them peak lower",
        DOCUMENTED_TRAINING + "test_built_in_number_of_microbatches_is_one_more_than_devices",
        MEMORY + "test_more_microbatches_peak_lower",
        TIMES + "test_without_a_limit_there_are_few_microbatches",
        TIMES + "test_before_the_layers_are_known_the_built_in_number_serves",
        TIMES + "test_options_that_cannot_be_the_fastest_are_not_planned_for",
    ),
    "G3": _row(
        "both grains give the same numbers, 'layer' peaks lower",
        DOCUMENTED_TRAINING + "test_the_grain_of_recomputation_changes_no_number",
        WORKERS + "test_bits_of_the_stages_do_not_depend_on_the_grain",
        MEMORY + "test_layer_grain_peaks_below_stage_grain",
        TIMES + "test_a_limit_asks_for_more_microbatches_or_layer_by_layer",
    ),
    "G4": _row(
        "outputs are on the CPU, or on the device asked for",
        DOCUMENTED_TRAINING + "test_outputs_are_on_the_cpu_by_default",
        CUDA + "test_forward_and_backward_apart",
    ),
    "G5": _row(
        "plans are validated, with errors that name the bad range",
        SCHEDULE + "test_a_plan_that_does_not_cover_the_model_names_the_range",
        SCHEDULE + "test_what_is_no_range_is_named",
        SCHEDULE + "test_ranges_and_pairs_are_the_same_plan",
        SCHEDULE + "test_the_fused_tail_may_be_the_first_backward_range",
        WORKERS + "test_a_plan_for_another_number_of_layers_is_refused",
        IMPORTS + "test_public_names",
    ),
    "H1": _row(
        "automatic split of any structure, evenly, on dim 0",
        MICROBATCH + "test_every_structure_is_walked",
        MICROBATCH + "test_the_batch_size_is_that_of_the_first_tensor_with_a_dim",
        MICROBATCH + "test_sizes_differ_by_at_most_one_and_lose_nothing",
        MICROBATCH + "test_scalars_and_others_are_replicated",
        EXAMPLES + "test_twelve_pictures_in_four_microbatches",
        CALLER + "test_a_warning_about_microbatches_points_at_the_call",
    ),
    "H2": _row(
        "a small batch has fewer microbatches, with one warning; an empty one is an error",
        MICROBATCH + "test_a_small_batch_has_fewer_microbatches_and_one_warning",
        MICROBATCH + "test_an_empty_batch_is_an_error",
        ENGINE + "test_num_microbatches_is_known_in_loss_fn",
        CALLER + "test_a_warning_about_microbatches_points_at_the_call",
    ),
    "H3": _row(
        "specs and functions split inputs and labels",
        MICROBATCH + "test_specs_say_which_dim",
        MICROBATCH + "test_functions_are_called_for_one_microbatch_too",
        MICROBATCH + "test_rules_that_do_not_fit_say_where",
        EXAMPLES + "test_split_spec_with_a_replicated_argument",
        EXAMPLES + "test_split_spec_along_another_dimension",
        EXAMPLES + "test_split_functions",
        WRAP_UNTRACEABLE + "test_functions_of_the_users_split_a_call_once",
        EXAMPLES + "test_labels_are_split_beside_the_inputs",
        EXAMPLES + "test_class_weights_are_replicated",
    ),
    "H4": _row(
        "outputs are merged automatically, by spec or by function",
        MERGE + "test_automatic_merge",
        MERGE + "test_merge_specs",
        MERGE + "test_merge_function_gets_all_outputs",
        MERGE + "test_outputs_that_can_not_be_merged_are_named",
        EXAMPLES + "test_outputs_are_merged",
    ),
    "H5": _row(
        "unmerged outputs feed another model without a copy, forward and backward",
        MERGE + "test_unmerged_outputs_are_packed_leaf_by_leaf",
        MERGE + "test_packed_data_is_taken_as_it_is",
        AUTOGRAD_OUTPUTS + "test_packed_outputs_feed_another_model",
        AUTOGRAD_OUTPUTS + "test_packed_data_can_be_synchronised_and_used",
        EXAMPLES + "test_unmerged_outputs_feed_another_model",
    ),
    "recompute": _row(
        "decisions of a forward are there in its recomputation",
        SAVED + "test_recomputation_takes_the_decisions_of_the_forward",
        SAVED + "test_getting_more_than_was_saved_names_the_rule",
        RECOMPUTE + "test_the_mark_is_of_the_thread_and_nests",
    ),
    "errors": _row(
        "misuse says what is allowed; a user's exception keeps its type and says where; the next call works",
        PIPE_LIFE + "test_bad_arguments_say_what_is_allowed",
        API_PARTITION + "test_bad_options_say_what_is_allowed",
        MISUSE + "test_constructions",
        MISUSE + "test_calls",
        MISUSE + "test_configs",
        MISUSE + "test_values_and_helpers",
        MISUSE + "test_checkpoints",
        MISUSE + "test_calls_of_a_closed_model",
        ERRORS + "test_an_exception_in_a_layer_says_where",
        ERRORS + "test_an_exception_in_the_loss_function_says_where",
        ERRORS + "test_an_exception_in_backward_says_where",
        ERRORS + "test_nothing_of_a_failed_round_stays_alive",
        DEADLOCKS + "test_what_goes_wrong_after_an_error_is_noted_and_the_next_call_works",
        DEADLOCKS + "test_an_error_that_nothing_catches_fails_the_rounds_instead_of_hanging",
        DEADLOCKS + "test_a_hook_that_can_not_run_is_refused_before_any_work",
        PIPE_LIFE + "test_a_wrapper_inside_of_what_is_wrapped_is_named",
        RESIDENCY + "test_parameters_that_share_memory_are_named",
        REPLICA + "test_a_structure_that_changes_before_the_backward_is_an_error",
        NOTEBOOK + "test_an_interrupt_leaves_a_usable_model",
        JUPYTER + "test_an_interrupted_call_leaves_a_usable_model",
    ),
}

COMPILER_ROWS: dict[str, Row] = {
    "P1": _row(
        "any module becomes a chain of generated layers",
        API + "test_any_module_becomes_a_chain_of_generated_layers",
        EQUALITY + "test_loss_gradients_and_buffers_equal_eager",
        "fx/test_chains.py::test_every_block_has_a_layer_of_its_own",
        ZOO + "test_rows.py::test_equals_eager",
        ZOO + "test_cut.py::test_one_hidden_tensor_crosses_from_block_to_block",
        ZOO + "test_cut.py::test_the_encoder_output_is_carried_once",
        ZOO + "test_cut.py::test_a_large_embedding_and_a_large_head_are_layers_of_their_own",
        "test_budget.py::test_a_block_that_is_too_large_for_the_device_is_cut_inside",
        "test_budget.py::test_a_block_that_is_too_large_and_can_not_be_cut_is_named",
    ),
    "P2": _row(
        "example inputs may be omitted",
        API + "test_without_an_example_the_first_call_traces",
        API + "test_the_models_own_example_shows_the_partition_and_serves_calls",
        API + "test_an_example_of_its_own_that_can_not_be_traced_decides_nothing",
        API + "test_a_root_found_untraceable_at_the_first_call_falls_back_with_its_optimizer",
    ),
    "P3": _row(
        "one trace serves every batch size and length; a failed guard traces again, is logged and counted",
        API + "test_one_trace_serves_every_batch_size",
        API + "test_one_trace_serves_every_length_of_token_ids",
        API + "test_a_second_trace_serves_every_length_of_float_inputs",
        "fx/test_lengths.py::test_a_contrastive_loss_is_one_trace_for_every_batch_size",
        "fx/test_lengths.py::test_a_decision_on_a_length_is_guarded",
        API + "test_a_failed_guard_traces_again_is_logged_and_counted",
        API + "test_traces_one_after_the_other_are_warned_of",
        API + "test_training_and_evaluation_take_a_trace_each",
        TRACER + "test_one_trace_equals_eager_at_other_sizes",
        GUARDS + "test_every_assumption_is_described",
        TRAPS_OF_TENSORS + "test_five_traces_in_a_row_name_the_input_that_varies",
        TRAPS + "test_an_attribute_set_between_calls_traces_again",
        CHANGES_OF_WEIGHTS + "test_what_nobody_reads_may_change",
        CHANGES_OF_WEIGHTS + "test_the_forwards_own_changes_do_not_trace_again",
        gap="other dims of float inputs than the batch are fixed until they are seen to vary: one trace more",
    ),
    "P4": _row(
        "what can't be traced stays whole; a root that can't be traced falls back with one warning",
        API + "test_a_submodule_that_can_not_be_traced_stays_whole_and_the_rest_is_cut",
        API + "test_a_root_that_can_not_be_traced_falls_back_with_one_warning",
        API + "test_without_fallback_it_raises",
        API + "test_a_root_found_untraceable_at_the_first_call_falls_back_with_its_optimizer",
        API + "test_only_the_calls_that_can_not_be_traced_fall_back",
        ADVICE + "test_the_error_names_the_line_and_a_change",
        ADVICE + "test_the_change_helps",
        TRACER + "test_an_opaque_submodule_says_why",
        TRAPS_OF_TENSORS + "test_autograd_inside_a_forward_falls_back",
        TRAPS_OF_TENSORS + "test_random_numbers_of_python_and_numpy_fall_back",
    ),
    "P5": _row(
        "a branch on data is never burned in",
        API + "test_a_branch_on_data_is_never_burned_in",
        TRACER_SURROUNDINGS + "test_a_leaf_that_returns_a_decision_is_never_burned_in",
        TRACER + "test_a_branch_on_activations_at_the_root_is_refused",
        FUZZ + "test_random_modules_equal_eager",
        SHAPES + "test_a_branch_at_the_root_equals_eager_without_a_graph",
        TRAPS + "test_state_that_decides_is_never_burned_in",
        CHANGES + "test_what_changes_between_calls_is_found",
        CHANGES_IN_CALLS + "test_state_that_one_mode_needs_is_never_lost_in_the_other",
        HIDDEN + "test_state_of_any_kind_is_never_burned_in",
        HIDDEN + "test_a_trace_takes_nothing_from_what_a_user_holds",
        HIDDEN + "test_a_hook_that_draws_is_never_burned_in",
        HIDDEN_MODULES + "test_what_a_hidden_module_reads_is_looked_at_before_every_call",
        HIDDEN_MODULES + "test_a_trace_leaves_hidden_modules_as_they_were",
        HIDDEN + "test_objects_that_no_forward_changes_are_no_obstacle",
        TRAPS_OF_TENSORS + "test_memory_layout_of_activations_is_never_burned_in",
        LAYOUT + "test_an_answer_that_every_kernel_gives_is_traced",
        LAYOUT + "test_what_kernels_choose_is_refused_and_falls_back",
        LAYOUT + "test_a_kernel_that_lays_its_output_otherwise_after_all_is_found_out",
        TRAPS_OF_TENSORS + "test_what_is_read_of_an_input_itself_is_read_at_every_call",
    ),
    "P6": _row(
        "the partition is a table, and explain says what was traced",
        API_PARTITION + "test_the_partition_is_shown",
        "reports/test_tables.py::test_stages",
        "reports/test_tables.py::test_balance_is_heaviest_over_mean",
        "reports/test_tables.py::test_measured_times_replace_flops_and_folded_rows_show_their_mean",
        EXPLAIN + "test_the_report",
        EXPLAIN + "test_carried_values_are_those_of_the_layers",
        EXPLAIN + "test_a_model_that_can_not_be_traced",
        EXPLAIN + "test_on_meta_and_with_the_models_own_example",
        EXPLAIN + "test_the_graph_as_dot",
        EXPLAIN + "test_the_graph_as_a_picture",
        COMMAND_LINE_EXPLAIN + "test_explain_a_config",
        COMMAND_LINE_EXPLAIN + "test_explain_a_factory",
        TIMES + "test_measured_seconds_are_those_of_the_layers",
        COMMAND_LINE_MODELS + "test_the_plan_is_the_one_that_runs",
    ),
    "P7": _row(
        "layers are balanced by time, size or a function",
        API_PARTITION + "test_every_balance_gives_the_same_numbers",
        API_PARTITION + "test_balance_by_size_and_by_a_function_cut_elsewhere",
        "fx/test_chains.py::test_balance_by_size_and_by_function",
        "fx/test_partition.py::test_balance_decides_what_weighs",
        "fx/test_cost.py::test_a_profile_turns_counts_into_seconds",
        TIMES + "test_the_plan_changes_behind_a_step_alone_and_says_so",
        gap="measured times decide how layers are packed into stages; layers are cut by FLOPs and bytes",
    ),
    "P8": _row(
        "numbers equal eager's for the same microbatches; draws are fixed by the seed",
        EQUALITY + "test_loss_gradients_and_buffers_equal_eager",
        EQUALITY + "test_five_steps_equal_eager",
        EQUALITY + "test_result_does_not_depend_on_the_number_of_workers",
        FUZZ + "test_random_modules_equal_eager",
        SHAPES + "test_a_graph_shape_equals_eager",
        ENGINE + "test_a_tied_parameter_has_one_gradient",
        ENGINE + "test_a_module_in_two_layers_has_one_gradient",
        ENGINE + "test_skip_connections",
        ENGINE + "test_values_with_several_readers",
        ENGINE + "test_layers_that_write_into_what_the_layer_before_made",
        ENGINE + "test_buffers_are_written_once_per_microbatch",
        WORKERS + "test_the_callers_autocast_holds_in_the_workers",
        ENGINE + "test_frozen_parameters_get_no_gradient",
        PIPE_TRAINING + "test_dropout_is_fixed_by_the_seed_for_any_rotation",
        PIPE_TRAINING + "test_recomputation_repeats_the_draws",
        API + "test_dropout_is_fixed_by_the_seed_for_any_rotation",
        "fx/test_generated_layers.py::test_outputs_are_new_containers_of_the_same_types",
        ZOO + "test_rows.py::test_equals_eager",
        ZOO + "test_found.py::test_sizes_that_data_determine_are_those_of_each_layer",
        ZOO + "test_found.py::test_attributes_that_other_code_sets_are_seen",
        ZOO + "test_found.py::test_a_module_as_an_argument",
        ZOO + "test_found.py::test_output_sizes_found_by_running",
        CHANGES_OF_MODES + "test_a_result_is_not_mistaken_for_the_argument",
        CHANGES_OF_MODES + "test_buffers_that_are_written_unseen",
        CHANGES_OF_MODES + "test_a_leaf_that_writes_its_weight_falls_back",
        CHANGES_OF_MODES + "test_weights_and_modes_set_around_a_call_are_seen",
        CHANGES_OF_MODES + "test_backward_hooks_of_what_would_be_looked_into",
        CHANGES_OF_MODES + "test_what_parts_of_an_uncut_model_do",
        HIDDEN + "test_a_parameter_that_a_forward_replaces_is_the_next_calls",
        HIDDEN_MODULES + "test_hidden_running_statistics_count_each_call_once",
        HIDDEN + "test_an_activation_in_an_attribute_reaches_the_loss",
        HIDDEN_ARGUMENTS + "test_an_argument_that_a_forward_fills_is_refused",
        HIDDEN_ARGUMENTS + "test_an_argument_that_a_forward_fills_is_filled",
        HIDDEN_ARGUMENTS + "test_weights_that_a_hook_uses_are_in_a_layer",
        HIDDEN_ARGUMENTS + "test_weights_of_other_modules_are_in_a_layer",
    ),
    "P9": _row(
        "keys of state_dict are the original's, and the original saves what was trained",
        API_PARTITION + "test_trained_weights_are_saved_by_the_original_model",
        API_PARTITION + "test_adapters_are_saved_as_adapters",
        FORWARDING + "test_the_original_can_be_copied_and_saved_while_it_is_wrapped",
        COMPILED_MODULES + "test_adapters_are_merged_after_synchronize",
        PIPE + "test_parameters_buffers_and_state_are_the_models",
    ),
    "P10": _row(
        "a meta model is planned without memory for its weights",
        API_PARTITION + "test_a_meta_model_is_planned_without_memory",
        "tools/test_forecast.py::test_host_memory_is_what_a_run_with_adamw_holds",
        TRACER_SURROUNDINGS + "test_a_meta_model_takes_no_memory",
        WORKERS + "test_weights_on_the_meta_device_are_refused_by_name",
    ),
}

WRAP_ROWS: dict[str, Row] = {
    "E1": _row(
        "the graph compiler is the preset: tried and said, required, or left out",
        WRAP_OPTIONS + "test_a_traceable_model_is_cut",
        WRAP_OPTIONS + "test_without_an_example_it_is_cut_at_the_first_call",
        WRAP_UNTRACEABLE + "test_a_model_that_can_not_be_traced",
        WRAP_UNTRACEABLE + "test_found_untraceable_at_the_first_call_it_is_wrapped_module_by_module",
    ),
    "E2": _row(
        "the recursion, rule by rule",
        WRAP_OPTIONS + "test_the_model_itself_skipped_is_given_back",
        WRAP + "test_skipped_modules_train_like_eager_on_the_host",
        WRAP + "test_a_sequential_is_a_pipeline_with_a_layer_per_child",
        WRAP + "test_a_module_with_parameters_of_its_own_is_one_layer",
        WRAP + "test_thresholds",
        WRAP + "test_small_parts_and_parts_with_the_batch_elsewhere_stay_in_one_piece",
        WRAP_OPTIONS + "test_outputs_of_list_elements_kept_apart",
        LATER + "test_what_is_handed_on_is_never_put_together",
        LATER + "test_any_code_around_gives_eagers_numbers",
        LATER + "test_options_of_single_elements",
        LATER + "test_kinds_of_what_the_code_around_sees",
        LATER + "test_skipped_elements_run_on_the_host",
        WRAP + "test_recursion_trains_like_eager",
        WRAP_UNTRACEABLE + "test_around_what_must_run_once_the_devices_run_the_rest",
        WRAP_UNTRACEABLE + "test_a_sequential_with_a_module_that_must_run_once",
        WRAP_UNTRACEABLE + "test_weights_that_a_forward_writes",
        PARTS_STATE + "test_what_must_run_once_runs_on_the_host",
        AUTO + "test_a_whole_model_with_state_runs_on_the_host",
        WRAP_UNTRACEABLE + "test_a_hugging_face_model",
    ),
    "E3": _row(
        "thresholds by default, and options of single modules",
        WRAP + "test_thresholds",
        WRAP_OPTIONS + "test_override_config",
        WRAP_OPTIONS + "test_options_without_effect_are_named",
        WRAP_OPTIONS + "test_skipped_modules_are_modules",
    ),
    "E4": _row(
        "a RoundPipe, else an AutoRoundPipe with forward, the optimizer's side, attributes and checkpoints",
        WRAP + "test_recursion_trains_like_eager",
        WRAP + "test_asynchronous_steps_train_on_weights_one_step_old",
        AUTO + "test_the_optimizers_side_has_all_parameters",
        AUTO + "test_loaded_weights_reach_parts_host_and_optimizer",
        AUTO + "test_checkpoints",
        FORWARDING + "test_utilities_of_modules",
        FORWARDING + "test_a_deep_copy_is_another_wrapper_of_another_model",
    ),
    "E5": _row(
        "its forward_backward is the loop over microbatches, with one warning",
        WRAP + "test_the_fallback_of_compile_trains_like_eager",
        WRAP + "test_outputs_and_several_losses",
        AUTO + "test_it_warns_once",
    ),
}

TABLE: dict[str, Row] = RUNTIME_ROWS | COMPILER_ROWS | WRAP_ROWS


def node_ids() -> list[str]:
    """The tests of all rows, each once, as pytest takes them."""
    return sorted({f"tests/{test}" for row in TABLE.values() for test in row.tests})


if __name__ == "__main__":
    print("\n".join(node_ids()))
