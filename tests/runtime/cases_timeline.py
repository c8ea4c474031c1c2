"""What the tests beside it share."""

from itertools import pairwise

import torch

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.schedule import make_schedule
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import batch, config, mlp, square_loss

PLAN = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])


NUM_MICROBATCHES = 3


def open_pipe(workers=2, speed=None, depth=6):
    torch.manual_seed(0)
    entry = Device("cpu", upload_bytes_per_s=speed, download_bytes_per_s=speed)
    return roundpipe.RoundPipe(mlp(depth), devices=[entry] * workers, name="net")


def train(piped, rounds=2, grain=None, is_async=True, loss_fn=square_loss):
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
    for _ in range(rounds):
        piped.forward_backward(
            (batch(),), loss_fn=loss_fn, run_config=config(NUM_MICROBATCHES, grain, PLAN, preserve_rng_state=False)
        )
        piped.step(optimizer.step, is_async)


def recorded(**settings):
    """A timeline of two rounds, after one that warms up; and the schedule of the first of them."""
    run = {name: settings.pop(name) for name in ("grain", "is_async") if name in settings}
    with open_pipe(**settings) as piped:
        train(piped, 1, **run)
        piped.synchronize()
        engine = piped._session.engine  # what turn the workers are at shows in the timeline alone, which is under test
        schedule = make_schedule(PLAN, len(engine.backends), NUM_MICROBATCHES, first_job=engine.next_job)
        with piped.record_timeline() as timeline:
            train(piped, 2, **run)
    return timeline, schedule


def assert_lanes_do_not_overlap(timeline):
    assert timeline.spans
    for device in timeline.devices:
        for lane in timeline.lanes(device):
            for one, following in pairwise(timeline.on(device, lane)):
                assert one.end_s <= following.start_s + 1e-9, (device, lane, one, following)


def both_rounds(schedule):
    again = make_schedule(PLAN, schedule.num_workers, NUM_MICROBATCHES, first_job=schedule.next_job)
    return [schedule, again]


def computed(timeline):
    return [span for span in timeline.spans if span.lane == "compute"]
