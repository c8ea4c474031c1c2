"""Timelines: every task once, lanes without overlap, links that take their time, files that Perfetto reads."""

import json
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch

import roundpipe
from roundpipe.core.errors import ClosedError, ConfigError
from roundpipe.core.schedule import Phase, Task, TaskKind
from tests.runtime.cases_timeline import (
    NUM_MICROBATCHES,
    PLAN,
    assert_lanes_do_not_overlap,
    both_rounds,
    computed,
    open_pipe,
    recorded,
    train,
)
from tests.runtime.models import Branches, batch, config, mlp, square_loss
from tests.runtime.schedule_rules import waits

pytestmark = pytest.mark.timeout(60)


LINK = 4e5
"""Bytes per second: slow enough that no copy of memory takes as long."""


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("workers", [1, 3])
def test_each_task_is_there_once(workers, is_async):
    timeline, schedule = recorded(workers=workers, is_async=is_async)
    assert_lanes_do_not_overlap(timeline)
    expected, recomputed, moved = Counter(), Counter(), Counter()
    for one in both_rounds(schedule):
        for worker in range(workers):
            for task in one.tasks(worker):
                job = one.job(task.job_index)
                device = f"cpu (worker {worker})"
                if task.kind is TaskKind.PREFETCH:
                    moved[device, "weights", f"weights of {job}", job.index] += 1
                elif task.kind is TaskKind.RELEASE and job.phase is not Phase.FORWARD:
                    moved[device, "gradients", f"gradients of {job}", job.index] += 1
                elif task.kind is TaskKind.RUN:
                    name = f"{job} m{task.microbatch}"
                    expected[device, name, job.index, task.microbatch] += 1
                    if job.phase is Phase.BACKWARD:
                        recomputed[device, f"{name} recompute", job.index, task.microbatch] += 1
    whole = [span for span in computed(timeline) if "piece" not in span.args]  # or the first piece
    found = Counter((s.device, s.name, s.args["job"], s.args["microbatch"]) for s in whole)
    assert found == expected + recomputed
    bulk = [span for span in timeline.spans if span.lane in ("weights", "gradients") and "piece" not in span.args]
    seen = Counter((s.device, s.lane, s.name, s.args["job"]) for s in bulk)
    assert not seen - moved
    for device, lane, name, _ in moved - seen:  # a backward may find the weights of its forward
        assert lane == "weights" and name.startswith("weights of B"), name
        assert any(name.partition("[")[2] == other.partition("[")[2] for where, _, other, _ in seen if where == device)


def test_layer_grain_computes_each_layer_of_a_backward_stage_by_itself():
    timeline, schedule = recorded(grain="layer")
    assert_lanes_do_not_overlap(timeline)
    backward = [job for one in both_rounds(schedule) for job in one.jobs if job.phase is Phase.BACKWARD]
    expected = Counter(
        (job.index, microbatch, (layer, layer + 1), part)
        for job in backward
        for layer in job.layers
        for microbatch in range(NUM_MICROBATCHES)
        for part in ("recompute", "backward")
    )
    parts = [span.args for span in computed(timeline) if span.args["part"] in ("recompute", "backward")]
    assert Counter((a["job"], a["microbatch"], tuple(a["layers"]), a["part"]) for a in parts) == expected


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_order_is_the_schedules(workers):
    timeline, schedule = recorded(workers=workers, speed=5e6)
    spans = {}
    for span in computed(timeline):
        key = Task(TaskKind.RUN, span.args["job"], span.args["microbatch"])
        spans.setdefault(key, {})["recompute" if span.args["part"] == "recompute" else "main"] = span
    weights = [span for span in timeline.spans if span.lane == "weights" and "piece" not in span.args]
    uploads = {span.args["job"]: span for span in weights}
    checked = 0
    for one in both_rounds(schedule):
        for worker in range(workers):
            for task in one.tasks(worker):
                if task.kind is not TaskKind.RUN:
                    continue
                own = spans[task]
                first = own.get("recompute", own["main"])
                for before in waits(one, task):
                    if before.kind is TaskKind.PREFETCH:
                        if before.job_index in uploads:  # a backward may find the weights of its forward
                            assert uploads[before.job_index].end_s <= first.start_s + 1e-9
                    elif before.job_index == task.job_index - 1:  # what it recomputes it has already
                        assert spans[before]["main"].end_s <= own["main"].start_s
                    else:
                        assert spans[before]["main"].end_s <= first.start_s
                    checked += 1
    assert checked > 2 * len(schedule.jobs) * NUM_MICROBATCHES


def test_computing_and_waiting_fill_a_workers_time():
    timeline, _ = recorded(workers=2, speed=1e5)
    for device in timeline.devices[:2]:
        busy = timeline.on(device, "compute")
        spans = sorted([*busy, *timeline.on(device, "waits")], key=lambda span: span.start_s)
        for one, following in pairwise(spans):
            assert abs(following.start_s - one.end_s) < 1e-6, (one, following)
    assert {span.name for span in timeline.spans if span.lane == "waits"} >= {"wait for weights", "overhead"}


def test_uploads_take_the_links_time():
    timeline, _ = recorded(workers=2, speed=LINK)
    for lane in ("weights", "gradients", "upload", "download"):
        spans = [span for span in timeline.spans if span.lane == lane]
        over_s = sorted(span.seconds - span.args["bytes"] / LINK for span in spans)
        assert over_s[0] > -1e-6, lane
        assert over_s[len(over_s) // 2] < 1e-3, lane  # a thread may be put aside between two lines


def test_bytes_are_those_of_the_weights():
    timeline, schedule = recorded()
    weight, bias = mlp(1).parameters()
    layer_bytes = -(-weight.nbytes // 64) * 64 + bias.nbytes  # one copy, in which each is aligned
    for span in timeline.spans:
        if span.lane == "weights":
            start, stop = span.args["layers"]
            assert span.args["bytes"] == (stop - start) * layer_bytes


def test_the_optimizers_thread_is_a_device():
    timeline, _ = recorded()
    assert timeline.devices[-1] == "optimizer"
    assert [span.name for span in timeline.on("optimizer", "update")] == ["optimizer step 2", "optimizer step 3"]
    taken = [span for span in timeline.on("optimizer", "hand-over") if span.name == "gradients to the optimizer"]
    model_bytes = sum(parameter.nbytes for parameter in mlp(6).parameters())
    assert sum(span.args["bytes"] for span in taken) == 2 * model_bytes


def test_a_step_that_waits_is_recorded_too():
    timeline, _ = recorded(is_async=False)
    assert [span.name for span in timeline.on("optimizer", "update")] == ["optimizer step 2", "optimizer step 3"]


def test_forward_alone_is_recorded():
    with open_pipe() as piped, torch.no_grad():
        with piped.record_timeline() as timeline:
            piped(batch(), roundpipe_run_config=config(2, plan=PLAN))
    assert {span.args["part"] for span in computed(timeline)} == {"forward"}
    assert len(computed(timeline)) == 3 * 2


def test_parts_of_a_model_that_is_not_traced_are_recorded():
    model = roundpipe.wrap_model_to_roundpipe(
        Branches(), use_sequential_preset=False, lower_threshold=1, devices=["cpu"]
    )
    with model, model.record_timeline() as timeline:
        with pytest.warns(UserWarning, match="nothing overlaps"):
            model.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))
    assert {"forward", "backward"} <= {span.args["part"] for span in computed(timeline)}


def test_an_error_inside_leaves_the_timeline_of_what_ran():
    def failing(output, label):
        raise ZeroDivisionError("in the loss")

    with open_pipe() as piped:
        with pytest.raises(ZeroDivisionError), piped.record_timeline() as timeline:
            train(piped, 1)
            train(piped, 1, loss_fn=failing)
        assert sum(span.args["part"] == "fused" for span in computed(timeline)) >= NUM_MICROBATCHES + 1
        assert_lanes_do_not_overlap(timeline)
        train(piped, 1)  # and the model goes on, unrecorded
        piped.synchronize()
        count = len(timeline.spans)
        with piped.record_timeline() as again:
            pass
        assert len(timeline.spans) == count and not computed(again)


def test_an_error_of_the_users_own_writes_the_file_too(tmp_path):
    with open_pipe() as piped, pytest.raises(KeyError), piped.record_timeline(tmp_path / "run.json"):
        train(piped, 1)
        raise KeyError("mine")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def test_one_timeline_at_a_time():
    with open_pipe() as piped:
        with piped.record_timeline():
            with pytest.raises(ConfigError, match="already"), piped.record_timeline():
                pass
        with piped.record_timeline():
            pass
    with pytest.raises(ClosedError), piped.record_timeline():
        pass


def test_the_model_may_be_closed_inside():
    piped = open_pipe()
    with piped.record_timeline() as timeline:
        train(piped, 1)
        piped.close()
    assert len(computed(timeline)) == 7 * NUM_MICROBATCHES


@pytest.mark.parametrize("name, match", [("run.txt", "json or .png"), ("none/run.json", "no folder")])
def test_a_file_that_cannot_be_written_is_refused_at_the_beginning(tmp_path, name, match):
    with open_pipe() as piped, pytest.raises(ConfigError, match=match), piped.record_timeline(tmp_path / name):
        raise AssertionError("not reached")


def test_a_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)

    class Refuses:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "matplotlib":
                raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    with open_pipe() as piped:
        with pytest.raises(ConfigError, match=r"roundpipe\[plot\]"), piped.record_timeline(tmp_path / "run.png"):
            pass
        with piped.record_timeline(tmp_path / "run.json"):
            train(piped, 1)


def test_recording_changes_no_numbers():
    results = []
    for records in (False, True):
        with open_pipe(workers=3) as piped:
            if records:
                with piped.record_timeline():
                    train(piped, 3)
            else:
                train(piped, 3)
            piped.synchronize()
            results.append([p.detach().clone() for p in piped.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
