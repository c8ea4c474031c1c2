"""What the tests beside it share."""

import dataclasses

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from roundpipe.runtime.config import RoundPipeRunConfig, resolve

CHUNK_0, CHUNK_1 = TensorChunkSpec(0), TensorChunkSpec(1)


@dataclasses.dataclass
class Record:
    values: torch.Tensor
    name: str = "record"


def config(num_microbatch=4, **fields):
    return resolve(RoundPipeRunConfig(num_microbatch=num_microbatch, **fields), None, num_devices=1)


def rows(count, *shape):
    return torch.arange(count * 3.0).view(count, 3) if not shape else torch.randn(count, *shape)


def sizes(values):
    return [len(value) for value in values]
