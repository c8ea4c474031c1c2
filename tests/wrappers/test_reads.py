"""What reads the model after an asynchronous step sees the update that was asked for: W[k], not W[k-1]."""

import copy
import io
import pickle
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import DTYPE, assert_same, batch, config, square_loss

LR = 0.05


class Net(nn.Module):
    """Has a parameter of its own beside its modules, and a statistic."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return self.head(self.encoder(x * self.scale))

    @torch.no_grad()
    def generate(self, x):
        """As encoder-decoder models do: the encoder is called by itself first."""
        hidden = self.encoder(x)
        return [self.head(hidden), self(x)]


def net():
    torch.manual_seed(0)
    return Net().to(DTYPE)


def plain_values(model):
    """Past every hook."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().clone() for name, value in tensors.items()}


def train(piped, steps=3, is_async=True, then=lambda: None):
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)

    def update():
        if is_async:
            time.sleep(0.05)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(steps):
        piped.forward_backward((batch(seed=number),), loss_fn=square_loss, run_config=config(2))
        piped.step(update, is_async)
        then()


@pytest.fixture(scope="module")
def expected():
    """The weights of the same steps, read after `synchronize`."""
    model = net()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        train(piped)
        piped.synchronize()
        return plain_values(model)


@pytest.fixture
def piped():
    with roundpipe.compile(net(), devices=["cpu"] * 2) as wrapper:
        train(wrapper)
        yield wrapper


def loaded(values):
    other = net()
    other.load_state_dict(values)
    return other


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


STATES = {
    "state_dict of the model": lambda piped: piped.model.state_dict(),
    "state_dict of the wrapper": lambda piped: piped.state_dict(),
    "deepcopy": lambda piped: plain_values(copy.deepcopy(piped.model)),
    "deepcopy of the wrapper": lambda piped: plain_values(copy.deepcopy(piped).model),
    "pickle": lambda piped: plain_values(pickle.loads(pickle.dumps(piped.model))),
    "torch.save": lambda piped: plain_values(saved(piped.model)),
    "synchronize": lambda piped: (piped.synchronize(), plain_values(piped.model))[1],
    "handle and synchronize": lambda piped: (piped.step(lambda: None).wait(), piped.state_dict())[1],
}


@pytest.mark.parametrize("read", STATES.values(), ids=STATES)
def test_state(piped, expected, read):
    assert_same({name: value for name, value in read(piped).items() if "num_batches" not in name}, without(expected))


def without(values):
    return {name: value for name, value in values.items() if "num_batches" not in name}


def unpickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("read", [copy.deepcopy, unpickled, saved], ids=lambda read: read.__name__)
@pytest.mark.parametrize("owner", ["the model", "the wrapper"])
def test_parameters(piped, expected, owner, read):
    names = [name for name, _ in piped.named_parameters()]
    first = next((piped.model if owner == "the model" else piped).parameters())
    torch.testing.assert_close(read(first).detach(), expected[names[0]], rtol=0, atol=1e-10)
    train(piped, 1)
    piped.step(lambda: time.sleep(0.05))
    found = read(dict(piped.model.named_parameters()) if owner == "the model" else list(piped.parameters()))
    found = list(found.values()) if isinstance(found, dict) else found
    piped.synchronize()
    for value, own in zip(found, piped.model.parameters(), strict=True):
        assert type(value) is nn.Parameter and vars(value) == {}
        torch.testing.assert_close(value, own, rtol=0, atol=0)


def test_parameters_of_other_models_are_copied_without_waiting(piped):
    gate, other = threading.Event(), nn.Linear(2, 2)
    handle = piped.step(lambda: gate.wait(30))
    assert torch.equal(copy.deepcopy(other.weight), other.weight) and torch.equal(unpickled(other).bias, other.bias)
    assert not handle.done()
    gate.set()


@pytest.mark.parametrize("name", ["encoder", "head.0"])
def test_state_of_a_part(expected, name):
    for read in (lambda part: part.state_dict(), lambda part: plain_values(copy.deepcopy(part))):
        with roundpipe.compile(net(), devices=["cpu"] * 2) as piped:
            train(piped)
            found = read(piped.model.get_submodule(name))
        assert_same(without(found), {n: expected[f"{name}.{n}"] for n in without(found)})


CALLS = {
    "the model in eval mode": lambda model, piped: model.eval()(batch()),
    "the model without gradients": lambda model, piped: torch.no_grad()(model)(batch()),
    "the model in inference mode": lambda model, piped: torch.inference_mode()(model)(batch()),
    "a part in eval mode": lambda model, piped: model.eval().encoder(batch()),
    "the wrapper in eval mode": lambda model, piped: piped.eval()(batch()),
    "the wrapper without gradients": lambda model, piped: torch.no_grad()(piped)(batch()),
    "the wrapper with an option": lambda model, piped: piped(
        batch(), roundpipe_run_config=roundpipe.RoundPipeRunConfig(requires_grad=False, num_microbatch=1)
    ),
    "generate of the model": lambda model, piped: model.eval().generate(batch()),
    "generate of the wrapper": lambda model, piped: piped.eval().generate(batch()),
    "the loss": lambda model, piped: piped.eval().forward_loss((batch(),), loss_fn=square_loss, run_config=config(2)),
}


@pytest.mark.parametrize("called", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("where", ["after a step", "after a round"])
def test_calls(piped, expected, called, where):
    model = piped.model.eval()
    if where == "after a round":  # which began on the weights before the update
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))
    torch.testing.assert_close(
        called(model, piped), called(loaded(expected).eval(), Reference(expected)), rtol=0, atol=1e-10
    )


def test_reads_of_a_hugging_face_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, use_cache=False, **sizes))
    ids = torch.randint(1, 50, (4, 6))
    options = {"max_new_tokens": 3, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}

    def saved_by(owner):
        owner.save_pretrained(tmp_path)
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.detach()

    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        for owner in (model, piped):
            for read in (
                saved_by,
                lambda each: each.eval().generate(ids[:, :2], do_sample=False, **options).scores[-1],
            ):
                for _ in range(2):
                    piped.train().forward_backward(
                        input_kwargs={"input_ids": ids, "labels": ids},
                        loss_fn=lambda outputs, _: outputs.loss,
                        loss_reduction="mean",
                    )
                    piped.step(lambda: (time.sleep(0.05), optimizer.step(), optimizer.zero_grad()))
                found = read(owner)
                piped.synchronize()
                assert torch.equal(found, read(owner))


class Reference:
    """The same calls of a model that has the weights for certain."""

    def __init__(self, values):
        self.model = loaded(values).eval()

    def __call__(self, x, roundpipe_run_config=None):
        return self.model(x)

    def eval(self):
        return self

    def generate(self, x):
        return self.model.generate(x)

    def forward_loss(self, args, loss_fn, run_config):
        return loss_fn(self.model(*args), None).detach()


@pytest.mark.parametrize("reads", [False, True])
def test_training_is_as_stale_as_before_where_nobody_reads(reads):
    """Each round but the first trains on weights one update old; behind a read, on the latest."""

    def trajectory(piped, model):
        seen = []
        train(piped, 5, then=(lambda: seen.append(len(model.state_dict()))) if reads else lambda: None)
        piped.synchronize()
        return plain_values(model)

    model = net()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        found = trajectory(piped, model)
    own = net()
    with roundpipe.compile(own, devices=["cpu"] * 2) as piped:
        train(piped, 5, is_async=not reads, then=piped.synchronize if reads else lambda: None)
        piped.synchronize()
        assert_same(found, plain_values(own))


def test_training_calls_find_no_hook_and_do_not_wait(piped):
    """The round behind an update begins before the update has ended."""
    model, gate = piped.model, threading.Event()
    handle = piped.step(lambda: gate.wait(30))
    assert model._forward_pre_hooks
    seen = []
    piped.forward_backward(
        (batch(),), loss_fn=lambda out, _: (seen.append(len(model._forward_pre_hooks)), out.sum())[1]
    )
    traces = piped.trace_count
    model.train()(batch())  # with gradients, in training mode: part of training
    assert not handle.done() and seen and not any(seen)
    gate.set()
    for _ in range(3):
        train(piped, 1)
    assert piped.trace_count == traces


def test_copies_and_closed_or_dropped_models_have_no_hooks(piped):
    model = piped.model
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(module._forward_pre_hooks for module in other.modules())
        assert_same(without(plain_values(other)), without(dict(other.state_dict())))
    train(piped, 1)
    other = copy.deepcopy(model)
    assert not any(module._forward_pre_hooks for module in other.modules())
    with roundpipe.compile(other, devices=["cpu"]) as wrapper:
        train(wrapper, 1)
        assert other._forward_pre_hooks
    train(piped, 1)
    piped.close()
    for each in (model, other):
        assert not any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in each.modules() if each is model)
        assert not any(m._forward_pre_hooks for m in each.modules())


def test_a_dropped_wrapper_leaves_no_hooks():
    model = net()
    piped = roundpipe.compile(model, devices=["cpu"])
    train(piped, 2)
    del piped
    deadline = time.monotonic() + 20
    while any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_reads_inside_a_step_fn(piped):
    model = piped.model
    with pytest.raises(roundpipe.ConfigError, match="asynchronous step_fn"):
        piped.step(model.state_dict).result()
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
    piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))

    def update():
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    piped.step(update, is_async=False)


def test_reads_while_a_round_needs_them_do_not_wait(piped):
    """A loss function that reads the model's state is part of the round."""

    def loss(outputs, label):
        return outputs.square().sum() + sum(value.sum() for value in piped.model.state_dict().values()) * 0

    piped.forward_backward((batch(),), loss_fn=loss, run_config=config(2))


def test_what_an_update_raised_is_raised_by_the_read(piped):
    def fails():
        raise KeyError("mine")

    piped.step(fails)
    with pytest.raises(KeyError, match="mine"):
        piped.model.state_dict()
    piped.model.state_dict()
