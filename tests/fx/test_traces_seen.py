"""What a user sees of traces: when there is one, why, how long it takes; none for what forward never reads."""

import functools
import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

import roundpipe
from roundpipe.fx.trace import progress


class Settings:
    """Gives some attributes under another name, as configurations do."""

    names = {"width": "hidden_size"}

    def __init__(self):
        self.scale, self.hidden_size, self.saved_as, self.extra = 2.0, 6, None, {"a": 1}

    def __getattribute__(self, name):
        names = super().__getattribute__("names")
        return super().__getattribute__(names.get(name, name))


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Settings()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        name = "".join(["sc", "ale"])  # made up, so that the code could read any attribute
        return self.linear(x) * getattr(self.config, name) + self.config.width


def total(output, label):
    return output.square().sum()


def test_only_what_forward_read_makes_a_new_trace():
    model, x = Configured(), torch.randn(4, 6)
    with roundpipe.compile(model, devices="cpu") as piped:

        def traces():
            with torch.no_grad():
                torch.testing.assert_close(piped(x), model(x))
            return piped.trace_count

        assert traces() == 1
        model.config.saved_as = "somewhere"
        model.config.new = [1, 2]
        assert traces() == 1
        model.config.scale = 3.0
        assert traces() == 2
        model.config.hidden_size = 7  # read by its other name
        assert traces() == 3
        del model.config.new
        assert traces() == 3


@pytest.mark.parametrize("copies", [dict, lambda value: {**vars(value)}])
def test_who_takes_all_attributes_reads_all(copies):
    class Takes(Configured):
        def forward(self, x):
            held = vars(self.config) if copies is dict else copies(self.config)
            return self.linear(x) * len([value for value in held.values() if value is not None])

    model, x = Takes(), torch.randn(4, 6)
    with roundpipe.compile(model, devices="cpu") as piped, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(piped(x), model(x))
            model.config.saved_as = "somewhere"


class Registry(dict):
    """Values by class, as packages keep them for all models."""

    def get(self, model, default=None):
        return super().get(type(model).__name__, default)


class AnotherRegistry(Registry):
    """Makes its answers anew each time."""

    def get(self, model, default=None):
        return [super(Registry, self).get(type(model).__name__)]


FACTORS = Registry()


class LooksUp(nn.Module):
    """Looks up what is there and what is not, each in two ways."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        factor = FACTORS.get(self)
        factor = factor[0] if isinstance(factor, list) else factor
        shift = FACTORS["shift"] if "shift" in FACTORS else 0.0
        return self.linear(x) * factor + shift


class LooksAtAll(LooksUp):
    """Reads all of it, too."""

    def forward(self, x):
        return super().forward(x) * len(FACTORS) + sum(FACTORS.values())


@pytest.mark.parametrize("model, kind", [(LooksUp, Registry), (LooksAtAll, Registry), (LooksUp, AnotherRegistry)])
def test_only_what_forward_looked_up_in_a_registry_makes_a_new_trace(model, kind, monkeypatch):
    factors = kind({model.__name__: 2.0})
    monkeypatch.setitem(globals(), "FACTORS", factors)
    model, x = model(), torch.randn(4, 6)
    sees_all = isinstance(model, LooksAtAll) or kind is AnotherRegistry
    with roundpipe.compile(model, devices="cpu") as piped:

        def is_traced():
            before = piped.trace_count
            with torch.no_grad():
                torch.testing.assert_close(piped(x), model(x))
            return piped.trace_count > before

        assert is_traced()
        factors["Another"] = 5.0
        assert is_traced() == sees_all
        factors[type(model).__name__] = 3.0
        assert is_traced()
        factors["shift"] = 1.0
        assert is_traced()
        del factors["Another"]
        assert is_traced() == sees_all
        del factors["shift"]
        assert is_traced() or factors == {type(model).__name__: 3.0}  # an earlier trace may serve again
    assert not {"__len__", "__contains__", "items"} & vars(kind).keys()


def test_building_another_hugging_face_model_makes_no_new_trace():
    transformers = pytest.importorskip("transformers")
    capturing = pytest.importorskip("transformers.utils.output_capturing")  # older versions keep no such registry
    if type(getattr(capturing, "_CAN_RECORD_REGISTRY", None)) is dict:
        pytest.skip("this version walks through a plain dict")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, vocab_size=50, use_cache=False))
    ids = torch.randint(1, 50, (4, 6))
    with roundpipe.compile(model, devices="cpu") as piped, torch.no_grad():
        for other in (transformers.MistralModel, transformers.Qwen2Model):
            piped(input_ids=ids)
            other(other.config_class(**sizes, num_key_value_heads=2, vocab_size=50))
        piped(input_ids=ids)
        assert piped.trace_count == 1


def test_saving_a_hugging_face_model_makes_no_new_trace(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(1, 50, (4, 6))
    with roundpipe.compile(model, devices="cpu") as piped:
        for _ in range(2):
            piped.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, loss_fn=lambda o, _: o.loss)
            piped.synchronize()
            model.save_pretrained(tmp_path)
        assert piped.trace_count == 1
        config.use_cache = True
        piped.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, loss_fn=lambda o, _: o.loss)
        assert piped.trace_count == 2


def test_each_trace_is_logged_with_its_cause_and_seconds(caplog):
    model = Configured()
    with caplog.at_level(logging.INFO, "roundpipe"), roundpipe.compile(model, devices="cpu") as piped:
        piped.forward_backward((torch.randn(4, 6),), loss_fn=total)
        model.config.scale = 3.0
        piped.forward_backward((torch.randn(4, 6),), loss_fn=total)
    lines = [record.message for record in caplog.records if record.message.startswith("traced Configured in ")]
    assert len(lines) == 2
    assert "for the first time" in lines[0]
    assert "config" in lines[1]
    assert lines[1].endswith("(Configured.config holds something else now (scale))")


def test_a_long_trace_shows_a_bar(capsys, monkeypatch):
    with roundpipe.compile(Configured(), example_args=(torch.randn(4, 6),), devices="cpu"):
        assert "tracing" not in capsys.readouterr().err
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    with roundpipe.compile(Configured(), example_args=(torch.randn(4, 6),), devices="cpu"):
        assert "roundpipe: tracing Configured" in capsys.readouterr().err


class ShowsABar(nn.Module):
    """Its code finds the class of bars, of which one is drawn meanwhile."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        for _ in tqdm(range(2), disable=True):
            x = self.linear(x)
        return x


def test_what_installed_packages_keep_in_classes_is_not_put_back(monkeypatch):
    """Such as the locks of bars, which other threads have drawn since."""
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.delattr(tqdm, "_lock", raising=False)  # as if it was the first bar
    model, x = ShowsABar(), torch.randn(4, 6)
    with roundpipe.compile(model, example_args=(x,), devices="cpu") as piped:
        torch.testing.assert_close(piped(x), model(x))
        assert "_lock" in vars(tqdm)


def test_traces_in_several_threads_leave_classes_as_they_were(monkeypatch):
    """What is read is told by classes, which each trace changes meanwhile."""
    monkeypatch.setitem(globals(), "FACTORS", Registry(LooksUp=2.0))
    plain = Settings.__getattribute__, dict(vars(Registry))
    ready, errors = threading.Barrier(4), []

    def trace(model):
        try:
            ready.wait()
            with roundpipe.compile(model, example_args=(torch.randn(4, 6),), devices="cpu"):
                pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=trace, args=(kind(),)) for kind in (Configured, LooksUp, Configured, LooksUp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (Settings.__getattribute__, dict(vars(Registry))) == plain


def test_checkpointing_that_is_switched_off_and_on_makes_no_new_trace() -> None:
    """Trainers of preferences do so at each step, around a call of the reference model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    ids = torch.randint(50, (4, 6))
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        for _ in range(4):
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
            loss = piped.forward_backward(
                input_kwargs={"input_ids": ids, "labels": ids}, loss_fn=lambda o, _: o.loss, loss_reduction="mean"
            )
            torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss.detach())
        assert piped.trace_count == 1


class Handled(nn.Module):
    """Its code makes up names of attributes, so that all of them may be read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function: Any = functools.partial(torch.mul, other=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self, "func" + "tion")(self.linear(x))
        return out


@pytest.mark.parametrize(
    ("make", "num_traces"),
    [
        (lambda step: functools.partial(torch.mul, other=2.0), 1),
        (lambda step: functools.partial(functools.partial(torch.add, alpha=2), torch.ones(())), 4),
        (lambda step: functools.partial(torch.mul, other=2.0 + step), 4),
        (lambda step: functools.partial((torch.mul, torch.add)[step % 2], other=2.0), 2),
    ],
    ids=["the same", "another tensor", "another number", "another function"],
)
def test_partial_functions_that_are_made_anew(make: Any, num_traces: int) -> None:
    model, x = Handled(), torch.randn(3, 4)
    with roundpipe.compile(model, devices=["cpu"]) as piped, torch.no_grad():
        for step in range(4):
            model.function = make(step)
            torch.testing.assert_close(piped(x), model(x))
        assert piped.trace_count == num_traces
