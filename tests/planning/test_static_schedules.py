"""Holds static schedules against their closed forms, their literal tables, and memory worked out by hand."""

from __future__ import annotations

import pytest

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.planning.planner import plan
from roundpipe.planning.stage_costs import plan_seconds
from roundpipe.planning.static_schedules import HostNetwork, simulate_static, static_actions

EVEN = LayerCost(
    forward_s=1.0,
    backward_s=2.0,
    num_parameters=10,
    weight_bytes=20,
    gradient_bytes=20,
    activation_bytes=100,
    carry_bytes=1,
)


def written(lines: list[str]) -> list[list[tuple[str, int, int]]]:
    return [[(word[0], int(word[1]), int(word[3])) for word in line.split()] for line in lines]


def test_gpipe_as_a_table():
    assert static_actions("gpipe", 2, 3) == written(
        [
            "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2",
            "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2",
        ]
    )


def test_one_forward_one_backward_as_a_table():
    assert static_actions("1f1b", 3, 4) == written(
        [
            "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
            "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
            "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
        ]
    )


def test_interleaved_as_a_table():
    assert static_actions("interleaved", 2, 2, 2) == written(
        [
            "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
        ]
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("num_workers", "num_microbatches"), [(1, 1), (2, 3), (4, 8), (8, 9), (8, 64), (16, 16)])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_idle_share_of_equal_stages(kind, num_workers, num_microbatches, recompute):
    machine = {"num_workers": num_workers, "num_microbatches": num_microbatches}
    found = simulate_static(kind, [EVEN] * (2 * num_workers), **machine, recompute=recompute)
    expected = (num_workers - 1) / (num_microbatches + num_workers - 1)
    assert all(100 * abs(idle - expected) < 0.02 for idle in found.idle)
    work_s = (8.0 if recompute else 6.0) * num_microbatches
    assert found.seconds_per_step == pytest.approx(work_s / (1 - expected))


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
@pytest.mark.parametrize(("num_workers", "num_microbatches"), [(1, 2), (2, 2), (4, 8), (8, 8), (8, 64)])
def test_idle_share_of_interleaved_chunks(num_workers, num_microbatches, num_chunks):
    found = simulate_static(
        "interleaved",
        [EVEN] * (num_workers * num_chunks),
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
    )
    expected = (num_workers - 1) / (num_chunks * num_microbatches + num_workers - 1)
    assert all(100 * abs(idle - expected) < 0.02 for idle in found.idle)


def test_memory_is_the_part_of_the_model_and_what_is_in_flight():
    machine = {"num_workers": 3, "num_microbatches": 5}
    costs = [EVEN] * 6
    own_bytes, boundary = 2 * (20 + 20 + 10 * 12), 4
    for kind, in_flight in (("gpipe", (5, 5, 5)), ("1f1b", (3, 2, 1))):
        found = simulate_static(kind, costs, **machine, state_bytes_per_parameter=12)
        assert found.peak_bytes == tuple(own_bytes + count * 200 + boundary for count in in_flight)
        kept = simulate_static(kind, costs, **machine, recompute=True, state_bytes_per_parameter=12)
        assert kept.peak_bytes == tuple(own_bytes + count * 1 + 200 + boundary for count in in_flight)


def test_slow_links_lengthen_the_round():
    machine = {"num_workers": 4, "num_microbatches": 4}
    free = simulate_static("1f1b", [EVEN] * 4, **machine)
    slow = simulate_static("1f1b", [EVEN] * 4, **machine, link_bytes_per_s=2.0)
    # The first microbatch's way to the last stage and the last one's way back: three hops of a second each.
    assert slow.seconds_per_step >= free.seconds_per_step + 6.0 - 1e-9


@pytest.mark.parametrize(("kind", "seconds"), [("gpipe", 23.0), ("1f1b", 20.0)])
def test_a_device_computes_nothing_while_it_receives_from_a_network(kind, seconds):
    """Two devices, four microbatches, a second for each hop; worked out by hand."""
    machine = {"num_workers": 2, "num_microbatches": 4, "network": HostNetwork(1.0, 1)}
    assert simulate_static(kind, [EVEN] * 2, **machine).seconds_per_step == seconds


def test_a_network_brings_one_value_after_the_other():
    machine = {"num_workers": 4, "num_microbatches": 16, "num_chunks": 2}
    slow = simulate_static("interleaved", [EVEN] * 8, **machine, network=HostNetwork(0.01, 1))
    # devices inside the chain receive for both of their stages, forwards and backwards
    assert 4 * 16 * 100.0 <= slow.seconds_per_step <= 1.5 * 4 * 16 * 100.0


@pytest.mark.parametrize(
    ("kind", "num_chunks", "num_received"), [("gpipe", 1, 16), ("1f1b", 1, 16), ("interleaved", 2, 48)]
)
def test_only_cuts_between_hosts_take_the_network(kind, num_chunks, num_received):
    """Two hosts of two devices: the network is as busy as its busiest host, however many devices there are."""
    machine = {"num_workers": 4, "num_microbatches": 16, "num_chunks": num_chunks, "link_bytes_per_s": 1e6}
    slow = simulate_static(kind, [EVEN] * 8, **machine, network=HostNetwork(0.01, 2)).seconds_per_step
    assert num_received * 100.0 <= slow <= 2.2 * num_received * 100.0
    alone = simulate_static(kind, [EVEN] * 8, **machine, network=HostNetwork(0.01, 4)).seconds_per_step
    assert alone == pytest.approx(simulate_static(kind, [EVEN] * 8, **machine).seconds_per_step, rel=1e-3)


def test_rotation_wins_over_what_the_microbatches_allow_a_static_schedule():
    machine = {"num_workers": 8, "num_microbatches": 9}
    costs = [EVEN] * 40
    rotation_s = plan_seconds(plan(costs, **machine), costs, **machine)
    replicated_s = plan_seconds(plan(costs, replicate=True, **machine), costs, **machine)
    static_s = simulate_static("1f1b", costs, **machine).seconds_per_step
    assert max(rotation_s, replicated_s) < static_s


def test_misuse_is_told():
    with pytest.raises(ConfigError, match="needs a multiple of the number of devices"):
        static_actions("interleaved", 4, 6, 2)
    with pytest.raises(ConfigError, match="only the interleaved"):
        static_actions("gpipe", 4, 6, 2)
    with pytest.raises(ConfigError, match="at least 1 each"):
        static_actions("gpipe", 0, 6)
    with pytest.raises(ConfigError, match="3 layers can't be 4 stages"):
        simulate_static("gpipe", [EVEN] * 3, num_workers=4, num_microbatches=4)
