"""What is promised for generation, and for quantized weights."""

from __future__ import annotations

from tests.contract.row import GENERATE, GENERATE_WEIGHTS, QUANTIZED, Row, row

INFERENCE_ROWS: dict[str, Row] = {
    "K3": row(
        "generate() and inference run on the devices, streamed, within the budget",
        GENERATE + "test_generates_what_the_plain_model_does_within_the_budget",
        GENERATE + "test_each_token_brings_no_more_than_what_has_no_room",
        GENERATE + "test_rich_results_and_callers_caches",
        GENERATE + "test_generates_with_the_latest_weights_between_steps",
        GENERATE + "test_any_code_that_reads_weights_gets_them",
        GENERATE + "test_loops_of_ones_own_and_what_is_refused",
        GENERATE_WEIGHTS + "test_weights_that_stay_cost_nothing_per_token",
        GENERATE_WEIGHTS + "test_weights_give_way_to_what_the_code_makes_later",
        GENERATE_WEIGHTS + "test_code_that_puts_tensors_where_weights_were",
        GENERATE_WEIGHTS + "test_layers_that_others_replaced_since_the_last_call",
        GENERATE_WEIGHTS + "test_after_an_interrupt_there_is_all_the_memory_and_training_goes_on",
        GENERATE_WEIGHTS + "test_caches_of_other_kinds",
        gap="no test runs it on a GPU",
    ),
    "K4": row(
        "quantized frozen weights are streamed packed",
        QUANTIZED + "test_quantized_weights_are_streamed_packed",
        QUANTIZED + "test_parameters_with_a_state_go_up_once_with_it_and_packed",
        QUANTIZED + "test_a_model_that_is_quantized_later_and_weights_left_where_they_are",
        gap="torchao's int4 needs a GPU, and is not tested; nor are bitsandbytes' int8 weights",
    ),
}
