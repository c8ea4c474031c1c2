"""Which values each job takes, gives and drops: literal tables."""

import pytest

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerSpec
from roundpipe.core.schedule import make_schedule
from roundpipe.runtime.engine.spec import Segment, flow, names_with_gradient, reads_of_backward

SPECS = [
    LayerSpec("0", reads=("x",), makes=("a", "mask")),
    LayerSpec("1", reads=("a",), makes=("b",)),
    LayerSpec("2", reads=("b", "mask"), makes=("c",)),
    LayerSpec("3", reads=("c", "a", "mask"), makes=("y",)),
]
PLAN = ExecutePlan([(0, 1), (1, 3)], (3, 4), [(1, 3), (0, 1)])


def rows(kind, grain, kept=(), exit_reads=("y",)):
    schedule = make_schedule(PLAN, 2, 3, kind=kind)
    flows = flow(schedule, SPECS, grain=grain, exit_reads=exit_reads, stay=kept)
    return [
        (str(job), [set(one.takes) for one in each.segments], set(each.gives), set(each.drops), each.last_source)
        for job, each in zip(schedule.jobs, flows, strict=True)
    ]


def test_training_by_stage():
    assert rows("train", "stage") == [
        ("F0[0:1]", [{"x"}], {"a", "mask"}, set(), None),
        ("F1[1:3]", [{"a", "mask"}], {"c"}, set(), 0),
        ("U[3:4]", [{"c", "a", "mask"}], set(), {"c"}, 1),
        ("B1[1:3]", [{"a", "mask"}], set(), {"a", "mask"}, 1),
        ("B2[0:1]", [{"x"}], set(), {"x"}, 0),
    ]


def test_training_by_layer_keeps_what_lies_within_a_stage():
    assert rows("train", "layer") == [
        ("F0[0:1]", [{"x"}], {"a", "mask"}, set(), None),
        ("F1[1:3]", [{"a", "mask"}], {"b", "c"}, set(), 0),
        ("U[3:4]", [{"c", "a", "mask"}], set(), {"c"}, 1),
        ("B1[1:3]", [{"b", "mask"}, {"a"}], set(), {"a", "b", "mask"}, 1),
        ("B2[0:1]", [{"x"}], set(), {"x"}, 0),
    ]


def test_a_backward_job_waits_for_the_forward_of_its_layers():
    """Its recomputation needs the buffers that the forward saw, even if it takes none of its values."""
    assert [row[4] for row in rows("train", "stage")][-2:] == [1, 0]


def test_forward_alone_keeps_the_outputs_only():
    assert rows("forward", "stage") == [
        ("F0[0:1]", [{"x"}], {"a", "mask"}, {"x"}, None),
        ("F1[1:3]", [{"a", "mask"}], {"c"}, set(), 0),
        ("F2[3:4]", [{"c", "a", "mask"}], {"y"}, {"a", "c", "mask"}, 1),
    ]


@pytest.mark.parametrize("grain, reads", [("stage", {"x", "a", "mask", "c"}), ("layer", {"x", "a", "mask", "b", "c"})])
def test_forward_before_a_backward_keeps_what_it_reads(grain, reads):
    schedule = make_schedule(PLAN, 2, 3, kind="backward")
    assert reads_of_backward(schedule, SPECS, grain) == reads
    kept = rows("forward", grain, kept=reads)
    assert set().union(*(row[2] for row in kept)) == (reads | {"y"}) - {"x"}
    assert all(not row[3] for row in kept), "nothing of it is dropped"


def test_backward_alone():
    assert rows("backward", "stage") == [
        ("B1[3:4]", [{"c", "a", "mask"}], set(), {"c"}, None),
        ("B2[1:3]", [{"a", "mask"}], set(), {"a", "mask"}, None),
        ("B3[0:1]", [{"x"}], set(), {"x"}, None),
    ]


def test_the_fused_stage_takes_what_the_outputs_read():
    (*_, fused, _, _) = rows("train", "stage", exit_reads=("y", "b", "x"))
    assert fused[1] == [{"c", "a", "mask", "b", "x"}]


def test_an_argument_that_is_an_output_stays():
    table = rows("forward", "stage", exit_reads=("y", "x"))
    assert all("x" not in row[3] for row in table)


def test_segments_make_what_their_layers_make():
    schedule = make_schedule(ExecutePlan([], (0, 4), []), 1, 1)
    (only,) = flow(schedule, SPECS, grain="stage", exit_reads=("y",))
    assert only.segments == (Segment((0, 1, 2, 3), ("x",), ("a", "mask", "b", "c", "y")),)


def test_names_with_gradient():
    frozen = [False] * 4
    assert names_with_gradient(SPECS, frozen, ()) == frozenset()
    assert names_with_gradient(SPECS, [False, True, False, False], ()) == {"b", "c", "y"}
    assert names_with_gradient(SPECS, frozen, ["x"]) == {"x", "a", "mask", "b", "c", "y"}
    chosen = [LayerSpec("0", reads=("x",), makes=("a", "mask"), differentiable=frozenset({"a"})), *SPECS[1:]]
    assert names_with_gradient(chosen, [True, *frozen[1:]], ()) == {"a", "b", "c", "y"}
