"""The source of a random model: its submodules' classes, its root, and the state that they have."""

from __future__ import annotations

import random

from tests.fx.fuzz.expressions import RETURNS, USES
from tests.fx.fuzz.preamble import PREAMBLE
from tests.fx.fuzz.writer import Writer

_STATE = """
        self.first = nn.Linear(8, 8)
        self.second = {second}
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.bias = {bias}
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("memory", torch.zeros(1, 8))
        self.generator = torch.Generator().manual_seed(5)
        self.count = 0
        self.state = {{"n": 0}}
        self.history = []
        self.last = None
        self.cache = {{}}
        self.gain = 1.0
        self.settings = collections.namedtuple("Settings", "gain")(1.25)
        self.inner_calls = type("Calls", (), {{"n": 0}})()
        self.label = "block 0"
        self.act = torch.tanh
        self.register_buffer("var", torch.ones(8))
        self.options = types.SimpleNamespace(gain=1.25, skip=False)
        self.scales = [1.0, 0.75]
        self.offset = torch.linspace(0, 1, 8, dtype=torch.float64)
        self.tables = {{"a": torch.linspace(1, 0, 8, dtype=torch.float64)}}
        self.scalars = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(2))
        self.nest = nn.ModuleDict({{"a": nn.ModuleList([nn.Linear(8, 8)]), "b": nn.Sequential(nn.Tanh(), self.first)}})
        self.longest = 0
        self.zero = nn.Dropout(0.0)
        self.gate = Gate()
        self.writes = Writes()
        self.keeps = Keeps()
        self.decays = Decays()
        self.shrinks = Shrinks()
        self.wrapped = Wrapper(nn.Linear(8, 8))
"""

_SECONDS = [
    "nn.Linear(8, 8)",
    "self.first",
    "nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))",
    "nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))",
    "nn.LayerNorm(8)",
    "nn.Dropout(0.0)",
    "nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))",
    "nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)",
    "copy.deepcopy(self.first)",
    "Twice(8, 8)",
]
_EXTRAS = [
    "",
    "",
    "self.second.requires_grad_(False)",
    "self.first.register_forward_hook(scale_gradient)",
    "self.first.register_forward_pre_hook(shift_input)",
    "self.weight.requires_grad_(False)",
    "self.weight.register_hook(lambda g: g * 2)",
    "self.first.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))",
    "self.first.weight = self.weight",
    "self.second = nn.Linear(8, 8); self.second.weight = self.first.weight",
    "self.second.register_full_backward_hook(double_gradient)",
    "self.second.register_forward_hook(scale_gradient)",
    "self.first.register_forward_pre_hook(shift_by_keywords, with_kwargs=True)",
    "self.zero.p = 1.0",
]
_TWINS_DIFFER = [
    "pass",
    "twin.gain = 1.0 + index",
    "twin.count = index",
    "twin.settings = twin.settings._replace(gain=1.0 + index)",
    "twin.state['n'] = index",
    "twin.history.extend(range(index))",
    "twin.label = f'block {index}'",
    "twin.act = (torch.tanh, torch.sigmoid, torch.relu)[index]",
    "twin.first.weight.requires_grad_(index > 0)",
    "twin.second = nn.Identity() if index == 1 else twin.second",
    "twin.first.register_forward_hook(scale_gradient) if index == 2 else None",
    "twin.norm.eps = 0.1 * (index + 1)",
    "twin.norm.momentum = 0.2 * (index + 1)",
    "twin.first = self.twins[0].first",
]
"""How the modules of one class differ."""
_READS_ITSELF = [
    "h = h * self.gain",
    "h = h * self.settings.gain",
    "h = h * (1 + self.count)",
    "h = h * (1 + self.state['n'])",
    "h = h * (1 + len(self.history))",
    "h = h * 2 if '1' in self.label else h",
    "h = h * {'block 0': 0.5, 'block 1': 1.5}.get(self.label, 1.0)",
    "h = self.act(h)",
    "h = h if isinstance(self.second, nn.Identity) else h * 0.5",
    "h = h * (1.0 if self.first.weight.requires_grad else 0.5)",
]
_OWN_CALLS = [
    "self.first({BLD})",
    "self.second({BLD})",
    "self.first(input={BLD})",
    "self.norm({BLD}.transpose(1, 2)).transpose(1, 2)",
    "self.norm({BLD}.reshape(-1, 8)).view_as({BLD})",
    "self.zero({BLD})",
    "self.gate({BLD})",
    "self.writes({BLD} * 1.0)",
    "self.decays({BLD})",
    "self.wrapped({BLD})",
    "self.keeps({BLD})",
]

EDITS: list[tuple[str, str]] = [
    ("{h} * self.gain", "m.gain = 0.5"),
    ("{h} * getattr(self, 'ga' + 'in')", "m.gain = 0.5"),
    ("scaled(self, {h})", "m.gain = 0.5"),
    ("{h} * (1.0 if self.gain > 0.7 else 2.0)", "m.gain = 0.5"),
    ("{h} * self.settings.gain", "m.settings = m.settings._replace(gain=0.5)"),
    ("{h} * self.options.gain", "m.options.gain = 0.5"),
    ("scaled(self, {h})", "m.options.gain = 0.5"),
    ("{h} if self.options.skip else {h} * 0.5", "m.options.skip = not m.options.skip"),
    ("{h} * self.options.gain", "m.options = types.SimpleNamespace(gain=0.25, skip=True)"),
    ("{h} * self.scales[-1]", "m.scales[-1] = 0.25"),
    ("average([{h} * scale for scale in self.scales])", "m.scales[-1] = 0.25"),
    ("{h} + self.offset", "m.offset = torch.full((8,), 0.5, dtype=torch.float64)"),
    ("{h} + self.offset", "m.offset.mul_(0.5)"),
    ("{h} + self.tables['a']", "m.tables['a'] = torch.full((8,), 0.5, dtype=torch.float64)"),
    ("{h} * getattr(self, 'extra_gain', 1.0)", "m.extra_gain = 0.5"),
    ("{h} * 2 if hasattr(self, 'extra_gain') else {h}", "m.extra_gain = 0.5"),
    ("self.act({h})", "m.act = torch.sigmoid"),
    ("{h} * (1 + self.count)", "m.count = 3"),
    ("{h} * (1 + self.state['n'])", "m.state['n'] = 3"),
    ("{h} * 2 if '1' in self.label else {h}", "m.label = 'block 1'"),
    ("self.norm({h}.transpose(1, 2)).transpose(1, 2)", "m.norm.eval()"),
    ("{h} * 2 if self.norm.training else {h}", "m.norm.eval()"),
    ("self.norm({h}.transpose(1, 2)).transpose(1, 2)", "m.norm.eps = 0.25"),
    ("{h} + self.norm.eps", "m.norm.eps = 0.25"),
    ("self.norm({h}.transpose(1, 2)).transpose(1, 2)", "m.norm.momentum = 0.5"),
    ("self.zero({h})", "m.zero.p = 1.0 - m.zero.p"),
    ("{h} * self.zero.p", "m.zero.p = 1.0 - m.zero.p"),
    ("self.first({h})", "m.first.requires_grad_(not m.first.bias.requires_grad)"),
    (
        "{h} * (1.0 if self.first.weight.requires_grad else 0.5)",
        "m.first.requires_grad_(not m.first.bias.requires_grad)",
    ),
    ("self.first({h})", "m.first.register_forward_hook(scale_gradient)"),
    ("self.second({h})", "m.second.register_forward_hook(scale_gradient)"),
    ("self.second({h})", "m.second.register_full_backward_hook(double_gradient)"),
    ("self.first({h})", "m.first.forward = lambda x, old=m.first.forward: old(x) * 0.5"),
    ("self.second({h})", "m.second.forward = lambda x, old=m.second.forward: old(x) * 0.5"),
    ("{h} if self.keeps.aux is None else {h} * 2", "m.keeps.aux = None"),
    ("self.decays({h})", "m.decays.average.fill_(0.5)"),
    ("{h} * self.decays.average.clone()", "m.decays.average.fill_(0.5)"),
    ("{h} * self.factor", "type(m).factor = 0.5"),
    ("{h} * GAIN", "globals()['GAIN'] = 0.5"),
    ("{h} * TABLE['gain']", "TABLE['gain'] = 0.5"),
    ("{h} @ self.weight", "for p in m.parameters():\n    p.data.mul_(0.75)"),
    ("{h} @ self.weight", "for p in m.parameters():\n    p.data.sub_(0.01 * p.grad) if p.grad is not None else None"),
    ("{h} @ self.weight", "m.weight.data = m.weight.data * 0.5"),
]
"""What some code reads of a module, and what a user does to the module ``m`` between two calls that changes it."""


def write_class(choose: random.Random, name: str, read: str, nasty: float) -> tuple[str, str]:
    """The source of a submodule's class, and a template that calls ``self.{name}``.

    Args:
        read: an expression of ``{h}`` that is somewhere in it, should it not be empty.
    """
    style = choose.randrange(8)
    returns = choose.randrange(len(RETURNS))
    signature, call = [
        ("self, h", "{BLD}"),
        ("self, h, mask=None, *, scale=1.0", "{BLD}, mask={MBL}, scale={P}"),
        ("self, h, *others", "{BLD}, {BLD}, {BLD}"),
        ("self, batch", "{'h': {BLD}, 'n': 3}"),
        ("self, h, extra=None", "h={BLD}"),
        ("self, pair", "Pair({BLD}, {BD})"),
        ("self, *, h, **others", "h={BLD}, a={BLD}, b={S}"),
        ("self, h, store", "{BLD}, Store()"),
    ][style]
    writer = Writer(choose, False, _OWN_CALLS, nasty)
    if style == 3:
        writer.emit("h = batch['h']")
    writer.define("BLD", "h")
    writer.define("P", "0.5")
    if style == 1:
        writer.emit("h = h * scale if mask is None else torch.where(mask[..., None], h, h * scale)")
    if style == 2:
        writer.emit("h = h + sum(others)")
    if style == 4:
        writer.emit("h = h if extra is None else h + extra")
    if style == 5:
        writer.emit("h = pair.first + pair.second[:, None]")
    if style == 6:
        writer.emit("h = h + others['a'] * others['b']")
    if style == 7:
        writer.emit("h = store.add(h) + store.add(h * 0.5)")
    if choose.random() < 0.4:
        writer.emit(choose.choice(_READS_ITSELF))
    if read:
        writer.emit(f"h = {read.format(h='h')}")
    writer.emit("d = h.mean(1)")
    writer.define("BD", "d")
    writer.emit("s = h.pow(2).mean()")
    writer.define("S", "s")
    text = RETURNS[returns].replace("{n}", "3")
    body = writer.write(choose.randint(1, 4), text, choose.random() < 0.15)
    source = f"class {name}(nn.Module):\n    factor = 1.0\n\n    def __init__(self):\n        super().__init__()"
    source += _STATE.format(second=choose.choice(_SECONDS), bias=choose.choice(["nn.Parameter(torch.ones(8))", "1.5"]))
    source += f"        {choose.choice(_EXTRAS) or 'pass'}\n\n    def forward({signature}):\n{body}\n"
    return source, USES[returns].format(f"self.{name.lower()}({call})")


def write_source(choose: random.Random, read: str) -> str:
    """The source of a random model, class ``Root``; what reads a place is in some of its classes."""
    places = choose.choice([{0}, {1}, {2}, {0, 1, 2}])
    nasty = choose.choice([0.0, 0.03, 0.15, 0.3])
    classes: list[str] = []
    calls: list[str] = []
    for index in range(choose.randint(1, 2)):
        source, call = write_class(
            choose, f"Block{index}", read if index in places else "", choose.choice([nasty, 0.4])
        )
        classes.append(source)
        calls.append(call)
    stack = choose.randint(2, 4)
    has_twins = choose.random() < 0.4
    if has_twins:
        calls += [calls[0].replace("self.block0(", f"self.twins[{index}](") for index in range(3)]
    writer = Writer(choose, True, [*calls, *calls, *_OWN_CALLS, "self.stack[{i}]({BLD})"], nasty)
    writer.modules = [text.replace("{i}", str(choose.randrange(stack))) for text in writer.modules]
    writer.emit("e = self.emb(ids) + x")
    for kind, name in [("BLD", "x"), ("BLD", "e"), ("IBL", "ids"), ("MBL", "mask"), ("P", "scale"), ("P", "2.0")]:
        writer.define(kind, name)
    if read and 2 in places:
        writer.emit(f"e = {read.format(h='e')}")
    writer.emit("d = e.mean(1)")
    writer.define("BD", "d")
    writer.emit("s = e.pow(2).mean()")
    writer.define("S", "s")
    if choose.random() < 0.4:
        writer.emit("for block in self.stack:\n    e = e + block(e)")
        writer.define("BLD", "e")
    if has_twins and choose.random() < 0.6:
        call = calls[0].replace("self.block0(", "twin(")
        for kind, name in [("{BLD}", "e"), ("{MBL}", "mask"), ("{P}", "scale")]:
            call = call.replace(kind, name)
        writer.emit(f"for twin in self.twins:\n    e = {call}")
        writer.define("BLD", "e")
    returns = choose.choice(RETURNS).replace("{n}", "len(self.stack)")
    body = writer.write(choose.randint(3, 8), returns, choose.random() < 0.1)
    source = "class Root(nn.Module):\n    factor = 1.0\n\n    def __init__(self):\n        super().__init__()"
    source += _STATE.format(second=choose.choice(_SECONDS), bias=choose.choice(["nn.Parameter(torch.ones(8))", "1.5"]))
    source += "        self.emb = nn.Embedding(11, 8)\n"
    source += f"        self.stack = nn.ModuleList(nn.Linear(8, 8) for _ in range({stack}))\n"
    for index in range(len(classes)):
        source += f"        self.block{index} = Block{index}()\n"
    if has_twins:
        source += "        self.twins = nn.ModuleList(Block0() for _ in range(3))\n"
        source += f"        for index, twin in enumerate(self.twins):\n            {choose.choice(_TWINS_DIFFER)}\n"
    source += f"        {choose.choice(_EXTRAS) or 'pass'}\n"
    source += f"\n    def forward(self, x, ids, mask, scale=1.0, *, extra=None):\n{body}\n"
    return "\n\n".join([PREAMBLE, *classes, source])
