"""Batches whose tensors belong together in another way than by their first dimension, such as images and texts."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients

IMAGE, PATCHES, WIDTH, VOCABULARY = 7, 2, 8, 11


class Vision(nn.Module):
    """Two features of each image."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(3, WIDTH, 2, stride=2)

    def forward(self, images):
        return self.convolution(images).transpose(1, 2)


def checked_by_torch(count, features):
    # documented, in spite of its name
    torch._check((count * WIDTH == features.numel()).item(), lambda: "images and their places differ")


def checked_by_code(count, features):
    if count * WIDTH != features.numel():
        raise ValueError("images and their places differ")


def unchecked(count, features):
    pass


class Captioner(nn.Module):
    """Takes images where texts have places for them, one image after the other."""

    def __init__(self, check):
        super().__init__()
        self.embedding, self.vision = nn.Embedding(VOCABULARY, WIDTH), Vision()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.check = check

    def forward(self, ids, images, labels=None):
        features, places = self.vision(images), ids == IMAGE
        self.check(places.sum(), features)
        hidden = self.embedding(ids).masked_scatter(places[..., None], features)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def model(check=checked_by_code):
    torch.manual_seed(0)
    return Captioner(check).double()


def batch(counts, length=9, seed=1):
    """Texts with places for so many images, and these images."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(IMAGE, (len(counts), length), generator=generator)
    for row, count in zip(ids, counts, strict=True):
        row[: count * PATCHES] = IMAGE
    images = torch.randn(sum(counts), 3, 2 * PATCHES, generator=generator).double()
    return {"ids": ids, "images": images, "labels": torch.randint(VOCABULARY, ids.shape, generator=generator)}


def train(piped, given, numbers=None, **options):
    """The mean loss; ``numbers`` get that of the microbatches, once for each."""

    def loss_of(outputs, _):
        if numbers is not None:
            numbers.append(roundpipe.num_microbatches())
        return outputs["loss"]

    return piped.forward_backward(input_kwargs=given, loss_fn=loss_of, loss_reduction="mean", **options)


def assert_eagers(piped, own, given, number):
    """A call has the loss and the gradients of plain PyTorch, in so many microbatches."""
    reference = copy.deepcopy(own)
    reference.zero_grad()
    expected = reference(**given)["loss"]
    expected.backward()
    numbers = []
    torch.testing.assert_close(train(piped, given, numbers), expected.detach(), rtol=0, atol=1e-10)
    assert numbers == [number] * number
    assert_same(gradients(own), gradients(reference))
    own.zero_grad()


CHECKS = [checked_by_torch, checked_by_code]


@pytest.mark.parametrize("check", CHECKS)
def test_a_batch_is_cut_if_each_piece_has_its_images(check):
    own = model(check)
    with roundpipe.compile(own, devices=["cpu"]) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        for counts in ([1] * 4, [2, 0, 0, 2], [1] * 4):
            assert_eagers(piped, own, batch(counts), 2)


@pytest.mark.parametrize("counts", [[2, 1, 1, 0], [3, 1, 2, 0]], ids=["as many as texts", "more"])
@pytest.mark.parametrize("check", CHECKS)
def test_a_batch_that_can_not_be_cut_runs_in_one_piece(check, counts):
    own = model(check)
    with roundpipe.compile(own, devices=["cpu"]) as piped:
        with pytest.warns(UserWarning) as caught:
            assert_eagers(piped, own, batch(counts), 1)
        (message,) = (str(each.message) for each in caught)  # not also that images were not cut
        assert "run a piece of a batch by itself (images and their places differ" in message
        num_traces = piped.trace_count
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*a piece of a batch")
            assert_eagers(piped, own, batch(counts, seed=2), 1)
            assert_eagers(piped, own, batch([1] * 4), 1)
            given = batch(counts, seed=3)
            with torch.no_grad():
                torch.testing.assert_close(piped(**given)["logits"], own(**given)["logits"], rtol=0, atol=1e-10)
        assert piped.trace_count <= num_traces + 2


def test_a_number_that_was_given_stays_and_the_error_says_that_the_batch_was_cut():
    own, given = model(), batch([2, 1, 1, 0])
    with roundpipe.compile(own, devices=["cpu"]) as piped:
        with pytest.raises(ValueError, match="images and their places differ") as caught:
            train(piped, given, run_config=RoundPipeRunConfig(num_microbatch=2))
        assert any("can run the whole batch: use num_microbatch=1" in note for note in caught.value.__notes__)
        assert_eagers(piped, own, batch([1] * 4), 2)


def test_a_batch_that_no_piece_and_no_whole_fits_raises_what_eager_does():
    given = batch([1] * 4)
    given["ids"][0] = IMAGE
    with roundpipe.compile(model(), devices=["cpu"]) as piped, pytest.raises(ValueError, match="places differ"):
        train(piped, given)


def test_code_that_checks_nothing_is_seen_to_fill_places_one_after_the_other():
    own = model(unchecked)
    with roundpipe.compile(own, devices=["cpu"]) as piped:
        with pytest.warns(UserWarning, match="mixes the samples of a batch: masked_scatter in the forward of"):
            assert_eagers(piped, own, batch([3, 1, 2, 0]), 1)


def test_how_images_belong_to_texts_can_be_told():
    own, given = model(), batch([3, 1, 2, 0])

    def by_texts(args, kwargs, number):
        ids = torch.tensor_split(kwargs["ids"], number)
        counts = [int((piece == IMAGE).sum()) // PATCHES for piece in ids]
        images, labels = kwargs["images"].split(counts), torch.tensor_split(kwargs["labels"], number)
        names = ("ids", "images", "labels")
        return [()] * number, [dict(zip(names, each, strict=True)) for each in zip(ids, images, labels, strict=True)]

    config = RoundPipeRunConfig(num_microbatch=2, split_input=by_texts)
    with roundpipe.compile(own, devices=["cpu"], model_run_config=config) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_eagers(piped, own, given, 2)


def test_a_loss_that_takes_groups_has_the_batch_run_whole_unless_a_number_says_that_it_is_cut():
    def in_groups(outputs, _):
        return outputs.view(-1, 4).std(1).sum()

    network, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(8, 4)
    with roundpipe.compile(network, devices=["cpu", "cpu"]) as piped:
        with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
            piped.forward_backward((x,), loss_fn=in_groups, run_config=RoundPipeRunConfig(num_microbatch=3))
        (note,) = (each for each in caught.value.__notes__ if "loss_fn was called with one of the 3" in each)
        assert 'loss_scope="batch"' in note
        with pytest.warns(UserWarning, match="loss_fn can't run a piece of a batch by itself"):
            loss = piped.forward_backward((x,), loss_fn=in_groups)
        torch.testing.assert_close(loss, in_groups(network(x), None).detach())
