"""Runs the forwards of modules that are looked into, and records what they do to their own attributes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.core.errors import TraceCause, TraceError
from roundpipe.effects.uses import uses_of_forward
from roundpipe.fx.fakes import DATA_DEPENDENT, FakeWorld, is_fake
from roundpipe.fx.locations import model_location
from roundpipe.fx.operations import assign_buffer
from roundpipe.fx.sizes import expression_of, flat_values
from roundpipe.fx.trace.advice import set_at
from roundpipe.fx.trace.decisions import Decision, Knowledge, Need, Retry
from roundpipe.fx.trace.intercept import ORIGINAL_CALL
from roundpipe.fx.trace.leaves import is_put_by_hooks, left_behind
from roundpipe.fx.trace.recorder import CallRecorder


@dataclass(eq=False)
class GlueRunner:
    """Runs modules whose calls are recorded one by one."""

    _world: FakeWorld
    _recorder: CallRecorder
    _knowledge: Knowledge
    modules: dict[nn.Module, None] = field(default_factory=dict)
    """Those that ran."""
    _gave_lengths: bool = False

    def call(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        if module._backward_hooks or module._backward_pre_hooks:
            raise Retry(TraceError(f"{name or 'the model'} has backward hooks"), name, Decision.LEAF)
        self.modules[module] = None
        buffers = dict(module._buffers)
        attributes = dict(module.__dict__)
        recorder.modules.append(name)
        try:
            out = ORIGINAL_CALL(module, *args, **kwargs)
            self._record_assignments(module, name, buffers)
            self._refuse_kept_activations(module, name, attributes)
        except DATA_DEPENDENT as error:
            raise recorder.needs_data(error) from error
        except Exception as error:
            if self._gave_lengths and isinstance(error, TypeError):
                raise Retry(need=Need.PLAIN_LENGTHS) from error
            raise Retry(error, name, Decision.LEAF, function=recorder.raised_by(error)) from error
        finally:
            recorder.modules.pop()
        return out

    def length_of(self, tensor: torch.Tensor) -> Any:
        """What ``len(tensor)`` gives: a symbol, which only a few things can't be done with."""
        if Need.PLAIN_LENGTHS in self._knowledge.needs or not tensor.dim():
            return len(tensor)
        self._gave_lengths = True
        return tensor.shape[0]

    def _record_assignments(self, module: nn.Module, name: str, before: dict[str, Any]) -> None:
        """One effect node per buffer that a forward replaced by another tensor."""
        builder = self._recorder.builder
        for key, buffer in module._buffers.items():
            if buffer is before.get(key):
                continue
            full_name = f"{name}.{key}" if name else key
            if buffer is None:
                raise self._recorder.give_up(TraceError(f"buffer {full_name} is set to None in the forward"))
            if full_name not in self._world.real:
                words = f"buffer {full_name}, which did not exist or was None, is set in the forward"
                raise self._recorder.give_up(TraceError(words, TraceCause.BUFFER_CREATED))
            target = builder.attribute(full_name, self._world.fake(full_name))
            shapes = [list(map(expression_of, tensor.shape)) for tensor in (buffer, target.meta["value"])]
            if shapes[0] != shapes[1] or buffer.dtype != target.meta["value"].dtype:
                words = f"buffer {full_name} is set to a tensor of another shape or dtype in the forward"
                raise self._recorder.give_up(TraceError(words))
            node = builder.add("call_function", assign_buffer, (target, builder.tensor_argument(buffer)))
            node.meta.update(modes=None, effect=True, mutates=(target,), value=target.meta["value"])
            builder.written_storages.add(target.meta["value"].untyped_storage()._cdata)

    def _refuse_kept_activations(self, module: nn.Module, name: str, before: dict[str, Any]) -> None:
        """An activation left in an attribute would not be there at run time."""
        if self.hands_on(module):
            return
        for key, value in module.__dict__.items():
            if key in ("_buffers", "_parameters", "_modules"):
                continue
            original = before.get(key, before)
            if original is value and not isinstance(value, (list, dict)):
                continue
            if original is None and self._is_reset(module, key):
                continue
            if any(self.is_activation(item) for item in flat_values(value)) and not is_put_by_hooks(module, key):
                location = set_at(type(module), key) or model_location()
                raise Retry(left_behind(type(module), key), name, Decision.LEAF, location)

    def _is_reset(self, module: nn.Module, attribute: str) -> bool:
        """Whether an attribute, None when a module is called, is state for the module's own forward, which reads it,
        and which code of another module sets anew in each forward, as recurrent states between tokens.
        """
        kinds = {type(inner) for inner in self._world.twin.modules()} - {type(module)}
        return attribute in uses_of_forward(type(module)).reads and any(
            attribute in uses_of_forward(kind).sets for kind in kinds
        )

    def hands_on(self, module: nn.Module) -> bool:
        """Whether another module takes a value from this one's attributes in the same forward, so that it is glue."""
        keys = {self._world.name_of_module[module], type(module)}
        return bool(keys & self._knowledge.handing_on) and not keys & self._knowledge.stateful

    def is_activation(self, value: Any) -> bool:
        """Whether a value is a fake that the parameters have a part in."""
        is_new = isinstance(value, torch.Tensor) and is_fake(value) and value not in self._world.name_of
        return is_new and not self._recorder.data.determines(value)
