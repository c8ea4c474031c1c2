"""Images of other sizes in each batch, with batches that are accumulated: each would be another trace."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from tests.integrations.trainers import train_both
from tests.test_images_of_other_sizes import batch_of_pixtral, pixtral

SIDES = [(4, 6), (3, 5), (2, 3), (4, 5), (5, 2), (3, 3), (6, 2), (2, 5)]


def collated(samples: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    return batch_of_pixtral(samples)


def test_accumulated_batches_with_images_of_other_sizes(tmp_path: Path) -> None:
    options = {"train_dataset": SIDES, "eval_dataset": SIDES[:2], "data_collator": collated}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, ours = train_both(
            pixtral,
            tmp_path,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=1,
            remove_unused_columns=False,
            **options,
        )
    said = [str(warning.message) for warning in caught]
    assert sum("where no trace serves a batch" in text for text in said) == 1
    assert not any("may differ from those of the batch" in text for text in said)
    assert ours.pipe.trace_count <= 4
