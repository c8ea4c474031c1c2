"""What `wrap_model_to_roundpipe` promises."""

from __future__ import annotations

from tests.contract.row import AUTO, FORWARDING, LATER, PARTS_STATE, WRAP, WRAP_OPTIONS, WRAP_UNTRACEABLE, Row, row

WRAP_ROWS: dict[str, Row] = {
    "E1": row(
        "the graph compiler is the preset: tried and said, required, or left out",
        WRAP_OPTIONS + "test_a_traceable_model_is_cut",
        WRAP_OPTIONS + "test_without_an_example_it_is_cut_at_the_first_call",
        WRAP_UNTRACEABLE + "test_a_model_that_can_not_be_traced",
        WRAP_UNTRACEABLE + "test_found_untraceable_at_the_first_call_it_is_wrapped_module_by_module",
    ),
    "E2": row(
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
    "E3": row(
        "thresholds by default, and options of single modules",
        WRAP + "test_thresholds",
        WRAP_OPTIONS + "test_override_config",
        WRAP_OPTIONS + "test_options_without_effect_are_named",
        WRAP_OPTIONS + "test_skipped_modules_are_modules",
    ),
    "E4": row(
        "a RoundPipe, else an AutoRoundPipe with forward, the optimizer's side, attributes and checkpoints",
        WRAP + "test_recursion_trains_like_eager",
        WRAP + "test_asynchronous_steps_train_on_weights_one_step_old",
        AUTO + "test_the_optimizers_side_has_all_parameters",
        AUTO + "test_loaded_weights_reach_parts_host_and_optimizer",
        AUTO + "test_checkpoints",
        FORWARDING + "test_utilities_of_modules",
        FORWARDING + "test_a_deep_copy_is_another_wrapper_of_another_model",
    ),
    "E5": row(
        "its forward_backward is the loop over microbatches, with one warning",
        WRAP + "test_the_fallback_of_compile_trains_like_eager",
        WRAP + "test_outputs_and_several_losses",
        AUTO + "test_it_warns_once",
    ),
}
