"""What is promised for training on several ranks."""

from __future__ import annotations

from tests.contract.row import Row, row

CLASSIC = "wrappers/test_classic.py::"
RANKS = "distributed/test_data_parallel.py::"
SHARDED = "distributed/test_sharded_optimizer.py::"
STAGES = "distributed/test_schedules.py::"
PARTITION = "distributed/test_partition.py::"

DISTRIBUTED_ROWS: dict[str, Row] = {
    "J1": row(
        "`Pipe` is the classic interface on this runtime, with balances by size and by time",
        CLASSIC + "test_training_equals_eager",
        CLASSIC + "test_chunks_and_balance_are_what_runs",
        CLASSIC + "test_to_changes_the_dtype",
        CLASSIC + "test_a_copy_has_the_same_stages",
        CLASSIC + "test_bad_arguments_are_refused",
        CLASSIC + "test_without_balance_there_is_a_stage_per_device",
        CLASSIC + "test_balance_by_size",
        CLASSIC + "test_balance_by_time_measures_copies",
    ),
    "J2": row(
        "stages of a compiled model train under torch's own pipeline schedules as in one process",
        STAGES + "test_every_schedule_is_run",
        STAGES + "test_stages_train_as_one_process",
        STAGES + "test_torch_has_what_a_stage_overrides",
        PARTITION + "test_stages_one_after_the_other_are_the_model",
        PARTITION + "test_a_compiled_model_has_stages_of_its_own_layers",
        PARTITION + "test_only_a_stage_s_own_weights_are_read",
        PARTITION + "test_what_can_not_be_is_refused",
        gap="NCCL is not tested",
    ),
    "J3": row(
        "ranks that average gradients before each update end where one process ends, and do so while the backward runs",
        RANKS + "test_training_is_that_of_one_process",
        RANKS + "test_gradients_are_averaged_while_the_backward_runs",
        RANKS + "test_an_overflow_on_one_rank_skips_the_update_of_all",
        RANKS + "test_wrong_use_is_refused_on_all_ranks",
        RANKS + "test_what_is_no_group_is_refused",
        "distributed/test_failures.py::test_a_killed_rank_ends_the_other_and_a_restart_goes_on",
        RANKS + "test_torch_has_what_ranks_are_connected_by",
    ),
    "J4": row(
        "with `shard_optimizer=True` each rank has and updates its part of the optimizer's side",
        RANKS + "test_training_is_that_of_one_process",
        SHARDED + "test_checkpoints_go_from_two_ranks_to_one_process_and_back",
        SHARDED + "test_host_memory_falls_to_the_share",
        SHARDED + "test_an_overflow_in_one_shard_skips_the_update_of_all",
        SHARDED + "test_wrong_use_of_shards_is_refused",
        SHARDED + "test_shards_need_ranks",
        SHARDED + "test_clipping_in_one_process_is_torchs",
    ),
    "J5": row(
        "`plan --hosts N --network RATE`: step time, what the network adds, host memory, and the fastest way",
        "tools/test_hosts.py::test_ways_to_use_more_hosts",
        "tools/test_hosts.py::test_ways_in_words",
        "planning/test_static_schedules.py::test_a_device_computes_nothing_while_it_receives_from_a_network",
        "distributed/test_throttled.py::test_a_throttled_link_takes_the_time_that_is_planned",
    ),
}
