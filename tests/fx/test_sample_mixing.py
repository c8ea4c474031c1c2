"""Which losses mix samples, so that microbatches can't make up that of the batch: as their graphs show."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe.core import trees
from roundpipe.fx.passes.counted_losses import LABEL, OUTPUTS, mixing_of_losses
from roundpipe.fx.passes.own_losses import own_mixing
from roundpipe.fx.trace.loss import trace_loss
from roundpipe.fx.trace.tracer import trace

COMPARES, BENT = "compares samples", "not linear"
NUMBER, LENGTH, CLASSES = 4, 6, 5
WEIGHT = torch.linspace(0.5, 2, CLASSES)
ADJACENT = torch.rand(NUMBER, NUMBER)
CENTER = nn.Parameter(torch.ones(3, CLASSES))
TEMPERATURE = nn.Parameter(torch.tensor(0.5))


def tokens(x, y, **options):
    return F.cross_entropy(x["logits"].flatten(0, 1), y["ids"].flatten(), **options)


def by_token(x, y):
    return tokens(x, y, reduction="none").view(NUMBER, LENGTH) * y["mask"]


def shifted(x, y):
    return F.cross_entropy(x["logits"][:, :-1].flatten(0, 1), y["ids"][:, 1:].flatten())


def chosen(x, y):
    """The log-probability of each sample's tokens."""
    return x["logits"].log_softmax(-1).gather(-1, y["ids"].unsqueeze(-1)).squeeze(-1).sum(-1)


def in_mask(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def centered(values):
    return (values - values.mean()) / (values.std() + 1e-6)


def clipped(x, y):
    ratio = (chosen(x, y) - y["value"]).exp()
    return -torch.minimum(ratio * y["reward"], ratio.clamp(0.8, 1.2) * y["reward"]).mean()


def entropy(x):
    return -(x["scores"].softmax(-1) * x["scores"].log_softmax(-1)).sum(-1).mean()


def views(x):
    return x["scores"].chunk(2)


def similarity(x):
    features = F.normalize(x["scores"], dim=-1)
    return features @ features.T / TEMPERATURE


def self_distilled(x, y):
    soft = (x["scores"].detach() / 2).softmax(-1)
    return F.kl_div((x["scores"] / 2).log_softmax(-1), soft, reduction="batchmean") * 4 + F.cross_entropy(
        x["scores"], y["class"], label_smoothing=0.1
    )


def focal(x, y):
    losses = F.cross_entropy(x["scores"], y["class"], reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def dice_of_each(x, y):
    p, mask = x["scores"].sigmoid(), y["soft"]
    return (1 - (2 * (p * mask).sum(1) + 1) / (p.sum(1) + mask.sum(1) + 1)).mean()


def dice(x, y, dims=None):
    p, mask = x["scores"].sigmoid(), y["soft"]
    return (1 - (2 * (p * mask).sum(dims) + 1) / (p.sum(dims) + mask.sum(dims) + 1)).mean()


def contrastive(x, y):
    return F.cross_entropy(similarity(x), torch.arange(len(x["scores"])))


def late_interaction(x, y):
    """Of each token of each sample with all of another's."""
    scores = torch.einsum("qih,djh->qdij", x["logits"], x["logits"]).amax(-1).sum(-1)
    return F.cross_entropy(scores, torch.arange(len(scores)))


def with_two_views(x, y):
    """Of two outputs for each sample, all behind each other."""
    both = F.normalize(torch.cat([x["scores"], -x["scores"]]), dim=-1)
    return (both @ both.T).logsumexp(-1).mean()


def covariance(x, y):
    features = x["scores"] - x["scores"].mean(0)
    return (features.T @ features / (NUMBER - 1)).square().sum()


def balance(x, y):
    gates = x["scores"].softmax(-1)
    return CLASSES * (gates.mean(0) * F.one_hot(gates.argmax(-1), CLASSES).float().mean(0)).sum()


USUAL = {
    "tokens": tokens,
    "ignored": lambda x, y: tokens(x, y, ignore_index=0),
    "classes": lambda x, y: tokens(x, y, weight=WEIGHT),
    "smoothed": lambda x, y: tokens(x, y, label_smoothing=0.1),
    "shifted": shifted,
    "padded": lambda x, y: F.cross_entropy(x["logits"].flatten(0, 1), F.pad(y["ids"], (0, 1))[:, 1:].flatten()),
    "probabilities": lambda x, y: F.cross_entropy(x["scores"], y["soft"].softmax(-1)),
    "in a mask": lambda x, y: by_token(x, y).sum() / y["mask"].sum(),
    "of each sample": lambda x, y: (by_token(x, y).sum(1) / y["mask"].sum(1).clamp(min=1)).mean(),
    "as a product": lambda x, y: by_token(x, y).flatten() @ y["mask"].flatten() / y["mask"].sum(),
    "weights that sum up to one": lambda x, y: (by_token(x, y) * (y["mask"] / y["mask"].sum())).sum(),
    "selected": lambda x, y: by_token(x, y)[y["mask"].bool()].mean(),
    "by a loop": lambda x, y: sum((each.square().mean() for each in x["scores"]), torch.zeros(())) / NUMBER,
    "squares": lambda x, y: F.mse_loss(x["scores"], y["soft"]),
    "smooth": lambda x, y: F.smooth_l1_loss(x["scores"], y["soft"]) + F.huber_loss(x["scores"], y["soft"]),
    "absolute": lambda x, y: F.l1_loss(x["scores"], y["soft"], reduction="sum") / y["soft"].numel(),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(x["scores"], y["soft"].sigmoid(), pos_weight=WEIGHT),
    "distilled": self_distilled,
    "focal": focal,
    "dice of each sample": dice_of_each,
    "cosine": lambda x, y: 1 - F.cosine_similarity(x["scores"], y["soft"]).mean(),
    "triplets": lambda x, y: F.triplet_margin_loss(x["scores"], y["soft"], -y["soft"]),
    "in pairs": lambda x, y: -F.logsigmoid(x["logits"][:, 0] - x["logits"][:, 1]).mean(),
    "in groups": lambda x, y: (
        (chosen(x, y).view(-1, 2) - chosen(x, y).view(-1, 2).mean(1, keepdim=True)).square().mean()
    ),
    "a policy": lambda x, y: -(chosen(x, y) * y["reward"]).mean() - 0.01 * entropy(x),
    "a clipped policy": clipped,
    "values": lambda x, y: 0.5 * (x["scores"][:, 0] - y["value"]).square().mean() + clipped(x, y),
    "a penalty": lambda x, y: tokens(x, y) + 0.1 * x["logits"].logsumexp(-1).square().mean() + CENTER.square().sum(),
    "a loss for all beside each": lambda x, y: (
        focal(x, y) + F.cross_entropy(x["scores"], y["class"], reduction="none")
    ).mean(),
    "distances in each sample": lambda x, y: torch.cdist(x["logits"], x["logits"]).mean(),
    "products in each sample": lambda x, y: (x["logits"] @ x["logits"].transpose(1, 2)).square().mean(),
    "prototypes": lambda x, y: F.cross_entropy(x["scores"] @ CENTER.T, y["class"].clamp(max=2)),
    "distances from prototypes": lambda x, y: torch.cdist(x["scores"], CENTER).square().mean(),
    "if it is a number": lambda x, y: torch.nan_to_num(tokens(x, y)).clamp(max=100),
    "guarded": lambda x, y: torch.where(y["mask"].sum() > 0, in_mask(by_token(x, y), y["mask"]), 0.0),
    "averaged over classes": lambda x, y: (x["scores"] * y["soft"]).mean(0).sum(),
    "a difference of means": lambda x, y: in_mask(by_token(x, y), y["mask"]) - 0.1 * x["scores"].mean(),
    "several": lambda x, y: [tokens(x, y), focal(x, y)],
    "learned": lambda x, y: (-TEMPERATURE).exp() * tokens(x, y) + TEMPERATURE,
    "sequences": lambda x, y: F.ctc_loss(
        x["logits"].log_softmax(-1).transpose(0, 1), y["ids"][:, :2].clamp(1, 4), (LENGTH,) * NUMBER, (2,) * NUMBER
    ),
}

MIXING = {
    "views": (lambda x, y: F.mse_loss(*views(x)), COMPARES),
    "cosine of views": (lambda x, y: -F.cosine_similarity(*views(x)).mean(), COMPARES),
    "views and targets": (lambda x, y: tokens(x, y) + F.mse_loss(*views(x)), COMPARES),
    "split views": (lambda x, y: F.mse_loss(*x["scores"].split(NUMBER // 2)), COMPARES),
    "halves": (lambda x, y: -F.logsigmoid(x["scores"][: NUMBER // 2] - x["scores"][NUMBER // 2 :]).mean(), COMPARES),
    "neighbours": (lambda x, y: (x["scores"][1:] - x["scores"][:-1]).abs().mean(), COMPARES),
    "targets of neighbours": (lambda x, y: F.cross_entropy(x["scores"][1:], y["class"][:-1]), COMPARES),
    "rolled": (
        lambda x, y: F.margin_ranking_loss(*(x["scores"][:, 0], x["scores"].roll(1, 0)[:, 0], y["mask"][:, 0])),
        COMPARES,
    ),
    "flipped": (lambda x, y: F.mse_loss(x["scores"], x["scores"].flip(0).detach()), COMPARES),
    "the hardest": (
        lambda x, y: F.cross_entropy(x["scores"], y["class"], reduction="none").sort()[0][2:].mean(),
        COMPARES,
    ),
    "the worst": (lambda x, y: -chosen(x, y).topk(2)[0].mean(), COMPARES),
    "the largest": (lambda x, y: F.cross_entropy(x["scores"], y["class"], reduction="none").amax(), COMPARES),
    "along samples": (lambda x, y: x["scores"].log_softmax(0).diagonal().mean(), COMPARES),
    "sorted": (lambda x, y: (x["scores"].sort(0)[0] - y["soft"].sort(0)[0]).square().mean(), COMPARES),
    "centred": (lambda x, y: (x["scores"] - x["scores"].mean(0)).square().mean(), COMPARES),
    "centred labels": (lambda x, y: -(chosen(x, y) * (y["reward"] - y["reward"].mean())).mean(), COMPARES),
    "normalised labels": (lambda x, y: -(chosen(x, y) * centered(y["reward"])).mean(), COMPARES),
    "targets by normalised labels": (lambda x, y: F.mse_loss(x["scores"][:, 0], centered(y["value"])), COMPARES),
    "targets of centred scores": (
        lambda x, y: F.cross_entropy(x["scores"] - x["scores"].mean(0), y["class"]),
        COMPARES,
    ),
    "above the mean": (lambda x, y: (chosen(x, y) * (y["reward"] > y["reward"].mean())).mean(), COMPARES),
    "variance": (lambda x, y: (1 - (x["scores"].var(0) + 1e-4).sqrt()).relu().mean(), COMPARES),
    "covariance": (covariance, COMPARES),
    "contrastive": (contrastive, COMPARES),
    "two views of each": (with_two_views, COMPARES),
    "distances": (lambda x, y: torch.cdist(x["scores"], x["scores"]).mean(), COMPARES),
    "distances of pairs": (lambda x, y: F.pdist(x["scores"]).mean(), COMPARES),
    "all differences": (lambda x, y: (x["scores"][:, None] - x["scores"][None]).square().mean(), COMPARES),
    "pairs of a class": (lambda x, y: (similarity(x) * (y["class"][:, None] == y["class"])).mean(), COMPARES),
    "by name": (lambda x, y: torch.einsum("nd,md->nm", x["scores"], x["scores"]).square().mean(), COMPARES),
    "late interaction": (late_interaction, COMPARES),
    "late interaction by products": (
        lambda x, y: F.cross_entropy((x["logits"][:, None] @ x["logits"][None].mT).amax(-1).sum(-1), y["class"]),
        COMPARES,
    ),
    "cosine of all": (
        lambda x, y: F.cosine_similarity(x["scores"][:, None], x["scores"][None], dim=-1).logsumexp(-1).mean(),
        COMPARES,
    ),
    "halves by a view": (lambda x, y: F.mse_loss(*x["scores"].view(2, -1, CLASSES)), COMPARES),
    "halves by name": (lambda x, y: F.mse_loss(*x["scores"].unflatten(0, (2, -1))), COMPARES),
    "sums of classes": (
        lambda x, y: torch.zeros(CLASSES, CLASSES).index_add(0, y["class"], x["scores"]).square().mean(),
        BENT,
    ),
    "a root": (lambda x, y: F.mse_loss(x["scores"], y["soft"]).sqrt(), BENT),
    "overlap": (dice, BENT),
    "overlap of classes": (lambda x, y: dice(x, y, 0), BENT),
    "load balance": (balance, BENT),
    "a product": (lambda x, y: tokens(x, y) * x["scores"].mean() + F.mse_loss(x["scores"], y["soft"]) ** 2, BENT),
    "over itself": (lambda x, y: focal(x, y) / focal(x, y).detach(), BENT),
    "marginal entropy": (
        lambda x, y: (x["scores"].softmax(-1).mean(0) * x["scores"].softmax(-1).mean(0).log()).sum(),
        BENT,
    ),
    "features": (lambda x, y: F.mse_loss(x["scores"].mean(0), WEIGHT), BENT),
}


def arguments(number=NUMBER):
    generator = torch.Generator().manual_seed(0)
    outputs = {
        "logits": torch.randn(number, LENGTH, CLASSES, generator=generator).requires_grad_() * 1,
        "scores": torch.randn(number, CLASSES, generator=generator).requires_grad_() * 1,
    }
    label = {
        "ids": torch.randint(CLASSES, (number, LENGTH), generator=generator),
        "mask": torch.ones(number, LENGTH),
        "class": torch.randint(CLASSES, (number,), generator=generator),
        "soft": torch.rand(number, CLASSES, generator=generator),
        "value": torch.randn(number, generator=generator),
        "reward": torch.randn(number, generator=generator),
    }
    return outputs, label


def mixing(loss_fn, number=NUMBER, sizes=(NUMBER,)):
    outputs, label = arguments(number)
    traced = trace_loss(loss_fn, outputs, label)
    samples = {path for path, _ in trees.walk({OUTPUTS: outputs, LABEL: label})}
    return mixing_of_losses(traced, samples, (), sizes)


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_loss_mixes_nothing(name):
    assert mixing(USUAL[name]) is None


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_samples_is_told_apart(name):
    loss_fn, expected = MIXING[name]
    assert mixing(loss_fn) == expected


def interleaved(x, y):
    return -F.logsigmoid(x["scores"][0::2] - x["scores"][1::2]).mean()


@pytest.mark.parametrize(("sizes", "expected"), [((4, 4, 2), None), ((4, 3, 3), COMPARES)])
def test_samples_that_are_taken_in_steps_are_whole_groups_or_not(sizes, expected):
    assert mixing(interleaved, sizes=sizes) == expected


def test_all_meet_all_of_those_that_are_taken_in_steps():
    assert mixing(lambda x, y: (x["scores"][0::2] @ x["scores"][1::2].T).square().mean()) == COMPARES


def test_microbatches_of_one_sample_have_the_graph_of_two():
    assert mixing(lambda x, y: (x["scores"] @ x["scores"].T).square().mean(), 1, (1, 1)) == COMPARES
    assert mixing(focal, 1, (1, 1)) is None


def test_what_has_another_number_of_rows_is_not_of_samples():
    outputs = {"queries": torch.randn(7, CLASSES).requires_grad_() * 1, "scores": arguments()[0]["scores"]}
    traced = trace_loss(lambda x, y: (x["queries"][1:] - x["queries"][:-1]).mean() + x["scores"].mean(), outputs, None)
    samples = {path for path, leaf in trees.walk({OUTPUTS: outputs}) if leaf.shape[0] == NUMBER}
    assert mixing_of_losses(traced, samples) is None


class Encoder(nn.Module):
    """A model that computes a loss of what it makes, by a function of features and labels."""

    def __init__(self, loss):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(CLASSES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))
        self.loss = loss

    def forward(self, x, y):
        features = self.second(self.norm(self.first(x)))
        return {"loss": self.loss(features * self.scale.exp(), y), "features": features}


def apart(x, y):
    return F.cross_entropy(F.normalize(x) @ F.normalize(x).T, torch.arange(len(x)))


OWN = {
    "a mean": (lambda x, y: F.cross_entropy(x, y), False),
    "in a mask": (lambda x, y: (F.cross_entropy(x, y, reduction="none") * (y > 0)).sum() / (y > 0).sum(), False),
    "a root": (lambda x, y: x.square().mean().sqrt(), False),
    "contrastive": (apart, True),
    "views": (lambda x, y: F.mse_loss(*x.chunk(2)), True),
    "centred": (lambda x, y: F.cross_entropy(x - x.mean(0), y), True),
    "a loss of torch's": (nn.CrossEntropyLoss(weight=WEIGHT), False),
}


@pytest.mark.parametrize("name", OWN)
def test_a_models_own_loss_is_looked_at_behind_its_last_weights(name):
    """What the model does in front of them, such as its norms of the batch, is no comparison."""
    loss, compares = OWN[name]
    x, y = torch.randn(NUMBER, CLASSES), torch.randint(CLASSES, (NUMBER,))
    traced = trace(Encoder(loss), (x, y))
    (path,) = (path for path, leaf in trees.walk(traced.output) if leaf.name == traced.output["loss"].name)
    assert own_mixing(traced) == ({path: COMPARES} if compares else {})
