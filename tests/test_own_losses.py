"""Losses that the model computes itself: put together as its graph says that they are made."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.runtime.config import resolve
from roundpipe.wrappers.batch_warnings import MOST_READ, BatchWarnings
from tests.runtime.models import assert_same, gradients
from tests.test_losses import VOCABULARY, Tokens, padded
from tests.wrappers.cases_tails import runs

__all__ = ["runs"]


class HasLoss(Tokens):
    def forward(self, ids, labels=None, num_items_in_batch=None):
        logits = super().forward(ids)
        if labels is None:
            return {"logits": logits}
        flat = logits.flatten(0, 1), F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(*flat), "logits": logits}
        number = num_items_in_batch.to(ids.device)  # as transformers' losses do
        return {"loss": F.cross_entropy(*flat, reduction="sum") / number, "logits": logits}


def own(outputs, label):
    return outputs["loss"]


def batches():
    ids, labels = padded()
    counted = (labels[:, 1:] != -100).sum()
    return [{"ids": ids, "labels": labels}, {"ids": ids, "labels": labels, "num_items_in_batch": counted}]


@pytest.mark.parametrize("given", batches(), ids=["mean", "sum"])
@pytest.mark.parametrize("num", [3, 4])
def test_forward_gives_the_loss_of_the_whole_batch(given, num):
    model = HasLoss().double()
    reference = copy.deepcopy(model)
    expected = reference(**given)
    expected["loss"].backward()
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(num)) as piped:
        with torch.no_grad():
            torch.testing.assert_close(piped(**given)["loss"], expected["loss"].detach(), rtol=0, atol=1e-12)
        outputs = piped(**given)
        outputs["loss"].backward()
        piped.synchronize()
        torch.testing.assert_close(outputs["logits"], expected["logits"], rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)


@pytest.mark.parametrize("given", batches(), ids=["mean", "sum"])
def test_a_round_gives_it_by_the_right_reduction_and_warns_of_the_wrong_one(given):
    model = HasLoss().double()
    reference = copy.deepcopy(model)
    expected = reference(**given)["loss"]
    expected.backward()
    is_mean = "num_items_in_batch" not in given
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = piped.forward_backward(input_kwargs=given, loss_fn=own, loss_reduction="mean" if is_mean else "sum")
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)
        piped.forward_backward(input_kwargs=given, loss_fn=lambda outputs, _: outputs["loss"] / 3)
        if is_mean:
            with pytest.warns(UserWarning, match=r"HasLoss computes itself is a mean.*loss_reduction='mean'"):
                piped.forward_backward(input_kwargs=given, loss_fn=own)
        piped.forward_backward(input_kwargs=given, loss_fn=own)


def cast(outputs, label):
    return outputs["loss"].float().double()


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize(("loss_fn", "tolerance"), [(own, 1e-12), (cast, 1e-6)])
def test_a_mean_runs_in_tiles_with_the_loss_as_part_of_the_last_layer(loss_fn, tolerance, tiles, runs):
    """Each microbatch counts by its tokens, also if the loss is the model's own in another dtype."""
    given, model = batches()[0], HasLoss().double()
    reference = copy.deepcopy(model)
    expected = reference(**given)["loss"]
    expected.backward()
    with roundpipe.compile(model, devices="cpu", model_run_config=RoundPipeRunConfig(3, tiles=tiles)) as piped:
        loss = piped.forward_backward(input_kwargs=given, loss_fn=loss_fn, loss_reduction="mean")
        piped.synchronize()
    assert runs["tiled in tail"] == (3 if tiles > 1 else 0)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=tolerance)
    assert_same(gradients(model), gradients(reference), tolerance)


class Orthogonal(HasLoss):
    """Adds a penalty on weights in place, compared with what is made in memory that it has, as AdaLoRA does."""

    def forward(self, ids, labels=None):
        outputs, penalty = super().forward(ids, labels), 0
        for weight in (each for each in self.parameters() if each.ndim == 2):
            covariance = weight.T @ weight
            eye = torch.eye(*covariance.size(), out=torch.empty_like(covariance))
            penalty += torch.norm(covariance - eye, p="fro")
        outputs["loss"] += 0.01 * penalty
        return outputs


@pytest.mark.parametrize("num", [2, 3])
def test_a_penalty_that_is_made_in_place_is_the_same_for_every_microbatch(num):
    given = batches()[0]
    model = Orthogonal().double()
    reference = copy.deepcopy(model)
    expected = own(reference(**given), None)
    expected.backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RoundPipeRunConfig(num)
        loss = piped.forward_backward(input_kwargs=given, loss_fn=own, loss_reduction="mean", run_config=config)
        piped.synchronize()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    assert_same(gradients(model), gradients(reference), 1e-12)


class Scores(nn.Module):
    """Losses by modules, means over elements, and scalars of which nothing is known."""

    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(6, VOCABULARY), loss

    def forward(self, x, target):
        y = self.linear(x)
        return self.loss(y, target), y.square().mean(), y.median()


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MSELoss(),
        nn.CrossEntropyLoss(weight=torch.arange(VOCABULARY).double()),
    ],
)
def test_what_the_graph_tells_and_what_it_does_not(loss):
    torch.manual_seed(3)
    model, x = Scores(loss).double(), torch.randn(7, 6, dtype=torch.float64)
    target = torch.tensor([2, 2, 2, 1, 0, 2, 5])
    if isinstance(loss, nn.MSELoss):
        target = torch.randn(7, VOCABULARY, dtype=torch.float64)
    with torch.no_grad(), roundpipe.compile(model, devices="cpu", model_run_config=RoundPipeRunConfig(3)) as piped:
        *found, plain = piped(x, target)
        parts = [model(*part) for part in zip(x.tensor_split(3), target.tensor_split(3), strict=True)]
        *expected, _ = model(x, target)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(plain, torch.stack([third for *_, third in parts]).mean(), rtol=0, atol=1e-12)


def test_means_accumulate_over_calls():
    """Each call adds the gradients of its own batch's mean, whatever its padding."""
    model = HasLoss().double()
    reference, given = copy.deepcopy(model), batches()[0]
    other = {**given, "labels": given["labels"].flip(0)}
    for one in (given, other):
        reference(**one)["loss"].backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        for one in (given, other):
            piped.forward_backward(input_kwargs=one, loss_fn=own, loss_reduction="mean")
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)


def test_the_texts_that_recommend_a_models_own_loss_say_that_it_is_a_mean():
    assert 'outputs.loss, loss_reduction="mean"' in roundpipe.__doc__
    with roundpipe.compile(HasLoss().double(), devices=["cpu"]) as piped:
        with pytest.raises(roundpipe.LossError, match=r"outputs\.loss; that is a mean.*loss_reduction=.mean."):
            piped.forward_backward(input_kwargs=batches()[0], loss_fn=lambda outputs, label: outputs)


@pytest.mark.parametrize("name", ["forward_loss", "forward_backward"])
def test_a_loss_that_is_only_cast_counts_by_its_targets_with_and_without_gradients(name):
    model, given = HasLoss().double(), batches()[0]
    expected = model(**given)["loss"].detach()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        found = getattr(piped, name)(
            input_kwargs=given, loss_fn=lambda outputs, _: outputs["loss"].float(), loss_reduction="mean"
        )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


class Reads(HasLoss):
    """Can't be traced: it asks where an activation lies."""

    def forward(self, ids, labels=None):
        outputs = super().forward(ids, labels)
        return outputs if outputs["logits"].data_ptr() != 1 else {}


class Product(HasLoss):
    """A mean over tokens times one over samples, which is no mean."""

    def forward(self, ids, labels=None):
        outputs = super().forward(ids, labels)
        if labels is None:
            return outputs
        first = F.cross_entropy(outputs["logits"][:, 0], labels[:, 0])
        return {"loss": outputs["loss"] * first, "logits": outputs["logits"]}


UNKNOWN = {
    "one layer": (HasLoss, roundpipe.RoundPipe),
    "parts": (HasLoss, roundpipe.AutoRoundPipe),
    "not traced": (Reads, roundpipe.compile),
    "a product": (Product, roundpipe.compile),
}


@pytest.mark.filterwarnings("ignore:.*nothing overlaps", "ignore:Reads runs module by module")
@pytest.mark.parametrize(("make", "wrap"), UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("call", ["forward_backward", "forward_loss"])
def test_a_models_own_loss_of_which_nothing_is_known_is_told_of_once(make, wrap, call):
    """Added up it may be too large, and by samples it may not be the mean."""
    given = batches()[0]
    for options, message in (
        ({}, "was added up over 3 microbatches. If it is a mean"),
        ({"loss_reduction": "mean"}, "is put together by the samples of the 3 microbatches, .*padding"),
    ):
        with wrap(make().double(), devices=["cpu"] * 2) as piped:
            with pytest.warns(UserWarning, match=f"the loss that {make.__name__} computes itself {message}"):
                getattr(piped, call)(input_kwargs=given, loss_fn=own, **options)
            assert_quiet(piped, call, given, own, **options)
    quiet = (
        (own, {"loss_reduction": "sum"}),
        (own, {"run_config": RoundPipeRunConfig(1)}),
        (lambda outputs, _: outputs["loss"] / 3, {}),
        (lambda outputs, _: (outputs["loss"], 1), {"loss_reduction": "mean"}),
    )
    with wrap(make().double(), devices=["cpu"] * 2) as piped:
        for loss_fn, options in quiet:
            assert_quiet(piped, call, given, loss_fn, **options)


def assert_quiet(piped, call, given, loss_fn, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(piped, call)(input_kwargs=given, loss_fn=loss_fn, **options)
    assert not [each for each in caught if "computes itself" in str(each.message)]


def test_a_sum_of_which_a_mean_is_made_is_told_of():
    with roundpipe.compile(HasLoss().double(), devices=["cpu"] * 2) as piped:
        with pytest.warns(UserWarning, match=r"HasLoss computes itself is a sum, .* loss_reduction='sum'"):
            piped.forward_backward(input_kwargs=batches()[1], loss_fn=own, loss_reduction="mean")


@pytest.mark.filterwarnings("ignore:Reads runs module by module")
@pytest.mark.parametrize(("make", "wrap"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_scalar_output_of_which_nothing_is_known_is_told_of_once_or_right(make, wrap):
    given, model = batches()[0], make().double()
    expected = model(**given)["loss"].detach()
    with wrap(model, devices=["cpu"] * 2) as piped, torch.no_grad():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [piped(**given)["loss"] for _ in range(2)]
        told = [each for each in caught if "is the average over the 3 microbatches" in str(each.message)]
        assert len(told) == (not torch.allclose(found[0], expected, rtol=0, atol=1e-12))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            piped(given["ids"])
            piped(**given, roundpipe_run_config=RoundPipeRunConfig(1))


class OnDevice(torch.Tensor):
    """A scalar that seems to be on a device, and counts how often it is read."""

    reads = 0
    device = torch.device("cuda:0")

    def __float__(self):
        OnDevice.reads += 1
        return 1.0


def test_scalars_on_a_device_are_looked_at_in_the_first_calls_only():
    looks, config = BatchWarnings("Identity"), resolve(None, None, num_devices=1)
    outputs = [{"loss": torch.zeros(()).as_subclass(OnDevice)} for _ in range(2)]
    for _ in range(MOST_READ + 2):
        looks.look(outputs, config)
    assert OnDevice.reads == MOST_READ * len(outputs)
    with pytest.warns(UserWarning, match="is the average over the 2 microbatches"):
        looks.look([{"loss": torch.zeros(())}, {"loss": torch.ones(())}], config)
