"""How the losses of microbatches make up one: against eager on the whole batch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.repeats import repeats
from tests.runtime.models import assert_same, gradients

VOCABULARY = 11


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


class Reads(Tokens):
    """Can't be traced: a branch on activations."""

    def forward(self, ids):
        logits = super().forward(ids)
        return logits if logits.sum() > -1e9 else -logits


def padded(size=7, length=5):
    """Ids and labels; of the last samples nothing counts."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (size, length), generator=generator)
    labels = torch.randint(VOCABULARY, (size, length), generator=generator)
    for row in range(size):
        labels[row, max(length - row, 0) :] = -100
    return ids, labels


def token_mean(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counted_mean(logits, labels):
    return token_mean(logits, labels), (labels != -100).sum()


def sample_mean(logits, labels):
    return F.mse_loss(logits.mean((1, 2)), labels.double().mean(1))


ONE = RoundPipeRunConfig(1)


def models():
    torch.manual_seed(0)
    return Tokens().double(), Reads().double()


def wrap(kind, **options):
    traced, untraced = models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "traced":
            return traced, roundpipe.compile(traced, **options)
        if kind == "one layer":
            return traced, roundpipe.RoundPipe(traced, **options)
        return untraced, roundpipe.AutoRoundPipe(untraced, **options)


KINDS = ["traced", "one layer", "parts"]


@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", repeats([1, 3, 4], ["1", "3"]))
@pytest.mark.parametrize(
    ("whole", "each"),
    [
        (token_mean, counted_mean),
        (sample_mean, sample_mean),
        (token_mean, lambda x, y: (token_mean(x, y), int((y != -100).sum()))),
    ],
)
def test_a_mean_is_that_of_the_whole_batch(kind, num, whole, each):
    model, piped = wrap(kind, devices=["cpu"] * 2)
    reference = copy.deepcopy(model)
    ids, labels = padded()
    with piped:
        for _ in range(2):  # gradients add up, means of calls do not become one
            expected = whole(reference(ids), labels)
            expected.backward()
            loss, logits = piped.forward_backward(
                (ids,),
                label=labels,
                loss_fn=each,
                return_outputs=True,
                run_config=RoundPipeRunConfig(num_microbatch=num),
                loss_reduction="mean",
            )
            torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(logits, reference(ids).detach(), rtol=0, atol=1e-12)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)
        evaluated = piped.forward_loss((ids,), label=labels, loss_fn=each, loss_reduction="mean")
        torch.testing.assert_close(evaluated, expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
def test_several_losses_have_one_weight(kind):
    def both(logits, labels):
        return [token_mean(logits, labels), 0.1 * token_mean(-logits, labels)], (labels != -100).sum()

    model, piped = wrap(kind, devices="cpu", model_run_config=RoundPipeRunConfig(3, loss_reduction="mean"))
    reference = copy.deepcopy(model)
    ids, labels = padded()
    expected = both(reference(ids), labels)[0]
    torch.autograd.backward(expected)
    with piped:
        found = piped.forward_backward((ids,), label=labels, loss_fn=both)
        torch.testing.assert_close(found, [loss.detach() for loss in expected], rtol=0, atol=1e-12)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
def test_what_is_in_front_of_the_model_gets_the_gradients_of_the_mean(kind):
    torch.manual_seed(1)
    front, model = nn.Linear(6, 6).double(), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    reference = copy.deepcopy(nn.ModuleList([front, model]))
    values, labels = torch.randn(7, 6, dtype=torch.float64), torch.tensor([0, 1, 2, -100, -100, 1, -100])
    F.cross_entropy(reference[1](reference[0](values)), labels).backward()
    made = {"traced": roundpipe.compile, "one layer": roundpipe.RoundPipe, "parts": roundpipe.AutoRoundPipe}[kind]
    with made(model, devices="cpu", model_run_config=RoundPipeRunConfig(3)) as piped:
        piped.forward_backward(
            (front(values),),
            label=labels,
            loss_fn=lambda x, y: (F.cross_entropy(x, y), (y != -100).sum()),
            loss_reduction="mean",
        )
        piped.synchronize()
        assert_same(gradients(nn.ModuleList([front, model])), gradients(reference), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["forward_backward", "forward_loss"])
def test_a_mean_by_samples_of_labels_with_padding_is_told_of_once(kind, call):
    """Where the graph of a loss tells its targets, they are counted; it doesn't where some are selected."""
    ids, labels = padded()

    def by_class(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=classes)

    def quotient(logits, labels):
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.sum() / (labels != -100).sum()

    def selected(logits, labels):
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses[labels.flatten() != -100].mean()

    classes = torch.ones(VOCABULARY, dtype=torch.float64)
    unknown = selected if kind == "traced" else token_mean
    alike = torch.zeros_like(labels)
    alike[:, 0] = -100
    quiet = [(counted_mean, labels, {}), (token_mean, alike, {}), (token_mean, labels, {"run_config": ONE})]
    if kind == "traced":
        quiet += [(token_mean, labels, {}), (by_class, labels, {}), (quotient, labels, {})]
    with wrap(kind, devices=["cpu"] * 2)[1] as piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = []
        for loss_fn, label, options in (*quiet, (unknown, labels, {}), (unknown, labels, {})):
            getattr(piped, call)((ids,), label=label, loss_fn=loss_fn, loss_reduction="mean", **options)
            texts = [str(each.message) for each in caught if "nothing overlaps" not in str(each.message)]
            seen.append(len(texts))
    assert seen == [*[0] * len(quiet), 1, 1] and "(label != -100).sum()" in texts[0]


def contrastive(outputs, labels):
    first, second = F.normalize(outputs, dim=-1).mean(1).chunk(2, -1)[0], outputs.std(1)
    scores = F.normalize(first) @ F.normalize(second[:, : first.shape[1]]).T
    return F.cross_entropy(scores / 0.1, torch.arange(len(scores)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_the_whole_batch_sees_it_at_once(kind):
    model, piped = wrap(kind, devices=["cpu"] * 2)
    reference = copy.deepcopy(model)
    ids, labels = padded()
    expected = contrastive(reference(ids), labels)
    expected.backward()
    with piped:
        loss, outputs = piped.forward_backward(
            (ids,), label=labels, loss_fn=contrastive, return_outputs=True, loss_scope="batch"
        )
        assert not outputs.requires_grad
        assert loss == piped.forward_loss((ids,), label=labels, loss_fn=contrastive, loss_scope="batch")
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(outputs, reference(ids).detach(), rtol=0, atol=1e-12)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)


@pytest.mark.parametrize("options", [{"loss_scope": "batch"}, {"loss_reduction": "mean"}])
def test_asynchronous_steps_train_on_weights_one_update_old(options):
    loss_fn = contrastive if "loss_scope" in options else counted_mean
    model, piped = wrap("traced", devices=["cpu"] * 2)
    reference = copy.deepcopy(model)
    ids, labels = padded()
    weights = [{name: value.detach().clone() for name, value in reference.named_parameters()}] * 2
    for _ in range(5):
        reference.load_state_dict(weights[-2])
        reference.zero_grad()
        loss = loss_fn(reference(ids), labels)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        weights.append({n: weights[-1][n] - 0.1 * p.grad for n, p in reference.named_parameters()})
    with piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        for _ in range(5):
            piped.forward_backward((ids,), label=labels, loss_fn=loss_fn, **options)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        piped.synchronize()
        assert_same({n: p.detach() for n, p in model.named_parameters()}, weights[-1], 1e-12)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: (loss, loss), r"a tuple of two is \(loss, weight\)"),
        (lambda loss: (loss, -1), "finite and at least 0"),
        (lambda loss: (loss, torch.ones(2)), r"a weight of \[2\]"),
        (lambda loss: (loss, "all"), "a weight of str"),
    ],
)
def test_what_is_no_weight_is_refused(returned, message):
    _, piped = wrap("traced", devices="cpu")
    ids, labels = padded()
    with piped, pytest.raises(roundpipe.LossError, match=message):
        piped.forward_backward(
            (ids,), label=labels, loss_fn=lambda x, y: returned(token_mean(x, y)), loss_reduction="mean"
        )


def test_a_weight_without_a_mean_is_refused():
    _, piped = wrap("traced", devices="cpu")
    ids, labels = padded()
    with piped, pytest.raises(roundpipe.LossError, match="loss_reduction='mean'"):
        piped.forward_backward((ids,), label=labels, loss_fn=counted_mean)
    with pytest.raises(roundpipe.ConfigError, match='loss_reduction: got \'median\'.*"sum" or "mean"'):
        RoundPipeRunConfig(loss_reduction="median")
    with pytest.raises(roundpipe.ConfigError, match="loss_scope"):
        RoundPipeRunConfig(loss_scope="step")


def test_weights_for_some_microbatches_only_are_refused():
    _, piped = wrap("traced", devices="cpu")
    ids, labels = padded()

    def sometimes(logits, labels):
        loss = token_mean(logits, labels)
        return (loss, 1) if len(logits) > 3 else loss

    with piped, pytest.raises(roundpipe.LossError, match="for some microbatches only"):
        piped.forward_backward((ids,), label=labels, loss_fn=sometimes, loss_reduction="mean")


def test_a_mean_over_nothing_is_no_number_and_leaves_no_gradient():
    model, piped = wrap("traced", devices="cpu")
    ids, labels = padded()
    with piped:
        loss = piped.forward_backward(
            (ids,), label=torch.full_like(labels, -100), loss_fn=counted_mean, loss_reduction="mean"
        )
        piped.synchronize()
        assert loss.isnan()
        assert all(parameter.grad is None for parameter in model.parameters())


class Alone(Tokens):
    """Computes something else for a microbatch of one, with another number of layers."""

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks[: 2 if ids.shape[0] == 1 else 4]:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


@pytest.mark.parametrize("each", [counted_mean, sample_mean])
def test_a_mean_over_several_rounds_is_exact(each):
    model = Alone().double()
    reference = copy.deepcopy(model)
    ids, labels = padded()
    parts = [(ids[i : i + 2], labels[i : i + 2]) for i in range(0, 7, 2)]
    weights = [(y != -100).sum() if each is counted_mean else len(y) for _, y in parts]
    losses = [each(reference(x), y) for x, y in parts]
    losses = [loss[0] if isinstance(loss, tuple) else loss for loss in losses]
    expected = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight) / sum(weights)
    for parameter in [*reference.parameters(), *model.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    expected.backward()
    options = RoundPipeRunConfig(4, loss_reduction="mean")
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=options) as piped:
        loss = piped.forward_backward((ids,), label=labels, loss_fn=each)
        assert piped.trace_count == 2
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)


def test_buffers_of_earlier_stages_are_written_before_the_weights_of_a_mean_are_known():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))).double()
    twin, x = copy.deepcopy(model), torch.randn(8, 4, dtype=torch.float64)
    plan = roundpipe.ExecutePlan([(0, 1), (1, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])
    config = RoundPipeRunConfig(num_microbatch=1, loss_reduction="mean", execute_plan=plan)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        piped.forward_backward((x,), label=x, loss_fn=F.mse_loss, run_config=config)
        piped.synchronize()
    F.mse_loss(twin(x), x).backward()
    assert_same(gradients(model), gradients(twin))


class Centers(nn.Module):
    """Remembers a mean that it has seen, so that it runs on the host in a model that is not traced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return self.linear(x - self.mean)


@pytest.mark.filterwarnings("ignore:.*runs on the CPU from now on")
def test_a_loss_of_the_whole_batch_is_behind_forwards_of_microbatches_on_the_host_too():
    torch.manual_seed(0)
    model = Centers().double()
    twin, x = copy.deepcopy(model), torch.randn(8, 4, dtype=torch.float64)
    with roundpipe.AutoRoundPipe(model, devices=["cpu"] * 2) as piped:
        config = RoundPipeRunConfig(num_microbatch=2)
        loss = piped.forward_backward((x,), label=x, loss_fn=F.mse_loss, loss_scope="batch", run_config=config)
        piped.synchronize()
    expected = F.mse_loss(torch.cat([twin(half) for half in x.chunk(2)]), x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    assert_same(gradients(model), gradients(twin), 1e-12)


def test_a_reduction_counts_without_other_options():
    """``run_config=None`` stands for no options, and keeps those that are arguments of their own."""
    model, x = nn.Linear(6, 3), torch.randn(9, 6)
    loss_fn = lambda out, _: out.square().mean()  # noqa: E731
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        for call in (piped.forward_backward, piped.forward_loss):
            loss = call((x,), loss_fn=loss_fn, loss_reduction="mean", run_config=None)
            torch.testing.assert_close(loss, loss_fn(model(x), None))
