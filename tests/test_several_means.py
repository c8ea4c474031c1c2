"""Losses that add up means of different targets: each counts by its own, as in eager's one call over the batch."""

import copy
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients, pieces
from tests.test_losses import VOCABULARY, Alone, Tokens, padded
from tests.test_own_losses import HasLoss
from tests.wrappers.cases_tails import runs
from tests.wrappers.test_variants import Masked, arguments

__all__ = ["runs"]
SIZE, LENGTH = 7, 6


def bert(kind):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return kind(config).double()


def batch():
    """Ids of which the last samples are padded, so that the first microbatches have no padding."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([LENGTH] * (SIZE - 3) + [4, 2, 1])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": torch.randint(31, (SIZE, LENGTH), generator=generator), "attention_mask": mask}, generator


def answering():
    """Starts that are all in the context, and ends that are mostly not: in some microbatches none is."""
    given, generator = batch()
    starts = torch.randint(LENGTH, (SIZE,), generator=generator)
    ends = torch.tensor([1, 99, 99, 99, 99, 2, 99])
    return bert(transformers.BertForQuestionAnswering), {**given, "start_positions": starts, "end_positions": ends}


def pretraining():
    """Masked tokens, of which some microbatches have none, and whether the next sentence follows."""
    given, generator = batch()
    labels = torch.full((SIZE, LENGTH), -100)
    labels[0, 1:4], labels[5, 2], labels[6, :] = 3, 4, torch.randint(31, (LENGTH,), generator=generator)
    follows = torch.randint(2, (SIZE,), generator=generator)
    return bert(transformers.BertForPreTraining), {**given, "labels": labels, "next_sentence_label": follows}


class Penalised(Tokens):
    """A mean over tokens, one over samples, one over elements, a sum, and a penalty that is the same for all."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids, labels, values):
        logits = super().forward(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        first = F.cross_entropy(logits[:, 0], labels[:, 0])
        loss += 0.25 * first
        others = [F.mse_loss(logits.mean((1, 2)), values), F.mse_loss(logits[:, -1, 0], values, reduction="sum") / 9]
        loss = torch.exp(-self.scale) * loss + self.scale + torch.stack(others).sum()
        return {"first": first, "loss": loss + 0.01 * self.head.weight.square().sum(), "logits": logits}


def penalised():
    torch.manual_seed(0)
    ids, labels = padded(SIZE, LENGTH)
    labels[2:4] = -100  # a microbatch without any target
    values = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Penalised().double(), {"ids": ids, "labels": labels, "values": values}


def own(outputs, label):
    return outputs["loss"]


def eager(model, given, loss_fn=own, label=None, times=1):
    """Losses of the whole batch at once, and gradients."""
    reference = copy.deepcopy(model)
    for _ in range(times):
        expected = loss_fn(reference(**given), label)
        torch.autograd.backward(expected)
    return detached(expected), gradients(reference)


def detached(losses):
    return [loss.detach() for loss in losses] if isinstance(losses, list) else losses.detach()


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def assert_exact(model, given, loss_fn, label=None, whole=None, workers=2, **options):
    """Loss and gradients of two calls, and the loss of one without gradients, are eager's, without a warning."""
    expected, reference = eager(model, given, whole or loss_fn, label, times=2)
    config = RoundPipeRunConfig(loss_reduction="mean", **options)
    wrapped = roundpipe.compile(model, devices=["cpu"] * workers, model_run_config=config)
    with wrapped as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        for returns in (False, True):  # gradients add up over calls
            found = piped.forward_backward(input_kwargs=given, label=label, loss_fn=loss_fn, return_outputs=returns)
            assert_equal(found[0] if returns else found, expected)
        piped.synchronize()
        assert_same(gradients(model), reference, 1e-12)
        assert_equal(piped.forward_loss(input_kwargs=given, label=label, loss_fn=loss_fn), expected)
        return piped.trace_count


ONE = {"workers": 1, "num_microbatch": 3}
TILES = {"workers": 3, "num_microbatch": 4, "tiles": 2}
BY_LAYER = {"num_microbatch": 7, "recompute_grain": "layer"}
"""More microbatches than some mean has targets."""
BY_STAGE = {"num_microbatch": 3, "recompute_grain": "stage"}


@pytest.mark.parametrize(
    ("make", "ways"),
    [(answering, [TILES]), (pretraining, [BY_LAYER]), (penalised, [ONE, TILES, BY_LAYER, BY_STAGE])],
)
def test_each_mean_of_a_models_own_loss_counts_by_its_targets(make, ways):
    for way in ways:
        assert_exact(*make(), own, **way)


def tokens(logits, label):
    return F.cross_entropy(logits.flatten(0, 1), label.flatten())


def first(logits, label):
    return F.cross_entropy(logits[:, 1], label[:, 1])


def by_sample(logits, label):
    return F.mse_loss(logits.mean((1, 2)), label.double().mean(1))


def counted(label):
    return (label != -100).sum()


def three(logits, label):
    return [tokens(logits, label), first(-logits, label), by_sample(logits, label)]


def by_probabilities(logits, label):
    return tokens(logits, label) + F.cross_entropy(logits[:, 0], F.one_hot(label[:, 0].clamp(0), VOCABULARY).double())


def difference(logits, label):
    return tokens(logits, label) - 0.3 * first(logits, label) / 2


LOSSES = {
    "one mean": (tokens, tokens),
    "a difference": (difference, difference),
    "a list": (three, three),
    "weights": (three, lambda x, y: (three(x, y), [counted(y), counted(y[:, 1]), y.shape[0]])),
}
LOSSES |= {"by probabilities": (by_probabilities,) * 2} if torch.__version__ >= "2.13" else {}  # before: many graphs


@pytest.mark.parametrize(("whole", "each"), LOSSES.values(), ids=LOSSES)
def test_each_mean_in_a_loss_function_counts_by_its_targets(whole, each, runs):
    ids, label = padded(SIZE, LENGTH)
    torch.manual_seed(0)
    assert_exact(Tokens().double(), {"ids": ids}, each, label, whole, **TILES)
    assert runs["tail"]


def of_tokens():
    return HasLoss().double(), dict(zip(("ids", "labels"), padded(), strict=True))


@pytest.mark.parametrize("make", [of_tokens, penalised])
def test_a_models_own_loss_is_a_term_beside_those_of_the_loss_function(make):
    def both(outputs, label):
        return 0.5 * outputs["loss"] + first(outputs["logits"], label)

    torch.manual_seed(0)
    model, given = make()
    assert_exact(model, given, both, given["labels"].roll(1, 0), num_microbatch=4)


def test_the_loss_that_a_forward_returns_is_that_of_the_whole_batch():
    model, given = penalised()
    expected, reference = eager(model, given)
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(4)) as piped:
        with torch.no_grad():
            assert_equal(piped(**given)["loss"], expected)
        outputs = piped(**given)
        assert_equal(outputs["loss"], expected)
        outputs["loss"].backward()
        piped.synchronize()
        assert_same(gradients(model), reference, 1e-12)


@pytest.mark.parametrize("merge", [None, False])
def test_losses_among_returned_outputs_are_of_the_batch_or_of_each_microbatch(merge):
    """Where outputs are not merged, their losses are as the model computes them; then nothing weighs their terms."""
    model, given = penalised()
    expected = model(**given)["loss"].detach()
    parts = [model(**piece)["loss"].detach() for piece in pieces(given, 4)]
    config = RoundPipeRunConfig(4, loss_reduction="mean", merge_output=merge)
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped, warnings.catch_warnings():
        warnings.simplefilter("ignore" if merge is False else "error")
        loss, outputs = piped.forward_backward(input_kwargs=given, loss_fn=own, return_outputs=True)
        if merge is None:
            assert_equal(loss, expected)
            assert_equal(outputs["loss"], expected)
        else:
            assert_equal(torch.stack(list(outputs["loss"])).nan_to_num(-1), torch.stack(parts).nan_to_num(-1))


class MaskedLoss(Masked):
    """Microbatches with and without a mask, which need traces of their own."""

    def forward(self, x, mask, labels):
        scores = super().forward(x, mask)
        loss = F.cross_entropy(scores, labels[:, 0], ignore_index=0) + F.cross_entropy(scores, labels[:, 1])
        return {"loss": loss, "scores": scores}


def labelled():
    return {**arguments(), "labels": torch.tensor([[0, 1, 0, 2, 0, 0, 1], [2, 1, 0, 0, 1, -100, -100]]).T.contiguous()}


def each_by_its_targets(outputs, label):
    """Two means, the first of which has another number of targets."""
    return [
        F.cross_entropy(outputs["scores"], label[:, 0], ignore_index=0),
        F.cross_entropy(outputs["scores"], label[:, 1]),
    ]


@pytest.mark.parametrize("loss_fn", [own, each_by_its_targets])
def test_microbatches_of_several_traces_in_one_round(loss_fn):
    torch.manual_seed(0)
    model, given = MaskedLoss(depth=2).double(), labelled()
    reference = copy.deepcopy(model)
    split = list(pieces(given, 4))  # 2, 2, 2, 1 samples; of a batch, one way would be that of all
    scores = torch.cat([reference(**piece)["scores"] for piece in split])
    torch.autograd.backward(expected := each_by_its_targets({"scores": scores}, given["labels"]))
    config = RoundPipeRunConfig(loss_reduction="mean")
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped:
        found = piped.forward_backward(input_kwargs=split, label=[each["labels"] for each in split], loss_fn=loss_fn)
        piped.synchronize()
        assert piped.trace_count >= 3
        assert_equal(found, sum(expected).detach() if loss_fn is own else detached(expected))
        assert_same(gradients(model), gradients(reference), 1e-12)


class SometimesAProduct(MaskedLoss):
    """A single sample's loss is no sum of means."""

    def forward(self, x, mask, labels):
        outputs = super().forward(x, mask, labels)
        return {**outputs, "loss": outputs["loss"] * outputs["scores"].mean()} if x.shape[0] == 1 else outputs


def test_the_returned_loss_is_of_the_batch_beside_a_trace_with_another_loss():
    torch.manual_seed(0)
    model, given = SometimesAProduct(depth=2).double(), labelled()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size, num in ((7, 4), (6, 3)):  # of 2, 2, 2 and 1 samples, and without the last one
            part = {name: value[:size] for name, value in given.items()}
            config = RoundPipeRunConfig(num, loss_reduction="mean")
            loss, outputs = piped.forward_backward(
                input_kwargs=part, loss_fn=own, return_outputs=True, run_config=config
            )
        assert_equal(loss, sum(each_by_its_targets(outputs, part["labels"])))
        assert_equal(outputs["loss"], loss)


def test_microbatches_in_several_rounds():
    """Those of one sample have other layers, and so a round of their own."""
    torch.manual_seed(0)
    model = Alone().double()
    reference, (ids, label) = copy.deepcopy(model), padded()
    expected = three(torch.cat([reference(ids[i : i + 2]) for i in range(0, 7, 2)]), label)
    torch.autograd.backward(expected)
    config = RoundPipeRunConfig(4, loss_reduction="mean")
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped:
        found = piped.forward_backward((ids,), label=label, loss_fn=LOSSES["weights"][1])
        assert piped._session.engine.steps.num_begun == 2  # rounds, of which no report tells the number
        piped.synchronize()
        assert_equal(found, detached(expected))
        assert_same(gradients(model), gradients(reference), 1e-12)


@pytest.mark.parametrize("make", [roundpipe.compile, roundpipe.RoundPipe])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda x, y: [counted(y)], "1 weights for 2 losses"),
        (lambda x, y: [x.detach().square().sum(), counted(y)], "must be known before the microbatches run"),
        (lambda x, y: [y.shape, counted(y)], "a weight of "),
        (lambda x, y: [-1, counted(y)], "finite and at least 0|must be known"),
    ],
)
def test_weights_of_each_loss_that_are_none_are_refused(make, given, message):
    ids, label = padded()
    with make(Tokens().double(), devices=["cpu"] * 2) as piped, pytest.raises(roundpipe.LossError, match=message):
        piped.forward_backward(
            (ids,), label=label, loss_fn=lambda x, y: ([tokens(x, y), first(x, y)], given(x, y)), loss_reduction="mean"
        )


def test_weights_of_each_loss_are_refused_where_there_is_no_graph_and_taken_for_one_microbatch():
    ids, label = padded()
    label[:, 1] = -100  # a mean over nothing
    model, each = Tokens().double(), LOSSES["weights"][1]
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        with pytest.raises(roundpipe.LossError, match="must be known before the microbatches run"):
            piped.forward_backward((ids,), label=label, loss_fn=each, loss_reduction="mean")
        found = piped.forward_backward(
            (ids,), label=label, loss_fn=each, loss_reduction="mean", run_config=RoundPipeRunConfig(1)
        )
        assert_equal(found[::2], detached(three(model(ids), label)[::2]))
        assert found[1] == 0  # counts for nothing


def test_a_mean_over_no_target_of_the_batch_is_no_number():
    ids, label = padded()
    label[:, 1] = -100
    with roundpipe.compile(Tokens().double(), devices=["cpu"] * 2) as piped:
        found = piped.forward_backward((ids,), label=label, loss_fn=three, loss_reduction="mean")
        assert [each.isnan().item() for each in found] == [False, True, False]


class OfOtherKinds(Tokens):
    """Losses that are no sums of means over targets of the arguments."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, ids, labels):
        logits = super().forward(ids)
        loss, features = tokens(logits, labels), logits.mean(1)
        if self.kind == "contrastive":
            loss = loss + F.cross_entropy(features @ features.T, torch.arange(len(ids)))
        elif self.kind == "contrastive by labels":
            loss = loss + F.cross_entropy(features @ features.T, labels[:, 0].clamp(0, 1))
        elif self.kind == "product":
            loss = loss * first(logits, labels)
        elif self.kind == "load balance":
            loss = loss + logits.softmax(-1).mean((0, 1)).square().sum()
        elif self.kind == "targets of outputs":
            loss = loss + F.cross_entropy(logits[:, 0], logits[:, 1].argmax(-1))
        elif self.kind == "written":
            targets = torch.full_like(labels, -100)
            targets[:, :-1] = labels[:, 1:]
            loss = loss + tokens(logits, targets)
        elif self.kind == "written through a view":
            targets = torch.full_like(labels, -100)
            targets[:, :-1].copy_(labels[:, 1:])
            loss = loss + tokens(logits, targets)
        else:
            weight = logits.detach().mean((0, 1)).exp()
            loss = loss + F.cross_entropy(logits[:, 0], labels[:, 0], weight=weight)
        return {"loss": loss, "logits": logits}


KINDS = {
    "contrastive": "compares samples with each other",
    "contrastive by labels": "compares samples with each other",
    "product": "is put together by the samples of the 3 microbatches",
    "load balance": "has products or other functions of means over the batch",
    "targets of outputs": "is put together by the samples of the 3 microbatches",
    "written": "is put together by the samples of the 3 microbatches",
    "written through a view": "is put together by the samples of the 3 microbatches",
    "class weights of outputs": "or with a statistic over them",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_with_a_term_that_is_no_such_mean_is_told_of(kind):
    model, (ids, labels) = OfOtherKinds(kind).double(), padded(6)
    options = {"devices": ["cpu"] * 2, "model_run_config": RoundPipeRunConfig(3, loss_reduction="mean")}
    with roundpipe.compile(model, **options) as piped:
        with pytest.warns(UserWarning, match=KINDS[kind]):
            piped.forward_backward(input_kwargs={"ids": ids, "labels": labels}, loss_fn=own)
