"""Holds plans and schedules: what is accepted, the literal tables, every rule that `check` promises."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.core.errors import ScheduleError
from roundpipe.core.execute_plan import ExecutePlan, ModelExecutePlan
from roundpipe.core.schedule import Phase, Schedule, Task, TaskKind, make_schedule
from tests.runtime.schedule_rules import check, table, waits

PREFETCH, RUN, RELEASE = TaskKind.PREFETCH, TaskKind.RUN, TaskKind.RELEASE
PLAN = ExecutePlan([(0, 2), (2, 3)], (3, 4), [(2, 3), (0, 2)])

TABLE = """\
train: 5 jobs on 2 workers, 3 microbatches
F0[0:2] F1[2:3] U[3:4] B1[2:3] B2[0:2]
          0     1     2     3     4     5     6     7     8
worker 0  F0.0  F0.1  F0.2  U.0   U.1   U.2   B2.0  B2.1  B2.2
worker 1  .     F1.0  F1.1  F1.2  B1.0  B1.1  B1.2  .     ."""


@st.composite
def plans(draw: st.DrawFn) -> ExecutePlan:
    num_layers = draw(st.integers(1, 9))
    start = draw(st.integers(0, num_layers - 1))
    ranges = []
    for _ in range(2):
        inner = draw(st.sets(st.integers(1, start - 1))) if start > 1 else set()
        edges = [0, *sorted(inner), start] if start else []
        ranges.append(list(zip(edges, edges[1:], strict=False)))
    return ExecutePlan(ranges[0], (start, num_layers), ranges[1][::-1])


# ------------------------------------------------------------------------------------------- plans


def test_ranges_and_pairs_are_the_same_plan():
    assert ExecutePlan([range(2), range(2, 3)], range(3, 4), [range(2, 3), range(2)]) == PLAN
    assert ExecutePlan([[0, 2], [2, 3]], (3, 4), [(2, 3), (0, 2)]) == PLAN
    assert ModelExecutePlan is ExecutePlan
    assert hash(PLAN) == hash(ExecutePlan(PLAN.forward, PLAN.fused, PLAN.backward))


def test_the_fused_tail_may_be_the_first_backward_range():
    assert ExecutePlan([range(2), (2, 3)], backward=[(3, 4), (2, 3), (0, 2)]) == PLAN
    assert ExecutePlan(backward=[(0, 5)]) == ExecutePlan((), (0, 5), ())


def test_a_plan_without_fused_tail_covers_all_layers_twice():
    separate = ExecutePlan([(0, 4)], None, [(2, 4), (0, 2)])
    assert separate.fused is None and separate.num_layers == 4
    separate.validate(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(0, 0)],), r"forward range 0 is \(0, 0\)"),
        (([(0, 2), "ab"],), "forward range 1 is 'ab'"),
        (([(0, 2)], range(2, 6, 2)), "fused range is range"),
        (([(0, 2)], (2, 3), [(1.0, 2)]), "backward range 0"),
        (([(0, 2)], (2, 3), [(-1, 2)]), "backward range 0"),
        (((True, 2),), "forward range 0 is True"),
        ((range(4),), "give a sequence of ranges"),
        ((None,), "give a sequence of ranges"),
    ],
)
def test_what_is_no_range_is_named(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        ExecutePlan(*arguments)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ExecutePlan([(1, 3)], (3, 6), [(0, 3)]), r"forward range 0 is \(1, 3\) but must start at layer 0"),
        (ExecutePlan([(0, 2), (3, 4)], (4, 6), [(0, 4)]), r"forward range 1 .* must start at layer 2"),
        (ExecutePlan([(0, 2), (1, 4)], (4, 6), [(0, 4)]), r"forward range 1 .* must start at layer 2"),
        (ExecutePlan([(0, 2)], (3, 6), [(0, 3)]), r"fused range is \(3, 6\) but must start at layer 2"),
        (ExecutePlan([(0, 2)], (2, 5), [(0, 2)]), "fused range ends at layer 5, but the model has 6 layers"),
        (ExecutePlan([(0, 2)], (2, 7), [(0, 2)]), "fused range ends at layer 7, but the model has 6 layers"),
        (ExecutePlan([(0, 4)], (4, 6), [(0, 2), (2, 4)]), r"backward range 0 is \(0, 2\) but must stop at layer 4"),
        (ExecutePlan([(0, 4)], (4, 6), [(2, 4)]), r"leave out layers 0 to 1 .*\(2, 4\)"),
        (ExecutePlan([(0, 4)], (4, 6), []), "leave out layers 0 to 3 .*there are none"),
        (ExecutePlan([(0, 5)], None, [(0, 6)]), "last forward range ends at layer 5"),
        (ExecutePlan([(0, 6)], None, [(0, 5)]), r"backward range 0 is \(0, 5\) but must stop at layer 6"),
    ],
)
def test_a_plan_that_does_not_cover_the_model_names_the_range(plan, message):
    with pytest.raises(ScheduleError, match=message):
        plan.validate(6)


# --------------------------------------------------------------------------------------- schedules


def test_the_table_is_the_one_in_the_docstring():
    assert table(make_schedule(PLAN, 2, 3)) == TABLE
    docstring = inspect.getdoc(make_schedule)
    assert docstring is not None
    assert textwrap.indent(TABLE, "    ") in docstring


def test_the_rotation_goes_on_over_rounds():
    first = make_schedule(PLAN, 2, 3)
    second = make_schedule(PLAN, 2, 3, first_job=first.next_job)
    assert [job.index for job in second.jobs] == [5, 6, 7, 8, 9]
    assert [job.worker for job in second.jobs] == [1, 0, 1, 0, 1]
    assert [job.name for job in second.jobs] == ["F0", "F1", "U", "B1", "B2"]
    check(second)


def test_tasks_of_a_worker():
    tasks = make_schedule(PLAN, 2, 2).tasks(0)
    assert tasks == (
        Task(PREFETCH, 0),
        Task(PREFETCH, 2),
        Task(RUN, 0, 0),
        Task(RUN, 0, 1),
        Task(RELEASE, 0),
        Task(PREFETCH, 4),
        Task(RUN, 2, 0),
        Task(RUN, 2, 1),
        Task(RELEASE, 2),
        Task(RUN, 4, 0),
        Task(RUN, 4, 1),
        Task(RELEASE, 4),
    )


def test_waits():
    schedule = make_schedule(PLAN, 2, 2)
    expected = {
        Task(PREFETCH, 2): (),
        Task(PREFETCH, 4): (Task(RELEASE, 0),),
        Task(RUN, 0, 0): (Task(PREFETCH, 0),),
        Task(RUN, 1, 1): (Task(RUN, 1, 0), Task(RUN, 0, 1)),
        Task(RUN, 2, 0): (Task(PREFETCH, 2), Task(RUN, 0, 1), Task(RUN, 1, 0)),
        Task(RELEASE, 3): (Task(RUN, 3, 1),),
    }
    assert {task: waits(schedule, task) for task in expected} == expected


@pytest.mark.parametrize(
    ("kind", "phase", "ranges"),
    [
        ("forward", Phase.FORWARD, [(0, 2), (2, 3), (3, 4)]),
        ("backward", Phase.BACKWARD, [(3, 4), (2, 3), (0, 2)]),
    ],
)
def test_forward_and_backward_alone_visit_all_layers(kind, phase, ranges):
    schedule = make_schedule(PLAN, 2, 3, kind=kind)
    assert [(job.start, job.stop) for job in schedule.jobs] == ranges
    assert {job.phase for job in schedule.jobs} == {phase}
    check(schedule)


@settings(max_examples=150, deadline=None)
@given(
    plan=plans(),
    num_workers=st.integers(1, 5),
    num_microbatches=st.integers(1, 5),
    first_job=st.integers(0, 7),
    kind=st.sampled_from(["train", "forward", "backward"]),
)
def test_every_schedule_made_is_sound(plan, num_workers, num_microbatches, first_job, kind):
    schedule = make_schedule(plan, num_workers, num_microbatches, first_job=first_job, kind=kind)
    check(schedule)
    runs = [task for worker in range(num_workers) for task in schedule.tasks(worker) if task.kind is RUN]
    assert len(runs) == len(set(runs)) == len(schedule.jobs) * num_microbatches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"first_job": -1}, "first_job=-1"),
        ({"kind": "test"}, "'train', 'forward' and 'backward'"),
        ({"plan": ExecutePlan()}, "at least one layer"),
        ({"plan": ExecutePlan([(0, 2)], None, [(1, 2), (0, 1)])}, "no fused range"),
        ({"plan": ExecutePlan([(0, 2)], (2, 3), [])}, "leave out layers 0 to 1"),
    ],
)
def test_misuse_is_told(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(**{"plan": PLAN, "num_workers": 2, "num_microbatches": 2} | arguments)


# ------------------------------------------------------------------------------------------ checks


def edit(worker: int, *, drop: Task | None = None, add: tuple[int, Task] | None = None) -> Schedule:
    """A sound schedule with one task taken away from, or put into, a worker's list."""
    schedule = make_schedule(PLAN, 2, 3)
    lists = [list(tasks) for tasks in schedule.worker_tasks]
    if drop is not None:
        lists[worker].remove(drop)
    if add is not None:
        lists[worker].insert(*add)
    return replace(schedule, worker_tasks=tuple(tuple(tasks) for tasks in lists))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (edit(0, drop=Task(RUN, 2, 1)), "deadlock"),
        (edit(0, drop=Task(RUN, 4, 2)), "release job 4, which waits for run job 4 microbatch 2"),
        (edit(0, drop=Task(PREFETCH, 0)), "waits for prefetch job 0"),
        (edit(0, drop=Task(RELEASE, 4)), "worker 0 never comes to release job 4"),
        (edit(0, drop=Task(RELEASE, 0)), "deadlock: worker 0 stands at prefetch job 4"),
        (edit(0, add=(5, Task(RUN, 0, 2))), "twice"),
        (edit(1, add=(0, Task(PREFETCH, 2))), "not its own"),
        (edit(0, drop=Task(PREFETCH, 4)), "waits for prefetch job 4"),
        (edit(0, add=(5, Task(RUN, 0, 3))), "but there are 3 microbatches"),
        (edit(0, drop=Task(RUN, 0, 0), add=(4, Task(RUN, 0, 0))), "deadlock"),
    ],
)
def test_check_finds_broken_lists(broken, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        check(broken)
    assert "\nworker 0" in str(caught.value), "the schedule is printed"


def test_check_finds_a_third_job_on_a_worker():
    schedule = make_schedule(PLAN, 1, 2)
    tasks = list(schedule.tasks(0))
    tasks.insert(2, tasks.pop(tasks.index(Task(PREFETCH, 2))))
    broken = replace(schedule, worker_tasks=(tuple(tasks),))
    with pytest.raises(ScheduleError, match="deadlock: worker 0 stands at prefetch job 2"):
        check(broken)


def test_the_error_shows_the_schedule_up_to_the_bad_step():
    with pytest.raises(ScheduleError) as caught:
        check(edit(0, drop=Task(RUN, 2, 1)))
    assert str(caught.value).splitlines()[1:] == [
        "train: 5 jobs on 2 workers, 3 microbatches",
        "F0[0:2] F1[2:3] U[3:4] B1[2:3] B2[0:2]",
        "          0     1     2     3     4",
        "worker 0  F0.0  F0.1  F0.2  U.0   .",
        "worker 1  .     F1.0  F1.1  F1.2  B1.0",
    ]


def test_check_finds_wrong_jobs():
    schedule = make_schedule(PLAN, 2, 3)
    without_layer = (replace(schedule.jobs[0], stop=1), *schedule.jobs[1:])
    with pytest.raises(ScheduleError, match=r"forward visits layers \[0, 2, 3\]"):
        check(replace(schedule, jobs=without_layer))
    backward_twice = (*schedule.jobs[:4], replace(schedule.jobs[4], stop=3))
    with pytest.raises(ScheduleError, match=r"backward visits layers \[3, 2, 2, 1, 0\]"):
        check(replace(schedule, jobs=backward_twice))
    moved = (replace(schedule.jobs[0], worker=1), *schedule.jobs[1:])
    with pytest.raises(ScheduleError, match="must have index 0 on worker 0"):
        check(replace(schedule, jobs=moved))
