"""Train a small residual network on scikit-learn's handwritten digits.

Skip connections that reach over several stages, BatchNorm and a model written as plain Python: nothing in
`DigitsNet` knows about roundpipe.

    python examples/train_vision.py
    python examples/train_vision.py --devices cpu,cpu,cpu --microbatches 6 --epochs 10
    python examples/train_vision.py --check --epochs 1
"""

from __future__ import annotations

import argparse
import time

import command_line
import torch
import torch.nn.functional as F
from against_plain import agrees
from command_line import Parser, Refused, parse_devices, recorded
from torch import nn
from tqdm import tqdm

import roundpipe
from roundpipe.reports.tables import format_bytes, summary_table


class Block(nn.Module):
    """Two convolutions with BatchNorm around a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(images + self.norm2(self.conv2(hidden)))


class DigitsNet(nn.Module):
    """A U-shaped classifier: the full-size features skip over the half-size ones to the head.

    Images `[B, 1, 8, 8]` in, logits `[B, 10]` out.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.fine = nn.ModuleList(Block(channels) for _ in range(2))
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.coarse = nn.ModuleList(Block(2 * channels) for _ in range(2))
        self.head = nn.Linear(3 * channels, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        fine = self.stem(images)
        for block in self.fine:
            fine = block(fine)
        coarse = self.down(fine)
        for block in self.coarse:
            coarse = block(coarse)
        return self.head(torch.cat([fine.mean((2, 3)), coarse.mean((2, 3))], dim=1))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = Parser(__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="passes over all images")
    parser.add_argument("--batch", type=int, default=96, help="images per step")
    parser.add_argument("--channels", type=int, default=16, help="of the stem and of the fine blocks")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    options = parser.parse_args(argv)
    parser.require_positive(options, "epochs", "batch", "microbatches", "channels")
    return options


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """All images `[N, 1, 8, 8]` in 0 .. 1 and their classes `[N]`, in a fixed random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Refused("the images come with the package scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(digits.target)[order]


def run(argv: list[str] | None) -> int:
    """Trains and evaluates; the exit code."""
    options = parse_arguments(argv)
    torch.manual_seed(options.seed)
    devices = parse_devices(options.devices)
    images, classes = load_images()
    num_test = len(images) // 5
    test_images, test_classes = images[:num_test], classes[:num_test]
    images, classes = images[num_test:], classes[num_test:]
    if options.batch > len(images):
        raise Refused(f"--batch {options.batch} is more than the {len(images)} training images")

    net, config = DigitsNet(options.channels), roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches)
    with roundpipe.compile(net, devices=devices, model_run_config=config) as model:
        if options.check:
            pieces = zip(images.split(options.batch), classes.split(options.batch), strict=True)
            data = (({"images": piece}, labels) for piece, labels in pieces)
            if not agrees(model, net, data, F.cross_entropy, options.lr):
                return 1
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=options.lr)
        started = time.perf_counter()
        num_steps = len(images) // options.batch
        for epoch in range(options.epochs):
            bar = tqdm(torch.randperm(len(images)).split(options.batch)[:num_steps], desc=f"epoch {epoch + 1}")
            timeline = options.timeline if epoch == 0 else None
            for rows in recorded(bar, model, timeline, num_steps):
                loss = model.forward_backward(
                    input_args=(images[rows],), label=classes[rows], loss_fn=F.cross_entropy, loss_reduction="mean"
                )
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                bar.set_postfix(loss=f"{float(loss):.3f}")
        model.synchronize()
        seconds = time.perf_counter() - started

        print(model.partition_table(), end="\n\n")
        model.eval()
        with torch.no_grad():
            predicted = model(test_images).argmax(1)
        accuracy = float((predicted == test_classes).float().mean())
        summary = {
            "test accuracy": f"{accuracy:.1%} of {num_test} images",
            "images per second": f"{options.epochs * num_steps * options.batch / seconds:.0f}",
            "peak device memory": format_bytes(model.peak_device_bytes()),
        }
    print(summary_table(summary))
    return 0


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    return command_line.main("train_vision.py", run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
