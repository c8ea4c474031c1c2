"""Checkpoints: a resumed run equals one that never stopped, and no crash or error loses the previous one."""

import collections
import contextlib
import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core import random_state
from roundpipe.core.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.wrappers import checkpoint, checkpoint_files

WIDTH = 6
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def piped(workers=1, depth=3, dtype=torch.float32, optim_dtype=None, seed=1):
    """Layers with weights, statistics and random draws."""
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(depth)
    ]
    model = nn.Sequential(*layers).to(dtype)
    return roundpipe.RoundPipe(model, optim_dtype=optim_dtype, devices=["cpu"] * workers)


def loss(output, label):
    return output.float().square().sum()


def train(model, optimizer, steps, is_async=False, scheduler=None, scaler=None):
    """Inputs come from torch's generator, so that they repeat only if a load sets it."""
    dtype = next(model.parameters()).dtype

    def update():
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    def scaled(output, label):
        return loss(output, label) if scaler is None else scaler.scale(loss(output, label))

    for _ in range(steps):
        inputs = (torch.randn(8, WIDTH, dtype=dtype),)
        model.forward_backward(inputs, loss_fn=scaled, run_config=roundpipe.RoundPipeRunConfig(num_microbatch=2))
        model.step(update, is_async)
    model.synchronize()


def clones(model):
    """Everything that a step changes."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {f"optim {name}": copy.detach().clone() for name, copy in model.optim_named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def sgd(model):
    return torch.optim.SGD(model.optim_parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.optim_parameters(), lr=0.01)


# ------------------------------------------------------------------------------------------ resuming


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


def test_the_state_of_another_kind_of_optimizer_is_remarked_on(tmp_path, caplog):
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", sgd(model))
        model.load_checkpoint(tmp_path / "c", sgd(model))
        assert not caplog.records
        model.load_checkpoint(tmp_path / "c", adamw(model))
        assert "an optimizer SGD, and is loaded into one of class AdamW" in caplog.text


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
    side = OptimizerSide(tied.named_parameters(remove_duplicate=False), torch.float64)
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


# ------------------------------------------------------------------------------------------- weights


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)))


def test_tied_weights_are_saved_once_and_load_tied_or_not(tmp_path):
    with roundpipe.RoundPipe(Tied()) as model:
        optimizer = sgd(model)
        model.forward_backward((torch.arange(8).view(2, 4),), loss_fn=loss)
        model.step(lambda: optimizer.step(), is_async=False)
        model.save_checkpoint(tmp_path / "c", optimizer)
        expected = clones(model)
    saved, aliases = checkpoint_files.read_weights(tmp_path / "c")
    assert set(saved) == {"embedding.weight", "inner.weight", "inner.bias"}
    assert aliases == {"head.weight": "embedding.weight"}
    with roundpipe.RoundPipe(Tied()) as model:
        model.load_checkpoint(tmp_path / "c", sgd(model))
        assert_equal(clones(model), expected)
    with roundpipe.RoundPipe(Tied(tied=False)) as model:
        model.load_checkpoint(tmp_path / "c", weights_only=True)
        assert_equal(dict(model.state_dict()), {n: t for n, t in expected.items() if not n.startswith("optim")})


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found[name], tensor)]
        assert torch.equal(*bits), name


def test_weights_are_safetensors_both_ways(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    shapes = ((), (3,), (0, 2), (5, 3))
    tensors = {f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    tensors["scales"] = torch.ones(3).to(torch.float8_e8m0fnu)
    for name, tensor in tensors.items():
        checkpoint_files.check_storable(name, tensor)
    checkpoint_files.write_weights(tmp_path, tensors, {})
    found = library.load_file(tmp_path / "model.safetensors")
    assert_same_bits(found, tensors)
    library.save_file(found, tmp_path / "model.safetensors")
    assert_same_bits(checkpoint_files.read_weights(tmp_path)[0], tensors)


def test_weights_that_the_library_would_refuse_are_written(tmp_path):
    memory, complex_ones = torch.arange(24.0), torch.randn(3, dtype=torch.complex64)
    tensors = {
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "all": memory,
        "beginning": memory[:8],
        "overlapping": memory[4:12],
        "nothing": memory[6:6],
        "disjoint": torch.randn(8)[:3],
        "conjugated": complex_ones.conj(),
        "negative": complex_ones.conj().imag,
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpoint_files.write_weights(tmp_path, tensors, {})
    assert_same_bits(
        checkpoint_files.read_weights(tmp_path)[0], {n: t.resolve_conj().resolve_neg() for n, t in before.items()}
    )
    assert_equal(tensors, before)


def test_without_the_library_the_remedy_is_named(tmp_path, monkeypatch):
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:
            for name in [name for name in sys.modules if name.split(".")[0] == "safetensors"]:
                patched.delitem(sys.modules, name)
            patched.setitem(sys.modules, "safetensors", None)
            for is_async in (False, True):
                with pytest.raises(ConfigError, match=r"pip install roundpipe\[hf\]"):
                    model.save_checkpoint(tmp_path / "c", is_async=is_async)
            with pytest.raises(ConfigError, match=r"pip install roundpipe\[hf\]"):
                model.load_checkpoint(tmp_path / "c")
        assert model.load_checkpoint(tmp_path / "c").step == 1


def test_a_library_without_numpy_is_as_good_as_none(monkeypatch):
    library = pytest.importorskip("safetensors.torch")

    def save(tensors):
        raise ModuleNotFoundError("No module named 'numpy'")

    monkeypatch.setattr(library, "save", save)
    checkpoint_files._has_dtype.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install roundpipe\[hf\]"):
        checkpoint_files.check_storable("weight", torch.ones(1))


def test_all_files_can_be_read_by_those_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        with piped() as model:
            model.save_checkpoint(tmp_path / "c")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {0o640}


def test_a_compiled_model_resumes_on_other_devices(tmp_path):
    def run(workers, load):
        torch.manual_seed(3)
        model = roundpipe.compile(
            Tied().double(), example_args=(torch.arange(8).view(2, 4),), balance="size", devices=["cpu"] * workers
        )
        with model:
            optimizer = adamw(model)
            if load:
                assert model.load_checkpoint(tmp_path / "c", optimizer).step == 2
            for index in range(2 if load else 0, 4):
                tokens = (torch.arange(8).view(2, 4) + index) % 10
                config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
                model.forward_backward((tokens,), loss_fn=loss, run_config=config)
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                if index == 1:
                    model.save_checkpoint(tmp_path / "c", optimizer, step=2)
            model.synchronize()
            assert type(model) is roundpipe.RoundPipe
            return clones(model)

    expected = run(1, load=False)
    assert_equal(run(3, load=True), expected)


def test_shards_and_their_index(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files.write_weights, "__defaults__", (500,))
    with piped() as model:
        model.save_checkpoint(tmp_path / "c")
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert len(names) > 1 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys() and set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    with piped(seed=2) as model:
        model.load_checkpoint(tmp_path / "c")
        assert_equal(dict(model.state_dict()), expected)


@pytest.mark.parametrize("tie", [True, False])
def test_from_pretrained_reads_a_checkpoint(tmp_path, tie, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(checkpoint_files.write_weights, "__defaults__", (20_000,))
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tie,
    )  # fmt: skip
    original = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    expected = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    with roundpipe.AutoRoundPipe(original) as model:
        model.save_checkpoint(tmp_path / "c")
    assert ("lm_head.weight" in checkpoint_files.read_weights(tmp_path / "c")[0]) is not tie
    for kind in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        loaded, info = kind.from_pretrained(tmp_path / "c", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert loaded.dtype == torch.bfloat16 and type(loaded) is transformers.LlamaForCausalLM
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tie
        assert_equal(loaded.state_dict(), expected)
    original.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    with roundpipe.AutoRoundPipe(original) as model:
        with pytest.raises(ConfigError, match="weights_only=True\\) reads them"):
            model.load_checkpoint(tmp_path / "theirs")
        model.load_checkpoint(tmp_path / "theirs", weights_only=True)
        assert_equal(dict(model.state_dict()), expected)


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux's count of anonymous memory"
)


@contextlib.contextmanager
def watched_bytes():
    """The most anonymous memory taken since the last entry of the list was made."""
    peaks_bytes, over = [0], threading.Event()
    before_bytes = anonymous_bytes()

    def watch():
        while not over.wait(0.002):
            peaks_bytes[-1] = max(peaks_bytes[-1], anonymous_bytes() - before_bytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks_bytes
    finally:
        over.set()
        thread.join()


@needs_proc
def test_writing_and_reading_take_no_second_copy_of_the_weights(tmp_path, monkeypatch):
    model = roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), pin_model="off")
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(checkpoint_files.write_weights, "__defaults__", (weight_bytes // 6,))
    with model, watched_bytes() as peaks_bytes:
        model.save_checkpoint(tmp_path / "c")
        peaks_bytes.append(0)
        model.load_checkpoint(tmp_path / "c")
        peaks_bytes.append(0)
        model.save_checkpoint(tmp_path / "c", is_async=True)
        model.synchronize()
    saving, loading, in_background = peaks_bytes
    assert saving < weight_bytes / 3 and loading < weight_bytes / 3
    assert 0.9 * weight_bytes < in_background < 1.3 * weight_bytes  # the copy that is documented, and a shard


@needs_proc
def test_what_must_be_copied_is_copied_a_shard_at_a_time(tmp_path):
    tensors = {f"{index}": torch.randn(2048, 2048).t() for index in range(8)}
    one_bytes = tensors["0"].nbytes
    with watched_bytes() as peaks_bytes:
        checkpoint_files.write_weights(tmp_path, tensors, {}, one_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    assert 0.9 * one_bytes < peaks_bytes[0] < 3 * one_bytes


def test_tied_weights_of_an_encoder_and_decoder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    original = transformers.T5ForConditionalGeneration(config)
    with roundpipe.AutoRoundPipe(original) as model:
        model.save_checkpoint(tmp_path / "c")
    assert checkpoint_files.read_weights(tmp_path / "c")[1].keys() >= {"encoder.embed_tokens.weight"}
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "c")
    assert_equal(loaded.state_dict(), original.state_dict())


def test_adapters_resume_and_leave_no_config_that_would_mislead(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def adapted(seed):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        return roundpipe.AutoRoundPipe(peft.get_peft_model(transformers.LlamaForCausalLM(config), options))

    with adapted(1) as model:
        model.save_checkpoint(tmp_path / "c", adamw(model))
        expected = clones(model)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["model.safetensors", "training_state.pt"]
    with adapted(2) as model:
        model.load_checkpoint(tmp_path / "c", adamw(model))
        assert_equal(clones(model), expected)


# ---------------------------------------------------------------------------------------- background


def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    go_on = threading.Event()
    write = checkpoint_files.write_weights
    monkeypatch.setattr(checkpoint_files, "write_weights", lambda *args: (go_on.wait(20), write(*args)))
    with piped() as model:
        optimizer = adamw(model)
        train(model, optimizer, 2)
        extra = {"seen": torch.zeros(2)}
        expected = clones(model)
        model.save_checkpoint(tmp_path / "c", optimizer, extra=extra, is_async=True)
        expected_moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        extra["seen"] += 1
        for _ in range(2):
            model.forward_backward((torch.randn(8, WIDTH),), loss_fn=loss)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        assert not (tmp_path / "c").exists()
        go_on.set()
        model.synchronize()
        assert (tmp_path / "c").exists()
    with piped(seed=2) as model:
        optimizer = adamw(model)
        found = model.load_checkpoint(tmp_path / "c", optimizer)
        assert_equal(clones(model), expected)
        assert found.extra["seen"].sum() == 0
        for state, moment in zip(optimizer.state.values(), expected_moments, strict=True):
            assert torch.equal(state["exp_avg"], moment)


def test_close_and_the_next_save_wait_for_a_background_save(tmp_path, monkeypatch):
    write = checkpoint_files.write_weights
    monkeypatch.setattr(checkpoint_files, "write_weights", lambda *args: (time.sleep(0.2), write(*args)))
    with piped() as model:
        model.save_checkpoint(tmp_path / "a", step=1, is_async=True)
        model.save_checkpoint(tmp_path / "b", step=2, is_async=True)
        assert (tmp_path / "a").exists() and not (tmp_path / "b").exists()
        model.save_checkpoint(tmp_path / "b", step=3, is_async=True)
    assert (tmp_path / "b").exists()
    assert torch.load(tmp_path / "b" / "training_state.pt", weights_only=True)["step"] == 3


@pytest.mark.parametrize("noticed_by", ["call", "save", "synchronize", "close"])
def test_the_error_of_a_background_save_is_raised_once(tmp_path, monkeypatch, noticed_by, caplog):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    caplog.set_level(logging.CRITICAL)
    with piped() as model:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_files, "write_weights", fail)
            model.save_checkpoint(tmp_path / "c", is_async=True)
            model._session.writer._thread.join()
        with pytest.raises(OSError, match="No space left") as caught:
            if noticed_by == "call":
                model(torch.randn(4, WIDTH))
            elif noticed_by == "save":
                model.save_checkpoint(tmp_path / "c")
            else:
                getattr(model, noticed_by)()
        assert any(str(tmp_path / "c") in note for note in caught.value.__notes__)
        assert not list(tmp_path.iterdir())
        if noticed_by != "close":
            model(torch.randn(4, WIDTH))
            model.save_checkpoint(tmp_path / "c")


# -------------------------------------------------------------------------------- crashes and errors


SAVE_UNTIL_KILLED = """
    import os, signal, sys
    import torch, roundpipe
    from torch import nn

    torch.set_num_threads(1)
    roundpipe.RoundPipe  # imported before the fork, which is quick

    def child(dir, first):
        os.setpgid(0, 0)
        model = roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), devices=["cpu"])
        step = first
        while True:
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.fill_(step)
            model.save_checkpoint(dir, step=step, extra=[torch.full((100,), step)], is_async=step % 2 == 1)
            model.synchronize()
            os.write(1, f"{step}\\n".encode())
            step += 1

    for line in sys.stdin:
        dir, first = line.split()
        pid = os.fork()
        if pid == 0:
            child(dir, int(first))
        os.write(1, f"pid {pid}\\n".encode())
        os.waitpid(pid, 0)
        os.write(1, b"dead\\n")
"""


def test_killed_at_any_moment_the_last_complete_checkpoint_loads(tmp_path):
    folder = tmp_path / "c"
    chance = random.Random(5)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVE_UNTIL_KILLED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    model = roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    last, found_elsewhere = 0, 0
    with process, model:
        try:
            for _ in range(20):
                process.stdin.write(f"{folder} {last + 1}\n")
                process.stdin.flush()
                pid = int(process.stdout.readline().split()[1])
                last = int(process.stdout.readline())
                time.sleep(chance.uniform(0, 0.04))
                os.kill(pid, signal.SIGKILL)
                while (line := process.stdout.readline()) != "dead\n":
                    last = int(line)
                found_elsewhere += not folder.exists()
                loaded = model.load_checkpoint(folder)
                assert last <= loaded.step <= last + 1
                assert torch.equal(loaded.extra[0], torch.full((100,), loaded.step))
                assert all((parameter == loaded.step).all() for parameter in model.parameters())
                last = loaded.step
        finally:
            process.stdin.close()
    with roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))) as model:
        model.save_checkpoint(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


RENAME_CALLS = ["the old one away", "the new one in", "the old one to be removed"]


@pytest.mark.parametrize("call_index", range(3), ids=RENAME_CALLS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_crash_around_each_rename(tmp_path, monkeypatch, call_index, before):
    folder = tmp_path / "c"

    class Crash(BaseException):
        pass

    calls = []

    def rename(source, target):
        if len(calls) == call_index:
            calls.append((source, target))
            if not before:
                os.replace(source, target)
            raise Crash
        if len(calls) > call_index:
            raise Crash  # a dead process renames nothing back
        calls.append((source, target))
        os.replace(source, target)

    with piped() as model:
        model.save_checkpoint(folder, step=1)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_files.os, "rename", rename)
            patched.setattr(checkpoint_files.shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(Crash):
                model.save_checkpoint(folder, step=2)
        is_new = (call_index, before) != (0, True)  # once the old one is out of the way, the new one is whole
        assert model.load_checkpoint(folder).step == (2 if is_new else 1)
        assert folder.exists() is not ((call_index, before) in [(0, False), (1, True)])
        folder.mkdir(exist_ok=True)  # as scripts do when they start
        assert model.load_checkpoint(folder).step == (2 if is_new else 1)
        with monkeypatch.context() as patched:  # the next save fails, after it has put things right
            patched.setattr(checkpoint_files, "write_weights", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model.save_checkpoint(folder, step=3)
        assert model.load_checkpoint(folder).step == (2 if is_new else 1)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        model.save_checkpoint(folder, step=4)
        assert model.load_checkpoint(folder).step == 4
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call_index", [0, 1])
def test_an_error_between_the_renames_puts_the_old_one_back(tmp_path, monkeypatch, call_index, error):
    calls = []

    def rename(source, target):
        calls.append((source, target))
        if len(calls) == call_index + 1:
            raise error
        os.replace(source, target)

    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_files.os, "rename", rename)
            with pytest.raises(type(error)):
                model.save_checkpoint(tmp_path / "c", step=2)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        assert model.load_checkpoint(tmp_path / "c").step == 1


@pytest.mark.parametrize("limit_bytes", [1000, 100_000])
def test_a_full_disk_leaves_nothing_behind(tmp_path, limit_bytes):
    with roundpipe.RoundPipe(nn.Linear(50, 50)) as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))  # in the weights, or in the state
        try:
            with pytest.raises(OSError) as caught:
                model.save_checkpoint(tmp_path / "c", step=2, extra=torch.zeros(200_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert any("have room for two" in note for note in caught.value.__notes__)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        assert model.load_checkpoint(tmp_path / "c").step == 1


def test_reading_while_another_saves_finds_one_checkpoint(tmp_path):
    over = threading.Event()

    def linear():
        return roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))

    def save_on():
        step = 1
        with linear() as model:
            while not over.is_set():
                with torch.no_grad():
                    for parameter in model.model.parameters():
                        parameter.fill_(step)
                model.save_checkpoint(tmp_path / "c", step=step)
                step += 1

    with linear() as model:
        model.save_checkpoint(tmp_path / "c", step=0)
        thread = threading.Thread(target=save_on)
        thread.start()
        found = set()
        try:
            while len(found) < 15:
                step = model.load_checkpoint(tmp_path / "c").step
                found.add(step)
                assert not step or all((parameter == step).all() for parameter in model.parameters())
        finally:
            over.set()
            thread.join()


def test_without_write_permission(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:  # not by chmod, which root does not feel
            patched.setattr(checkpoint_files.Path, "mkdir", refuse)
            with pytest.raises(PermissionError, match=r"c\.tmp-") as caught:
                model.save_checkpoint(tmp_path / "c", step=2)
        assert any("must be writable" in note for note in caught.value.__notes__)
        assert model.load_checkpoint(tmp_path / "c").step == 1


def test_only_checkpoints_are_replaced_and_strangers_in_them_are_kept(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    (tmp_path / "c.tmp-notes").mkdir()
    with piped() as model:
        for is_async in (False, True):
            with pytest.raises(ConfigError, match=r"holds thesis\.tex and no training_state\.pt"):
                model.save_checkpoint(tmp_path / "work", is_async=is_async)
            with pytest.raises(ConfigError, match="is a file"):
                model.save_checkpoint(tmp_path / "file", is_async=is_async)
        (tmp_path / "deeper" / "c").mkdir(parents=True)  # empty: may be replaced
        model.save_checkpoint(tmp_path / "deeper" / "c")
        folder = tmp_path / "c"
        model.save_checkpoint(folder)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "logs").mkdir()
        (folder / "logs" / "1").write_text("one")
        (folder / "link").symlink_to("nowhere")
        (folder / "model-00001-of-00002.safetensors").write_text("of an earlier save")
        model.save_checkpoint(folder, step=5)
        assert (folder / "tokenizer.json").read_text() == "{}" and (folder / "logs" / "1").read_text() == "one"
        assert os.readlink(folder / "link") == "nowhere"
        assert not (folder / "model-00001-of-00002.safetensors").exists()
        folder.chmod(0o750)
        model.save_checkpoint(folder, step=5)
        assert folder.stat().st_mode & 0o777 == 0o750
        assert (tmp_path / "c.tmp-notes").exists() and (tmp_path / "work" / "thesis.tex").exists()
        os.symlink(folder, tmp_path / "latest")
        model.save_checkpoint(tmp_path / "latest", step=6)
        assert (tmp_path / "latest").is_symlink() and model.load_checkpoint(folder).step == 6


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path):
    folder = tmp_path / "c"
    with piped(depth=2) as model:
        for make in (lambda: None, folder.mkdir, lambda: (folder / "notes.txt").write_text("")):
            make()
            with pytest.raises(FileNotFoundError, match=f"no checkpoint at {folder}|{folder} has neither") as caught:
                model.load_checkpoint(folder)
            assert type(caught.value) is CheckpointNotFoundError and isinstance(caught.value, roundpipe.RoundPipeError)
        (folder / "notes.txt").unlink()
        with pytest.raises(ConfigError, match="dir is ''"):
            model.load_checkpoint("")
        model.save_checkpoint(folder)

    def fails(model, match, *args, kind=ConfigError, **kwargs):
        before = clones(model)
        torch_state = torch.get_rng_state()
        with pytest.raises(kind, match=match) as caught:
            model.load_checkpoint(folder, *args, **kwargs)
        assert type(caught.value) is kind
        assert_equal(clones(model), before)
        assert torch.equal(torch.get_rng_state(), torch_state)

    with piped(depth=3, seed=2) as model:
        fails(model, r"7 are missing in it: 2.0.weight, 2.0.bias, 2.1.weight, 2.1.bias, and 3 more$")
        fails(model, "optimizer= was given, and the checkpoint .* without one", sgd(model))
        fails(model, "scaler= was given", scaler=roundpipe.GradScaler())
        fails(model, "does not restore optimizer", sgd(model), weights_only=True)
    with piped(depth=1, seed=2) as model:
        fails(model, "7 are not in the model: 1.0.bias, 1.0.weight, 1.1.bias, ")
    with roundpipe.RoundPipe(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 5)))) as model:
        fails(model, r"2 have another shape: 0.0.weight \(\[6, 6\], the model has \[5, 6\]\), 0.0.bias")
    with piped(depth=2, seed=2) as model:
        optimizer = sgd(model)
        model.save_checkpoint(folder, optimizer, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))
        fails(model, "has optimizer state, and no optimizer was given; give optimizer=, or")
        fails(model, "has scheduler state", optimizer)
        model.load_checkpoint(folder, weights_only=True)
        wrong = torch.optim.SGD(model.model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"\['params'\]\[0\], of shape \[6, 6\], is not the model's"):
            model.save_checkpoint(folder, wrong)
        fails(model, "is not the model's", wrong, torch.optim.lr_scheduler.ConstantLR(optimizer))
        for name, match in (
            ("model.safetensors", "can't be read as safetensors"),
            ("training_state.pt", "can't be read"),
        ):
            path = folder / name
            whole = path.read_bytes()
            for num_bytes in (len(whole) - 8, 100, 4, 0):
                path.write_bytes(whole[:num_bytes])
                fails(model, match, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), kind=CheckpointError)
            path.write_bytes(whole)
        (folder / "model.safetensors.index.json").write_text("{}")
        fails(model, "index.json can't be read as an index", optimizer, kind=CheckpointError)
        index = {"weight_map": {"0.0.weight": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        fails(model, "of-00001.safetensors can't be read as safetensors", optimizer, kind=CheckpointError)
        (folder / "model.safetensors.index.json").unlink()
        (folder / "model.safetensors").unlink()
        fails(model, "neither model.safetensors nor model.safetensors.index", optimizer, kind=CheckpointError)


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    with piped() as model:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "FORMAT", 2)
            model.save_checkpoint(tmp_path / "c")
        with pytest.raises(CheckpointError, match="has format 2, this version reads up to 1"):
            model.load_checkpoint(tmp_path / "c")


def test_weights_that_can_not_be_saved_are_named(tmp_path):
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with roundpipe.RoundPipe(meta) as model:
        with pytest.raises(ConfigError, match="weight is on the meta device"):
            model.save_checkpoint(tmp_path / "c")
    odd = nn.Linear(2, 2)
    odd.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with roundpipe.RoundPipe(odd) as model:
        with pytest.raises(ConfigError, match="odd has dtype torch.complex128"):
            model.save_checkpoint(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_the_state_of_modules_beside_their_tensors(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    with roundpipe.RoundPipe(nn.Sequential(Counting(2, 2))) as model:
        model.model[0].seen = 5
        model.save_checkpoint(tmp_path / "c")
    with roundpipe.RoundPipe(nn.Sequential(Counting(2, 2))) as model:
        model.load_checkpoint(tmp_path / "c")
        assert model.model[0].seen == 5
    shutil.rmtree(tmp_path / "c")
