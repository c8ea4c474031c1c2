"""Microbatches of one sample each, of models whose code asks for the number of samples."""

import copy
import warnings
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

WIDTH, PATCHES, IMAGE, VOCABULARY = 8, 2, 9, 10


class Embedding(nn.Module):
    """Puts a token of its own in front of each sample, as vision towers do."""

    def __init__(self):
        super().__init__()
        self.patches, self.first = nn.Linear(6, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, images):
        return torch.cat([self.first.expand(images.shape[0], 1, -1), self.patches(images)], 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + torch.tanh(self.inner(hidden))


TAKEN = ContextVar("TAKEN", default=None)


def take(module, args, out):
    """A hook that hands the output to whoever asks for them."""
    if (taken := TAKEN.get()) is not None:
        taken.append(out)


class Tower(nn.Module):
    """Its hidden states are taken by hooks, which the first call puts there, and not by what it returns."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = Embedding(), nn.ModuleList(Block() for _ in range(3))
        self.has_hooks = False

    def forward(self, images):
        if not self.has_hooks:
            for block in self.blocks:
                block.register_forward_hook(take)
            self.has_hooks = True
        taken = []
        token = TAKEN.set(taken)
        hidden = self.embedding(images)
        for block in self.blocks:
            hidden = block(hidden)
        TAKEN.reset(token)
        return tuple(taken)


class Captioner(nn.Module):
    """Takes the samples' features one by one, and puts them where the texts have places for them."""

    def __init__(self):
        super().__init__()
        self.tower, self.embedding = Tower(), nn.Embedding(VOCABULARY, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, images, labels):
        features = torch.cat(list(self.tower(images)[-2][:, 1:]))
        places = ids == IMAGE
        if places.sum() != features.shape[0]:
            raise ValueError("features and places differ")
        hidden = self.embedding(ids).masked_scatter(places[..., None], features)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)}


def batch(number, length=7):
    ids = torch.randint(IMAGE, (number, length))
    ids[:, 1 : 1 + PATCHES] = IMAGE
    labels = ids.masked_fill(torch.arange(length) >= torch.randint(4, length + 1, (number, 1)), -100)
    return {"ids": ids, "images": torch.randn(number, PATCHES, 6).double(), "labels": labels}


def loss_of(outputs, _):
    return outputs["loss"]


@pytest.mark.parametrize("has_run", [False, True])
def test_features_that_are_taken_one_by_one_are_those_of_the_whole_batch(has_run):
    torch.manual_seed(0)
    model = Captioner().double()
    if has_run:
        model(**batch(2))
    eager = copy.deepcopy(model)
    config = RoundPipeRunConfig(num_microbatch=4, loss_reduction="mean")
    with roundpipe.compile(model, devices=["cpu"], fallback=False, model_run_config=config) as piped:
        for _ in range(2):
            given = batch(4)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss = piped.forward_backward(input_kwargs=given, loss_fn=loss_of)
            expected = eager(**given)["loss"]
            expected.backward()
            torch.testing.assert_close(loss.detach(), expected.detach())
        for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, msg=name)
        assert piped.trace_count == 1


class Heads(nn.Module):
    """Attention that gives sizes as numbers, behind code that takes the samples one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 3 * WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, labels):
        number = len(list(x))
        query, key, value = self.first(x).view(number, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        scores = torch.bmm(query.reshape(2 * number, -1, WIDTH // 2), key.reshape(2 * number, -1, WIDTH // 2).mT)
        mixed = torch.bmm(scores.softmax(-1), value.reshape(2 * number, -1, WIDTH // 2))
        hidden = mixed.view(number, 2, -1, WIDTH // 2).transpose(1, 2).flatten(2)
        return {"loss": F.cross_entropy(self.last(torch.tanh(hidden)).mean(1), labels)}


class Pairs(nn.Module):
    """Compares texts with images, each of which is made smaller by a number of its own."""

    def __init__(self):
        super().__init__()
        self.texts, self.images = nn.Linear(6, WIDTH), nn.Linear(6, WIDTH)

    def forward(self, texts, images, sizes):
        cut = [image[:size].mean(0) for image, size in zip(images, sizes.tolist(), strict=True)]
        logits = self.texts(texts) @ self.images(torch.stack(cut)).T
        return {"loss": F.cross_entropy(logits, torch.arange(logits.shape[0])), "logits": logits}


@pytest.mark.parametrize("num_microbatch", [2, 4])
def test_code_that_counts_the_samples_mixes_none(num_microbatch):
    torch.manual_seed(0)
    model = Heads().double()
    given = {"x": torch.randn(4, 5, 6).double(), "labels": torch.randint(3, (4,))}
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, loss_reduction="mean")
    expected = model(**given)["loss"]
    with roundpipe.compile(model, devices=["cpu"], model_run_config=config) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = piped.forward_backward(input_kwargs=given, loss_fn=loss_of)
    torch.testing.assert_close(loss.detach(), expected.detach())


@pytest.mark.parametrize("num_microbatch", [2, 4])
def test_a_loss_that_compares_samples_is_told_of_where_each_is_alone(num_microbatch):
    torch.manual_seed(0)
    given = {"texts": torch.randn(4, 6), "images": torch.randn(4, 5, 6), "sizes": torch.full((4,), 3)}
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, loss_reduction="mean")
    with roundpipe.compile(Pairs(), devices=["cpu"], model_run_config=config) as piped:
        with pytest.warns(UserWarning, match="mixes the samples of a batch"):
            piped.forward_backward(input_kwargs=given, loss_fn=loss_of)
