"""Stages of a model for `torch.distributed.pipelining`: torch's schedules run them, on one rank each or several.

    stage = pipeline_stage(model, rank, world_size, device, example_kwargs=batch)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(**batch)        # on the last rank: schedule.step(target=labels, losses=losses)
    sum_tied_gradients(stage)
    optimizer.step()

May use: fx and wrappers, and what is below them. Importing roundpipe does not import it.
Start reading: `partition`, then `module` and `stage`.
"""

from roundpipe.distributed.gradients import sum_tied_gradients
from roundpipe.distributed.module import StageModule, model_outputs
from roundpipe.distributed.partition import partition_stages
from roundpipe.distributed.stage import ModelStage, pipeline_stage
from roundpipe.distributed.state import StageState
from roundpipe.distributed.weights import parameters_on_meta, save_stages

__all__ = [
    "ModelStage",
    "StageModule",
    "StageState",
    "model_outputs",
    "parameters_on_meta",
    "partition_stages",
    "pipeline_stage",
    "save_stages",
    "sum_tied_gradients",
]
