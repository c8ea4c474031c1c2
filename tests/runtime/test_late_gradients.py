"""Gradients that updates read in the model's dtype: numbers are those of converted ones, whoever looks at them."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.cases_late_gradients import WIDTH, assert_same_converted, converted, step, used
from tests.runtime.models import assert_equal_bits, config, square_loss

__all__ = ["used"]  # a fixture
pytestmark = pytest.mark.timeout(120)
STEPS = 6
KINDS = {
    "AdamW fused": lambda given: torch.optim.AdamW(given, 0.01, fused=True),
    "AdamW": lambda given: torch.optim.AdamW(given, 0.01),
    "Adam amsgrad fused": lambda given: torch.optim.Adam(given, 0.01, amsgrad=True, fused=True, weight_decay=0.1),
    "SGD": lambda given: torch.optim.SGD(given, 0.01),
    "SGD momentum fused": lambda given: torch.optim.SGD(given, 0.01, momentum=0.9, fused=True),
}


def train(kind, step, *, is_async=True, dtype=torch.bfloat16, devices=("cpu", "cpu")):
    """Losses, weights and states after some steps, in each of which ``step(optimizer, copies, index)`` is `step_fn`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).to(dtype)
    found = []
    with roundpipe.RoundPipe(
        model, torch.float32, devices=devices, model_run_config=config(2, residency="off")
    ) as piped:
        copies = list(piped.optim_parameters())
        optimizer = KINDS[kind](copies)
        for index in range(STEPS):
            value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(dtype)
            found.append(piped.forward_backward((value,), loss_fn=square_loss).detach())
            piped.step(lambda index=index: found.append(step(optimizer, copies, index)), is_async=is_async).wait()
        piped.synchronize()
        found += [*model.parameters(), *(copy.grad for copy in copies)]
        states = (state for each in copies for state in optimizer.state[each].values())
        found += [each for each in states if isinstance(each, torch.Tensor)]
    return {str(index): each.detach().clone() for index, each in enumerate(found) if each is not None}


def as_converted(monkeypatch, *args, **kwargs):
    """The same training with gradients that are converted before updates."""
    with converted(monkeypatch):
        return train(*args, **kwargs)


def clip(optimizer, copies, index, clip=lambda *args: torch.nn.utils.clip_grad_norm_(*args)):
    norm = clip(copies, 0.05)
    step(optimizer, copies, index)
    return norm


def clip_twice(optimizer, copies, index):
    clip(optimizer, copies[:2], index, lambda *args: None)
    torch.nn.utils.clip_grad_norm_(iter(copies), max_norm=0.05, norm_type=1)
    return clip(optimizer, copies, index, roundpipe.clip_grad_norm_)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same(kind, used, monkeypatch):
    for is_async, dtype in itertools.product((True, False), (torch.bfloat16, torch.float16)):
        used.clear()
        found = train(kind, step, is_async=is_async, dtype=dtype)
        assert used.count(dtype) == 6 * (STEPS - ("momentum" in kind)), used  # SGD makes its state of the first
        assert_equal_bits(found, as_converted(monkeypatch, kind, step, is_async=is_async, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_async", [True, False])
def test_training_on_a_card_is_the_same(is_async, used, monkeypatch):
    options = {"is_async": is_async, "devices": ("cuda:0",)}
    found = train("AdamW fused", clip, **options)
    assert used.count(torch.bfloat16) == 6 * STEPS
    expected = as_converted(monkeypatch, "AdamW fused", clip, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clips", [clip, lambda *args: clip(*args, clip=roundpipe.clip_grad_norm_), clip_twice])
def test_clipping_by_the_norm_leaves_them_late(clips, used, monkeypatch):
    found = train("AdamW fused", clips)
    assert used.count(torch.bfloat16) == 6 * STEPS
    torch.testing.assert_close(found, as_converted(monkeypatch, "AdamW fused", clips), rtol=1e-5, atol=1e-6)


def look_at_one(optimizer, copies, index):
    seen = copies[1].grad.clone() if index == 3 else None
    step(optimizer, copies, index)
    return seen


def look_behind(optimizer, copies, index):
    optimizer.step()
    seen = copies[1].grad.clone()
    optimizer.zero_grad()
    return seen


def give_others(optimizer, copies, index):
    copies[0].grad = torch.ones_like(copies[0])
    copies[1].grad = None
    copies[2].grad.mul_(2)
    step(optimizer, copies, index)


def penalize(optimizer, copies, index):
    """A graph on the copies adds to their gradients."""
    with torch.enable_grad():
        sum(each.square().sum() for each in copies).backward()
    step(optimizer, copies, index)


def copy_them(optimizer, copies, index):
    copied, pickled = copy.deepcopy(copies[0]), pickle.loads(pickle.dumps(copies[1]))
    assert type(copied) is type(pickled) is nn.Parameter
    step(optimizer, copies, index)


def step_every_second_time(optimizer, copies, index):
    if index % 2:
        step(optimizer, copies, index)


def keep_zeros(optimizer, copies, index):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def zero_before(optimizer, copies, index):
    if index:
        optimizer.step()
    for each in copies:
        each.grad = None


def clip_by_value(optimizer, copies, index):
    torch.nn.utils.clip_grad_value_(copies, 0.01)
    step(optimizer, copies, index)


def measure(optimizer, copies, index):
    norm = torch.nn.utils.get_total_norm([each.grad for each in copies])
    step(optimizer, copies, index)
    return norm


def with_closure(optimizer, copies, index):
    optimizer.step(lambda: torch.zeros(()))
    optimizer.zero_grad()


def with_hook(optimizer, copies, index):
    def triple(*args):
        copies[0].grad.mul_(3)

    if index == 3:
        optimizer.register_step_pre_hook(triple)
    step(optimizer, copies, index)


def of_the_model(optimizer, copies, index):
    """Plain Python that is no optimizer of torch's."""
    with torch.no_grad():
        for each in copies:
            each -= 0.1 * each.grad.sign()
            each.grad = None
    optimizer.step()


LOOKS = (
    *(look_at_one, look_behind, give_others, penalize, copy_them, step_every_second_time, keep_zeros, zero_before),
    *(clip_by_value, measure, with_closure, with_hook, of_the_model),
)


@pytest.mark.parametrize("looks", LOOKS)
def test_code_that_looks_at_a_gradient_finds_it(looks, used, monkeypatch):
    for is_async in (True, False):
        found = train("AdamW fused", looks, is_async=is_async)
        assert_equal_bits(found, as_converted(monkeypatch, "AdamW fused", looks, is_async=is_async))


def test_once_they_were_looked_at_they_are_converted_early_again(used):
    train("AdamW fused", look_at_one)
    assert used == [torch.bfloat16] * (3 * 6 + 5)  # all but the one that was looked at


class Own(torch.optim.Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, given):
        super().__init__(given, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each -= 0.1 * each.grad.sign()


def test_other_optimizers_get_converted_gradients(used, monkeypatch):
    """Behind steps of torch's, too, that have left them late."""
    others = []

    def step_both(optimizer, copies, index):
        if not others or others[-1].param_groups[0]["params"][0] is not copies[0]:
            others.append(Own(copies[:2]))
        if index >= 3:
            others[-1].step()
        step(optimizer, copies, index)

    found = train("AdamW fused", step_both)
    assert torch.bfloat16 in used
    assert_equal_bits(found, as_converted(monkeypatch, "AdamW fused", step_both))


def test_a_compiled_step_is_the_same_but_for_rounding(used, monkeypatch):
    compiled = []

    def step_compiled(optimizer, copies, index):
        if index == 0:
            compiled.append(torch.compile(optimizer.step, backend="eager"))
        compiled[-1]()
        optimizer.zero_grad()

    found = train("AdamW fused", step_compiled)
    torch.testing.assert_close(found, as_converted(monkeypatch, "AdamW fused", step_compiled), rtol=1e-4, atol=1e-4)


def test_a_scaler_unscales_converted_gradients(used, monkeypatch):
    def train_scaled():
        scaler = roundpipe.GradScaler(init_scale=1.0)

        def unscale(optimizer, copies, index):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return train("AdamW fused", unscale, is_async=False)

    assert_same_converted(monkeypatch, train_scaled)


def test_an_update_that_is_not_made_leaves_them_to_the_next(used, monkeypatch):
    """A step whose loss fails: what was taken late before it counts as it does when it is converted."""

    def train_on():
        torch.manual_seed(0)
        model, found = nn.Linear(WIDTH, WIDTH).bfloat16(), []
        with roundpipe.RoundPipe(model, torch.float32, devices=["cpu"]) as piped:
            optimizer = torch.optim.AdamW(piped.optim_parameters(), 0.01, fused=True)

            def fail():
                raise ValueError("on purpose")

            for index in range(6):
                value = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index)).bfloat16()
                piped.forward_backward((value,), loss_fn=square_loss)
                with pytest.raises(ValueError, match="on purpose") if index == 4 else torch.no_grad():
                    piped.step(fail if index == 4 else lambda: step(optimizer, (), 0)).result()
            piped.synchronize()
            found += [*model.parameters(), *piped.optim_parameters()]
        return {str(index): each.detach().clone() for index, each in enumerate(found)}

    assert_same_converted(monkeypatch, train_on)
    assert torch.bfloat16 in used


def loop_of_its_own(looks, *, steps=3):
    """Weights and gradients of a loop that steps the copies' optimizer itself."""
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16(), []
    with roundpipe.RoundPipe(model, torch.float32, devices=["cpu"]) as piped:
        copies = list(piped.optim_parameters())
        optimizer = torch.optim.AdamW(copies, 0.1, fused=True)
        for index in range(steps):
            for part in range(2):  # accumulated
                value = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * index + part)).bfloat16()
                piped.forward_backward((value,), loss_fn=square_loss)
                found += [] if part else [looks(piped, copies)]
            optimizer.step()
            found += [copy.grad for copy in copies]
            optimizer.zero_grad()
        piped.synchronize()
        found += [*model.parameters(), *copies]
    return {str(index): each.detach().clone() for index, each in enumerate(found) if each is not None}


def evaluate(piped):
    with torch.no_grad():
        piped(torch.ones(2, WIDTH).bfloat16())


FIRST_LOOKS = {
    "nothing": lambda piped, copies: None,
    "a gradient": lambda piped, copies: copies[1].grad.clone(),
    "the model's": lambda piped, copies: piped.model[0].weight.grad.clone(),
    "clipping": lambda piped, copies: torch.nn.utils.clip_grad_norm_(copies, 0.1),
    "clearing": lambda piped, copies: [setattr(each, "grad", None) for each in copies] and None,
    "clearing all": lambda piped, copies: piped.zero_grad(),
    "an evaluation": lambda piped, copies: (evaluate(piped), copies[1].grad.clone())[1],
    "a report": lambda piped, copies: torch.tensor(piped.report().host_memory.gradients) and None,
    "synchronize": lambda piped, copies: piped.synchronize(),
}


@pytest.mark.parametrize("looks", FIRST_LOOKS)
def test_a_loop_of_its_own_finds_the_first_ones(looks, used, monkeypatch, recwarn):
    assert_same_converted(monkeypatch, lambda: loop_of_its_own(FIRST_LOOKS[looks]))
    assert not [each for each in recwarn if "gradients came" in str(each.message)]


def test_nothing_keeps_memory_for_converted_gradients(used):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()
    with roundpipe.RoundPipe(model, torch.float32, devices=["cpu"]) as piped:
        optimizer = torch.optim.AdamW(piped.optim_parameters(), 0.01, fused=True)
        for _ in range(4):
            piped.forward_backward((torch.ones(2, WIDTH).bfloat16(),), loss_fn=square_loss)
            piped.step(lambda: step(optimizer, (), 0))
        piped.synchronize()
        pairs = piped._session.optimizer.parameter_pairs()  # what a user has no word for
        assert all(pair.may_be_late and pair.spare is None and pair.early.memory is None for pair in pairs)
        assert {type(each) for each in piped.optim_parameters()} == {nn.Parameter}
