"""Checkpoints: a resumed run equals one that never stopped, and no crash or error loses the previous one."""

import collections
import os
import random
import re
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core import random_state
from roundpipe.core.errors import CheckpointMisfitError, ConfigError
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.wrappers import checkpoint
from tests.faults.checkpoints import as_first_version
from tests.wrappers.cases_checkpoint import WIDTH, Tied, adamw, assert_equal, clones, loss, piped, sgd, train


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, None), (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_resuming_is_equal_bit_for_bit(tmp_path, make_optimizer, is_async, dtypes):
    with piped(1, dtype=dtypes[0], optim_dtype=dtypes[1]) as model:
        optimizer = make_optimizer(model)
        train(model, optimizer, 3, is_async)
        model.save_checkpoint(tmp_path / "c", optimizer, step=3)
        at_save = clones(model)
        train(model, optimizer, 3, is_async)
        expected = clones(model)
    assert any(not torch.equal(at_save[name], tensor) for name, tensor in expected.items())
    with piped(3, dtype=dtypes[0], optim_dtype=dtypes[1], seed=2) as model:
        optimizer = make_optimizer(model)
        train(model, optimizer, 1, is_async)
        assert model.load_checkpoint(tmp_path / "c", optimizer) == checkpoint.Checkpoint(3, None)
        assert_equal(clones(model), at_save)
        train(model, optimizer, 3, is_async)
        assert_equal(clones(model), expected)


OF_TORCH = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.mark.parametrize("kind", OF_TORCH)
def test_each_of_torchs_optimizers_resumes(tmp_path, kind):
    kernels = [(1, 3), (4, 1)]  # sums over dimensions of one element have the whole shape, others have not

    def convolutions():
        torch.manual_seed(1)
        layers = [nn.Conv1d(channels, 4, kernel, padding="same") for channels, kernel in kernels]
        return roundpipe.RoundPipe(nn.Sequential(*layers), devices=["cpu"] * 2)

    def train_on(model, optimizer, seeds):
        for seed in seeds:
            inputs = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(seed))
            model.forward_backward((inputs,), loss_fn=loss)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    with convolutions() as model:
        optimizer = getattr(torch.optim, kind)(model.optim_parameters(), lr=0.01)
        train_on(model, optimizer, range(2))
        model.save_checkpoint(tmp_path / "c", optimizer)
        train_on(model, optimizer, range(2, 4))
        expected = clones(model)
    with convolutions() as model:
        optimizer = getattr(torch.optim, kind)(model.optim_parameters(), lr=0.01)
        model.load_checkpoint(tmp_path / "c", optimizer)
        train_on(model, optimizer, range(2, 4))
        assert_equal(clones(model), expected)


def test_a_save_without_a_pause_before_it_has_the_latest_update(tmp_path):
    def iterate(model, optimizer):
        inputs = (torch.randn(8, WIDTH),)
        model.forward_backward(inputs, loss_fn=loss, run_config=roundpipe.RoundPipeRunConfig(num_microbatch=2))
        model.step(lambda: (time.sleep(0.02), optimizer.step(), optimizer.zero_grad()))

    def run(model, optimizer, save):
        for index in range(4):
            iterate(model, optimizer)
            if save and index == 1:
                model.save_checkpoint(tmp_path / "c", optimizer)
            elif index == 1:
                model.synchronize()
        model.synchronize()

    results = []
    for save in (False, True):
        with piped() as model:
            run(model, sgd(model), save)
            results.append(clones(model))
    assert_equal(*results)  # saving acts on the weights as synchronize() does
    with piped(2) as model:
        optimizer = sgd(model)
        model.load_checkpoint(tmp_path / "c", optimizer)
        for _ in range(2):
            iterate(model, optimizer)
        model.synchronize()
        assert_equal(clones(model), results[0])


def test_scheduler_and_scaler_go_on(tmp_path):
    def parts(model):
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
            ],
            milestones=[2],
        )
        return optimizer, scheduler, roundpipe.GradScaler(init_scale=4.0, growth_interval=2)

    with piped() as model:
        optimizer, scheduler, scaler = parts(model)
        train(model, optimizer, 3, True, scheduler, scaler)
        model.save_checkpoint(tmp_path / "c", optimizer, scheduler, scaler)
        train(model, optimizer, 3, True, scheduler, scaler)
        expected, rate, scale = clones(model), scheduler.get_last_lr(), scaler.state_dict()
    with piped(2, seed=2) as model:
        optimizer, scheduler, scaler = parts(model)
        model.load_checkpoint(tmp_path / "c", optimizer, scheduler, scaler)
        train(model, optimizer, 3, True, scheduler, scaler)
        assert_equal(clones(model), expected)
        assert (scheduler.get_last_lr(), scaler.state_dict()) == (rate, scale)


def test_random_generators_go_on(tmp_path):
    numpy = pytest.importorskip("numpy")

    def draw():
        return torch.rand(3).tolist(), random.random(), numpy.random.normal(size=3).tolist()

    with piped() as model:
        draw()
        model.save_checkpoint(tmp_path / "c")
        expected = draw()
        assert draw() != expected
        model.load_checkpoint(tmp_path / "c")
        assert draw() == expected


def test_generators_of_accelerators_go_on_as_far_as_there_are_as_many(monkeypatch):
    class Module:
        def __init__(self, states):
            self.states = states

        def device_count(self):
            return len(self.states)

        def get_rng_state(self, index):
            return torch.tensor([self.states[index]])

        def set_rng_state(self, state, index):
            self.states[index] = int(state)

    def with_accelerator(kind, *states):
        module = Module(list(states))
        # of a device that is not here
        monkeypatch.setattr(random_state, "_accelerator", lambda wanted=None: (kind, module))
        return module

    with_accelerator("cuda", 1, 2)
    saved = random_state.portable_random_state()
    for kind, before, after in (("cuda", [7, 8, 9], [1, 2, 9]), ("cuda", [7], [1]), ("xpu", [7, 8], [7, 8])):
        module = with_accelerator(kind, *before)
        random_state.restore_random_state(saved)
        assert module.states == after


def test_step_and_extra_come_back(tmp_path):
    numpy = pytest.importorskip("numpy")
    extra = {
        "list": [1, 2.5, None, True, "text", b"bytes", 1j, 2**100],
        "tuple": (torch.arange(3), torch.float16, torch.Size([2]), torch.device("cpu")),
        "set": {1, 2},
        3: collections.OrderedDict(a=collections.Counter("aab")),
    }
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=7, extra=extra | {"loss": numpy.float64(0.5)})
        found = model.load_checkpoint(tmp_path / "c")
        assert found.step == 7
        assert torch.equal(found.extra["tuple"][0], torch.arange(3))
        assert type(found.extra.pop("loss")) is float
        found.extra["tuple"] = found.extra["tuple"][1:]
        assert found.extra == extra | {"tuple": extra["tuple"][1:]}
        for wrong in (object(), {"a": [lambda: 0]}, numpy.zeros(2)):
            with pytest.raises(ConfigError, match=r"extra.* can't be in a checkpoint"):
                model.save_checkpoint(tmp_path / "c", extra=wrong)
        with pytest.raises(ConfigError, match="step is 1.5"):
            model.save_checkpoint(tmp_path / "c", step=1.5)
        assert model.load_checkpoint(tmp_path / "c").step == 7


def test_a_part_of_a_large_memory_is_saved_alone(tmp_path):
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", extra=torch.zeros(1_000_000)[:2])
        assert os.path.getsize(tmp_path / "c" / "training_state.pt") < 100_000


def test_optimizer_state_is_kept_by_name(tmp_path):
    def groups(model, order):
        named = dict(model.optim_named_parameters())
        return torch.optim.AdamW(
            [{"params": [named[n] for n in names], "lr": lr} for names, lr in order], lr=1.0, amsgrad=True
        )

    with piped(depth=1) as model:
        names = [name for name, _ in model.optim_named_parameters()]
        optimizer = groups(model, [(names[:2], 0.1), (names[2:], 0.2)])
        train(model, optimizer, 2)
        model.save_checkpoint(tmp_path / "c", optimizer)
        expected = {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.optim_named_parameters()}
    with piped(depth=1) as model:
        optimizer = groups(model, [(names[1::-1], 1.0), (names[:1:-1], 1.0)])
        model.load_checkpoint(tmp_path / "c", optimizer)
        assert_equal({n: optimizer.state[p]["exp_avg"] for n, p in model.optim_named_parameters()}, expected)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
        with pytest.raises(ConfigError, match="it has 2 parameter groups, the other 1"):
            model.load_checkpoint(tmp_path / "c", adamw(model))
        swapped = groups(model, [(names[2:], 1.0), (names[:2], 1.0)])
        with pytest.raises(
            ConfigError, match=r"in group 0; 2 parameters are missing in it: 0.1.bias, 0.1.weight; 2 of"
        ):
            model.load_checkpoint(tmp_path / "c", swapped)


def test_the_state_of_another_kind_of_optimizer_is_remarked_on_or_refused(tmp_path, caplog):
    class Slower(torch.optim.SGD):
        pass

    with piped() as model:
        model.save_checkpoint(tmp_path / "c", sgd(model))
        model.load_checkpoint(tmp_path / "c", sgd(model))
        assert not caplog.records
        model.load_checkpoint(tmp_path / "c", Slower(model.optim_parameters(), lr=1.0))
        assert re.search("state of the optimizer, of class SGD, .*into one of class .*Slower", caplog.text)
        with pytest.raises(CheckpointMisfitError, match="of class SGD, .* has no betas, eps, which AdamW needs"):
            model.load_checkpoint(tmp_path / "c", adamw(model))


@pytest.mark.parametrize("is_first_version", [False, True])
def test_the_state_of_another_kind_of_scheduler_is_remarked_on_or_refused(tmp_path, caplog, is_first_version):
    class Longer(torch.optim.lr_scheduler.StepLR):
        pass

    with piped() as model:
        optimizer = sgd(model)
        train(model, optimizer, 1)
        makers = {
            "StepLR": lambda kind=torch.optim.lr_scheduler.StepLR: kind(optimizer, 2),
            "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
            "SequentialLR": lambda: torch.optim.lr_scheduler.SequentialLR(
                optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)], [3]
            ),
        }
        for saved in makers:
            model.save_checkpoint(tmp_path / "c", optimizer, makers[saved]())
            if is_first_version:
                as_first_version(tmp_path / "c")
            for given in makers:
                scheduler = makers[given]()
                if given == saved:
                    model.load_checkpoint(tmp_path / "c", optimizer, scheduler)
                    continue
                before, rates = clones(model), [group["lr"] for group in optimizer.param_groups]
                fields, torch_state = repr(scheduler.state_dict()), torch.get_rng_state()
                with pytest.raises(CheckpointMisfitError, match="scheduler.* its state|state of the scheduler"):
                    model.load_checkpoint(tmp_path / "c", optimizer, scheduler)
                assert_equal(clones(model), before)
                assert repr(scheduler.state_dict()) == fields and torch.equal(torch.get_rng_state(), torch_state)
                assert [group["lr"] for group in optimizer.param_groups] == rates
        model.save_checkpoint(tmp_path / "c", optimizer, makers["StepLR"]())
        model.load_checkpoint(tmp_path / "c", optimizer, makers["StepLR"](Longer))
        assert re.search("state of the scheduler, of class StepLR, .*into one of class .*Longer", caplog.text)


def test_a_config_that_refuses_to_be_written_does_not_cost_the_checkpoint(tmp_path, caplog):
    class Refusing:
        def save_pretrained(self, folder):
            raise ValueError("temperature without sampling")

    with piped() as model:
        model.generation_config = Refusing()
        model.save_checkpoint(tmp_path / "c", step=1)
        assert "without a Refusing: temperature without sampling" in caplog.text
        assert model.load_checkpoint(tmp_path / "c").step == 1


def test_a_parameter_frozen_since_stays_in_the_optimizer(tmp_path):
    with piped(depth=2) as model:
        optimizer = sgd(model)
        train(model, optimizer, 1)
        model.model[0].requires_grad_(False)
        model.save_checkpoint(tmp_path / "c", optimizer)
        buffer = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].clone()
    with piped(depth=2, seed=2) as model:
        optimizer = sgd(model)
        model.load_checkpoint(tmp_path / "c", optimizer)
        assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"], buffer)


def test_copies_of_another_dtype_load_without_an_optimizer(tmp_path):
    with piped(dtype=torch.bfloat16, optim_dtype=torch.float32) as model:
        model.forward_backward((torch.randn(8, WIDTH, dtype=torch.bfloat16),), loss_fn=loss)

        def plain_sgd():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-4)

        model.step(plain_sgd, is_async=False)
        model.save_checkpoint(tmp_path / "c")
        expected = clones(model)
    with piped(dtype=torch.bfloat16, optim_dtype=torch.float32, seed=2) as model:
        model.load_checkpoint(tmp_path / "c")
        assert_equal(clones(model), expected)
        assert any((p.float() != c).any() for p, c in zip(model.parameters(), model.optim_parameters(), strict=True))
    with piped(seed=2) as model:  # weights of the copies' dtype take their values
        model.load_checkpoint(tmp_path / "c")
        assert torch.equal(next(model.optim_parameters()), expected["optim 0.0.weight"])
        assert torch.equal(next(model.parameters()), expected["optim 0.0.weight"])
    with piped(dtype=torch.bfloat16, seed=2) as model:  # copies of the weights' dtype, the weights
        model.load_checkpoint(tmp_path / "c")
        assert torch.equal(next(model.optim_parameters()), expected["0.0.weight"])


def test_a_load_drops_gradients(tmp_path):
    with piped() as model:
        model.save_checkpoint(tmp_path / "c")
        model.forward_backward((torch.randn(8, WIDTH),), loss_fn=loss)
        model.load_checkpoint(tmp_path / "c")
        model.synchronize()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_pairs_of_an_optimizer_side():
    tied = Tied()
    tied.inner.requires_grad_(False)
    side = OptimizerSide(lambda: tied.named_parameters(remove_duplicate=False), torch.float64)
    try:
        pairs = side.parameter_pairs()
        assert [tuple(pair.names) for pair in pairs] == [
            ("embedding.weight", "head.weight"),
            ("inner.weight",),
            ("inner.bias",),
        ]
        assert [pair.parameter for pair in pairs] == [tied.embedding.weight, tied.inner.weight, tied.inner.bias]
        assert [pair.copy for pair in pairs] == [None] * 3
        (copy,) = side.optim_parameters()
        tied.embedding.requires_grad_(False)
        assert pairs[0].copy is copy and pairs[1].copy is None
    finally:
        side.close()
