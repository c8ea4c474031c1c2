"""Steps of training beside plain PyTorch: every kind of optimizer, low precision, buffers, frozen parameters."""

import copy
import itertools

import pytest
import torch
from torch import nn

import roundpipe
from tests.repeats import repeats
from tests.runtime.cases_training import NUM, eager_backward, modes, workers
from tests.runtime.models import DTYPE, assert_same, batch, buffers, config, gradients, mlp, pieces, square_loss


class Behind:
    """Plain PyTorch that trains on weights one update old, or, ``is_async=False``, an ordinary loop."""

    def __init__(self, model, make_optimizer, is_async, dtype=None):
        self.model = model
        self.is_async = is_async
        self.latest = [nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in model.parameters()]
        self.optimizer = make_optimizer(self.latest)
        self.grad_scaler = None

    def update(self):
        with torch.no_grad():
            for parameter, newest in zip(self.model.parameters(), self.latest, strict=True):
                newest.grad = None if parameter.grad is None else parameter.grad.to(newest.dtype)
                parameter.grad = None
        if self.is_async:
            self._copy_in()
        if self.grad_scaler is None:
            self.optimizer.step()
        else:
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        if not self.is_async:
            self._copy_in()

    @torch.no_grad()
    def _copy_in(self):
        for parameter, newest in zip(self.model.parameters(), self.latest, strict=True):
            parameter.copy_(newest)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "workers, is_async", repeats(itertools.product((1, 2, 3, 4), (True, False)), ["2-True", "1-False"])
)
def test_any_optimizer_trains_as_in_eager(workers, is_async, kind):
    model = mlp()
    plain = Behind(copy.deepcopy(model), OPTIMIZERS[kind], is_async)
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        optimizer = OPTIMIZERS[kind](piped.optim_parameters())

        def update():
            optimizer.step()
            optimizer.zero_grad()

        for seed in range(4):
            x = batch(seed=seed)
            expected = eager_backward(plain.model, x)
            plain.update()
            loss = piped.forward_backward((x,), loss_fn=square_loss, run_config=config(NUM))
            piped.step(update, is_async=is_async)
            assert float(loss) == pytest.approx(expected, rel=1e-9)
        piped.synchronize()
        for ours, theirs in zip(model.parameters(), plain.latest, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("backward", ["forward_backward", "forward", "two forwards"])
@workers
def test_lbfgs_evaluates_the_model_in_a_step_that_is_not_asynchronous(workers, backward):
    model = mlp()
    reference = copy.deepcopy(model)
    eager = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        ours = torch.optim.LBFGS(piped.optim_parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

        def expected_closure():
            eager.zero_grad()
            return torch.tensor(eager_backward(reference, batch()))

        def closure():
            ours.zero_grad()
            if backward == "forward_backward":
                return piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(NUM))
            number = 2 if backward == "two forwards" else 1
            losses = [square_loss(piped(batch(), roundpipe_run_config=config(NUM)), None) for _ in range(number)]
            loss = torch.stack(losses).mean()
            loss.backward()
            return loss.detach()

        for _ in range(2):
            eager.step(expected_closure)
            piped.step(lambda: ours.step(closure), is_async=False)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


def test_lbfgs_in_an_asynchronous_step_is_refused():
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.LBFGS(piped.optim_parameters())
        piped.step(
            lambda: optimizer.step(lambda: piped.forward_backward((batch(),), loss_fn=square_loss)), is_async=True
        )
        with pytest.raises(roundpipe.ConfigError, match="inside an asynchronous step_fn.*LBFGS.*is_async=False"):
            piped.synchronize()
        assert torch.isfinite(piped.forward_backward((batch(),), loss_fn=square_loss))


def classifier():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4))


def problem(num_steps, dtype):
    """Points, and which of four random half-spaces each lies deepest in."""
    generator = torch.Generator().manual_seed(6)
    truth = torch.randn(8, 4, generator=generator)
    points = [torch.randn(12, 8, generator=generator) for _ in range(num_steps)]
    return [(x.to(dtype), (x @ truth).argmax(1)) for x in points]


def class_loss(outputs, labels):
    return nn.functional.cross_entropy(outputs.float(), labels, reduction="sum") / 12


class StaleScaler:
    """A scaler by hand: the losses of a step are scaled by what the update two steps before has left."""

    def __init__(self, init_scale, growth_interval):
        self.scales = [init_scale, init_scale]
        """Used by this step's losses; by the next one's."""
        self.interval, self.good_steps = growth_interval, 0

    def scale(self, loss):
        return loss * self.scales[0]

    def step(self, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in parameters:
            p.grad /= self.scales[0]
        self.overflowed = not all(p.grad.isfinite().all() for p in parameters)
        if not self.overflowed:
            optimizer.step()

    def update(self):
        used, latest = self.scales
        self.good_steps = 0 if self.overflowed else self.good_steps + 1
        if self.overflowed:
            latest = min(latest, used / 2)
        elif self.good_steps == self.interval:
            latest, self.good_steps = latest * 2, 0
        self.scales = [self.scales[1], latest]

    def get_scale(self):
        return self.scales[1]


@pytest.mark.parametrize(
    "dtype, is_async",
    repeats(itertools.product((torch.bfloat16, torch.float16), (True, False)), ["torch.float16-True"]),
)
def test_mixed_precision_tracks_plain_pytorch_for_200_steps(dtype, is_async):
    """Float32 master weights and gradients beside a model in low precision; float16 with a scaler that backs off."""
    num_steps = 200
    model = classifier().to(dtype)
    make = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True)  # noqa: E731
    plain = Behind(copy.deepcopy(model), make, is_async, torch.float32)
    options = {"init_scale": 2.0**17, "growth_interval": 30}
    scaler = roundpipe.GradScaler(**options) if dtype is torch.float16 else None
    if scaler is not None:
        plain.grad_scaler = StaleScaler(**options) if is_async else torch.amp.GradScaler("cpu", **options)
    curves, expected, scales = [], [], []
    with roundpipe.RoundPipe(model, torch.float32, devices=["cpu"] * 2) as piped:
        optimizer = make(piped.optim_parameters())

        def scaled_loss(outputs, labels):
            loss = class_loss(outputs, labels)
            return loss if scaler is None else [scaler.scale(loss), loss.detach().requires_grad_()]

        def update():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            optimizer.zero_grad()

        for x, labels in problem(num_steps, dtype):
            loss = piped.forward_backward((x,), label=labels, loss_fn=scaled_loss, run_config=config(NUM))
            curves.append(float(loss if scaler is None else loss[1]))
            piped.step(update, is_async=is_async)
            total = 0.0
            for one, label in zip(pieces(x, NUM), pieces(labels, NUM), strict=True):
                plain_loss = class_loss(plain.model(one), label)
                total += float(plain_loss.detach())
                (plain_loss if plain.grad_scaler is None else plain.grad_scaler.scale(plain_loss)).backward()
            expected.append(total)
            plain.update()
        piped.synchronize()
    assert len(curves) == num_steps and expected[0] > 1.3 and sum(expected[-20:]) / 20 < 0.4
    differences = torch.tensor(curves) - torch.tensor(expected)
    assert differences.abs().max() < 1e-3 and differences.abs().mean() < 1e-4
    for ours, theirs in zip(piped.optim_parameters(), plain.latest, strict=True):
        assert ours.dtype is torch.float32
        assert (ours - theirs).norm() < 1e-3 * theirs.norm() + 1e-5
    if scaler is not None:
        assert len(set(scales)) > 2 and min(scales) < scales[0] and scales[-1] == plain.grad_scaler.get_scale()


class Assigned(nn.Module):
    """Replaces its buffers instead of writing them; the last has no value at first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", None)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count = self.count + 1
            self.last = x.detach().amax(0)
        return x + torch.tanh(self.linear(x - self.mean))


def old_spectral():
    return nn.utils.spectral_norm(nn.Linear(6, 6), n_power_iterations=2)


def new_spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6), n_power_iterations=2)


def weight_norm():
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


BUFFERED = {
    "old_spectral": old_spectral,
    "spectral": new_spectral,
    "weight_norm": weight_norm,
    "assigned": Assigned,
}


@pytest.mark.parametrize("kind", BUFFERED)
@pytest.mark.parametrize(
    ("wrap", "workers"),
    [
        *((roundpipe.RoundPipe, number) for number in (1, 3)),
        (roundpipe.compile, 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((roundpipe.RoundPipe, 2), (roundpipe.RoundPipe, 4), (roundpipe.compile, 3))
        ),
    ],
)
def test_buffers_that_a_forward_replaces_are_eagers(workers, wrap, kind):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(BUFFERED[kind](), nn.Tanh()) for _ in range(4))).to(DTYPE)
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    with wrap(model, devices=["cpu"] * workers) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.05)
        for seed in range(3):
            x = batch(seed=seed)
            expected = eager_backward(reference, x)
            loss = piped.forward_backward((x,), loss_fn=square_loss, run_config=config(NUM))
            assert float(loss) == pytest.approx(expected, rel=1e-9)
            piped.synchronize()
            assert_same(gradients(model), gradients(reference))
            assert_same(buffers(model), buffers(reference))
            plain.step()
            plain.zero_grad()
            piped.step(optimizer.step, is_async=False)
            piped.zero_grad()
        assert type(piped) is roundpipe.RoundPipe and "runs module by module" not in piped.partition_table()
        reference.eval()
        piped.eval()
        with torch.no_grad():
            torch.testing.assert_close(piped(batch()), reference(batch()), rtol=0, atol=1e-9)
        assert_same(buffers(model), buffers(reference))


@workers
def test_parameters_frozen_and_thawed_between_steps(workers):
    """A frozen parameter neither moves nor keeps a gradient; thawed, it goes on with its optimizer state."""
    model = mlp()
    reference = copy.deepcopy(model)
    make = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)  # noqa: E731
    plain = make(reference.parameters())
    schedule = [set(), {"1.0.weight"}, {"1.0.weight", "0.0.bias"}, {"0.0.bias"}, set()]
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        assert schedule[1] <= dict(model.named_parameters()).keys()
        optimizer = make(piped.optim_parameters())

        def update():
            optimizer.step()
            optimizer.zero_grad()

        for seed, frozen in enumerate(schedule):
            for holder in (model, reference):
                for name, parameter in holder.named_parameters():
                    parameter.requires_grad_(name not in frozen)
            expected = eager_backward(reference, batch(seed=seed))
            plain.step()
            plain.zero_grad()
            loss = piped.forward_backward((batch(seed=seed),), loss_fn=square_loss, run_config=config(NUM))
            piped.step(update, is_async=False)
            assert float(loss) == pytest.approx(expected, rel=1e-9)
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@modes
@workers
def test_after_an_exception_in_step_fn_training_goes_on(workers, is_async):
    class Mine(Exception):
        pass

    model = mlp()
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.05)

        def fail():
            raise Mine("no")

        def update():
            optimizer.step()
            optimizer.zero_grad()

        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(NUM))
        with pytest.raises(Mine) as caught:
            piped.step(fail, is_async=is_async)
            piped.synchronize()
        assert "raised in step_fn of step 1" in caught.value.__notes__[0]
        eager_backward(reference, batch())
        plain.step()
        piped.step(update, is_async=False)  # the gradients that the failed step did not use are still there
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
