"""Losses that are no means of microbatches' losses, for reasons that only a trial with numbers shows, and others that
look alike and are means.
"""

import pytest
import torch
from torch.nn import functional as F

from roundpipe import RoundPipeRunConfig
from roundpipe.core import trees
from roundpipe.fx.passes.loss_numbers import MOST_ELEMENTS, made_by_calls, made_by_graph
from roundpipe.fx.trace.loss import call_loss, loss_tracer, trace_loss
from tests.test_mixed_samples import calls

TOLD = "compare samples|function of means|do not make up|not in proportion|gives sums"


def mse(x, label):
    return F.mse_loss(x, label["mask"])


def flooded(x, label):
    return (mse(x, label) - 0.85).abs() + 0.85


def free_bits(x, label):
    return mse(x, label) + x.square().mean(0).clamp(min=0.0105).sum()


def larger(x, label):
    return torch.maximum(mse(x, label), 1.1 * F.l1_loss(x, label["mask"]))


def switched(x, label):
    return torch.where(mse(x, label) > 0.85, mse(x, label), 2 * F.l1_loss(x, label["mask"]))


def moments(x, label):
    return (x.mean(0) - label["mask"].mean(0) + 0.5).abs().sum()


def geometric(x, label):
    return F.mse_loss(x, label["mask"], reduction="none").mean(0).prod()


def distance(x, label):
    return torch.dist(x, label["mask"])


def flat_norm(x, label):
    return torch.linalg.vector_norm((x - label["mask"]).flatten())


def spectrum(x, label):
    return torch.linalg.svdvals(x - label["mask"]).sum()


def soft_maximum(x, label):
    return torch.logsumexp((x - label["mask"]).flatten(), 0)


def normalised(x, label):
    return F.mse_loss(F.batch_norm(x, None, None, training=True), label["mask"])


def first_sample(x, label):
    return (x[0] - label["mask"][0]).square().sum()


def reversed_labels(x, label):
    mask = label["mask"]
    return F.mse_loss(x, mask[torch.arange(len(mask) - 1, -1, -1)])


def frequencies(x, label):
    return (torch.bincount(label["class"], minlength=4) / len(x) * x.mean(0)).sum()


def adaptive(x, label):
    return F.huber_loss(x, label["mask"], delta=float(label["reward"].std()))


def larger_for_python(x, label):
    return max(mse(x, label), 1.1 * F.l1_loss(x, label["mask"]))


def scaled_by_python(x, label):
    return mse(x, label) * float(x.std())


def correlation(x, label):
    return -torch.corrcoef(torch.stack([x.flatten(), label["mask"].flatten()]))[0, 1]


def hard_ones(x, label):
    losses = F.cross_entropy(x, label["class"], reduction="none")
    return losses[losses > losses.mean()].mean()


def easy_half(x, label):
    losses = F.cross_entropy(x, label["class"], reduction="none")
    return losses.sort()[0][: len(losses) // 2].mean()


NO_MEANS = [
    *(flooded, free_bits, larger, switched, moments, geometric, distance, flat_norm, spectrum, soft_maximum),
    *(normalised, first_sample, reversed_labels, frequencies, adaptive),
    *(larger_for_python, scaled_by_python, correlation, hard_ones, easy_half),
]


def of_norms(x, label):
    return F.pairwise_distance(x, label["mask"]).mean()


def of_spectra(x, label):
    return torch.linalg.svdvals((x - label["mask"]).view(-1, 2, 2)).sum(-1).mean()


def bounded(x, label):
    return F.relu(x - label["mask"]).clamp(max=0.5).mean()


def of_clamped(x, label):
    return torch.where(x > 0, x, 0.1 * x).sum(-1).abs().mean()


def focal(x, label):
    chosen = x.log_softmax(-1).gather(1, label["class"][:, None])[:, 0]
    return (-((1 - chosen.exp()) ** 2) * chosen).mean()


def checked(x, label):
    if x.isnan().any():
        raise ValueError("no numbers")
    return mse(x, label)


def of_each(x, label):
    losses = F.cross_entropy(x, label["class"], reduction="none")
    assert len(losses) == len(x)
    return losses.mean()


MEANS = [of_norms, of_spectra, bounded, of_clamped, focal, checked, of_each]


@pytest.mark.parametrize("loss_fn", NO_MEANS)
def test_what_is_no_mean_is_told_of_once(loss_fn):
    options = {"loss_reduction": "mean", "run_config": RoundPipeRunConfig(3)}
    is_right, texts = calls(loss_fn, times=2, **options)
    assert not is_right and len(texts) == 1 and any(words in texts[0] for words in TOLD.split("|"))
    assert calls(loss_fn, loss_scope="batch") == (True, [])


@pytest.mark.parametrize("loss_fn", MEANS)
def test_means_are_right_without_a_word(loss_fn):
    assert calls(loss_fn, loss_reduction="mean", run_config=RoundPipeRunConfig(3)) == (True, [])


def tried(loss_fn, *examples):
    """What numbers tell of a loss of microbatches, outputs of which have no data."""
    sizes = [len(outputs) for outputs, _ in examples]

    def trace(arguments):
        return trace_loss(loss_fn, *arguments)

    def scalars(graph):
        return [node for node in graph.graph.nodes if node.name == graph.output.name]

    return made_by_graph(trace, scalars, examples, sizes)


def example(number, label=None):
    return torch.empty(number, 3, device="meta"), torch.zeros(number, 3) if label is None else label


def test_numbers_tell_means_and_sums_from_other_functions():
    assert tried(F.mse_loss, example(2), example(3)) == "mean"
    assert tried(lambda x, y: (x - y).sum(), example(2), example(3)) == "sum"
    assert tried(lambda x, y: (x - y).norm(), example(2), example(3)) == "differs"
    shared = torch.ones(4)
    assert tried(lambda x, y: x.sum(-1).mean() * y.sum(), example(2, shared), example(3, shared)) == "mean"


def test_all_microbatches_are_tried_unless_they_are_large():
    """Two make up what they are a part of, and the third does not."""

    def of_three(x, y):
        return (x - y).square().mean() if len(x) < 3 else (x - y).square().mean() * len(x)

    assert tried(of_three, example(1), example(1)) == "mean"
    assert tried(of_three, example(1), example(1), example(1)) == "sum"
    large = example(1, torch.zeros(MOST_ELEMENTS))
    assert tried(lambda x, y: x.mean() + 0 * y.sum(), *[example(1)] * 2, large) == "mean"


def test_microbatches_that_a_graph_serves_share_it():
    trace = loss_tracer(lambda x, y: (x - y).norm(), None)
    assert len({id(trace(example(number))) for number in (2, 3, 2, 5)}) == 1
    specialised = loss_tracer(lambda x, y: sum((x[row] - y[row]).norm() for row in range(len(x))), None)
    assert len({id(specialised(example(number))) for number in (2, 3, 2)}) == 2


def test_what_can_not_be_tried_is_not_told_of():
    norm = lambda x, y: (x - y).norm()  # noqa: E731
    assert tried(norm, example(2)) is None
    assert tried(norm, example(MOST_ELEMENTS // 3), example(2)) is None
    assert tried(lambda x, y: (x + y).norm(), example(2, torch.ones(3)), example(3, torch.zeros(3))) is None
    assert tried(lambda x, y: (x - y).norm() if x.sum() > 0 else x.sum(), example(2), example(3)) is None
    whole = [tuple(trees.map_tensors(one, lambda tensor: tensor.to(torch.int64)) for one in example(n)) for n in (2, 3)]
    assert tried(lambda x, y: (x - y).double().norm(), *whole) is None


def test_a_function_without_a_graph_is_called_and_leaves_what_it_holds_as_it_is():
    norm, calls_seen = torch.nn.BatchNorm1d(3), []

    def loss_fn(x, y):
        calls_seen.append(len(x))
        loss = (norm(x) - y).norm()
        return loss if loss > 0 else loss * 2

    program = lambda numbers: [call_loss(loss_fn, *numbers)]  # noqa: E731
    before = torch.get_rng_state()
    assert made_by_calls(program, [example(4), example(5)], [4, 5]) == "differs"
    assert norm.num_batches_tracked == 0 and norm.running_mean.eq(0).all() and not calls_seen
    noisy = lambda numbers: [call_loss(lambda x, y: (x - y + torch.rand(3)).norm(), *numbers)]  # noqa: E731
    assert made_by_calls(noisy, [example(4), example(5)], [4, 5]) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_leaves_what_the_function_holds_as_it_is():
    norm = torch.nn.BatchNorm1d(3)
    assert tried(lambda x, y: (norm(x) - y).norm(), example(4), example(5)) == "differs"
    assert norm.num_batches_tracked == 0 and norm.running_mean.eq(0).all()
