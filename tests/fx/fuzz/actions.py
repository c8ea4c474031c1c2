"""Templates of statements that do more than compute a value: writes, containers, regions, hooks, state.

``{new}`` and ``{tmp}`` are new names; ``{BLD=new}`` adds the value to those of its kind and is not part of the code.
"""

from __future__ import annotations

ACTIONS: list[str] = [
    # views, then writes through the base or the view
    "{new} = {BLD}.clone(); {new}[:, ::2].mul_(2.0); {BLD=new}",
    "{new} = {BLD} * 1.0; {tmp} = {new}[:, 1:]; {new}.add_(1.0); {new} = {new} + F.pad({tmp}, (0, 0, 1, 0)); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}.view({new}.shape[0], -1); {tmp} += 0.5; {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}.transpose(1, 2); {tmp}[:, 0].zero_(); {new} = {tmp}.transpose(1, 2); "
    "{BLD=new}",
    "{new} = {BLD} + 0.0; {tmp} = {new}.reshape(-1, 8); {tmp}.sub_(0.25); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}.flatten(); {tmp}[:3] = 0.75; {BLD=new}",
    "{new} = {BLD}.clone(); {tmp}, {tmp}b = {new}.chunk(2, -1); {tmp}.data.mul_(1.5); {BLD=new}",
    "{new} = {BLD} * 1.0; {tmp} = {new}.detach(); {tmp}.add_(0.125); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}; {tmp} += 1; {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {'a': {new}}; {tmp}['a'].mul_(0.5); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = [{new}, {new}[:, 0]]; {tmp}[0].add_(1); {BD=tmp}[1] * 1.0; {BLD=new}",
    # masked and indexed assignment
    "{new} = {BLD}.clone(); {new}[{MBL}] = 0.0; {BLD=new}",
    "{new} = {BLD}.clone(); {new}[{MBL}] = {new}[{MBL}] * 2; {BLD=new}",
    "{new} = {BLD}.clone(); {new}[:, 0] = {BD}; {BLD=new}",
    "{new} = {BLD}.clone(); {new}[..., :4] = {BLD}[..., 4:]; {BLD=new}",
    "{new} = torch.zeros_like({BLD}); {new}[:, -1] = {BD}; {new}[0] += 0.5; {BLD=new}",
    "{new} = {BLD}.new_zeros({BLD}.size(0), {BLD}.size(1), 8); {new} += {BLD}; {BLD=new}",
    "{new} = {BLD}.clone(); {new}.masked_fill_({MBL}[..., None], 0.25); {BLD=new}",
    "{new} = {BLD}.clone(); {new}.index_add_(1, torch.arange({new}.size(1)), {BLD}); {BLD=new}",
    "{new} = torch.empty_like({BLD}); {new}.copy_({BLD}); {BLD=new}",
    "{new} = {IBL}.clone(); {new}[{new} > 7] = 2; {IBL=new}",
    "{new} = {IBL}.clone(); {new} -= 1; {new}.clamp_(min=0); {IBL=new}",
    "{new} = {BLD} * 1.0; torch.add({BLD}, 1.0, out={tmp}) if False else {new}.add_(0.5); {BLD=new}",
    "{BLD!} += 1.0",
    "{BLD!}.add_({BD}[:, None])",
    "{BLD!}.mul_(0.5)",
    "{BLD!}[:, 0] += 0.5",
    "{BD!} += 0.25",
    "{MBL!}[:, 0] = True",
    "{IBL!}.remainder_(9)",
    # containers
    "{tmp} = Pair({BLD}, {BD}); {tmp}.second = {tmp}.second + 1; {BD=tmp}.second; {BLD=tmp}.first",
    "{tmp} = Both({BLD}, {BLD})._replace(left={BLD} * 0.5); {BLD=tmp}.left",
    "{tmp} = collections.OrderedDict(a={BLD}, b={BD}); {tmp}.update(a={tmp}.pop('a') * 2); {BLD=tmp}['a']",
    "{tmp} = []; {tmp}.append({BLD}); {tmp}.extend([{BLD}, {BLD}]); {BLD=tmp}.pop() + {tmp}[0]",
    "{tmp} = dict(zip('ab', {BLD}.chunk(2, -1))); {BLD}; {new} = torch.cat([{tmp}['b'], {tmp}['a']], -1); {BLD=new}",
    # regions
    "with torch.no_grad():\n    {new} = {BLD} * 2\n{BLD=new}",
    "with torch.no_grad():\n    with torch.enable_grad():\n        {new} = {BLD} * 2\n{BLD=new}",
    "with torch.set_grad_enabled(False):\n    {new} = {BLD}.softmax(-1)\n{BLD=new}",
    "{new} = {BLD} * 1.0\nwith torch.no_grad():\n    {new}.mul_(0.5)\n{BLD=new}",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    {new} = ({BLD}.float() @ self.weight.float()).double()\n"
    "{BLD=new}",
    "with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False):\n    {new} = {BLD} @ self.weight\n{BLD=new}",
    "with contextlib.suppress(KeyError):\n    {new} = {BLD} * 2\n    {new} = {'a': {BLD}}['b']\n{BLD=new}",
    "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):\n"
    "    {new} = F.scaled_dot_product_attention({BLD}, {BLD}, {BLD})\n{BLD=new}",
    # python over sizes
    "{tmp} = {BD}\nfor {tmp}i in range({BLD}.size(1)):\n    {tmp} = torch.tanh({tmp} + {tmp}i * 0.1)\n{BD=tmp}",
    "{tmp} = [{BLD}[:, {tmp}i] * ({tmp}i + 1) for {tmp}i in range({BLD}.shape[1])]\n{new} = torch.stack({tmp}, 1)\n"
    "{BLD=new}",
    "{tmp} = {BD}\nfor {tmp}r in {BLD}.unbind(1):\n    {tmp} = {tmp} * 0.5 + {tmp}r\n{BD=tmp}",
    "{tmp} = {BD}\nfor {tmp}r in {BLD}.transpose(0, 1):\n    {tmp} = {tmp} * 0.5 + {tmp}r\n{BD=tmp}",
    "for {tmp}l in (self.first, self.second):\n    {BLD!!} = {tmp}l({BLD})",
    "{tmp}n, {tmp}l, {tmp}d = {BLD}.shape; {new} = {BLD}.reshape({tmp}n * {tmp}l, {tmp}d).view({tmp}n, {tmp}l, -1); "
    "{BLD=new}",
    # detach, hooks, autograd
    "{new} = {BLD} * 1.0; {new}.register_hook(lambda g: g * 2) if {new}.requires_grad else None; {BLD=new}",
    "{new} = {BLD}.clone(); {new}.detach_(); {BLD=new}",
    "{new} = {BLD} * 1.0; {new}.retain_grad() if {new}.requires_grad else None; {BLD=new}",
    "{new} = {BLD}.detach().requires_grad_(); {BLD=new}",
    # checkpoint
    "{new} = checkpoint(self.first, {BLD}, use_reentrant=False); {BLD=new}",
    "{new} = checkpoint(self.second, {BLD}, use_reentrant=True); {BLD=new}",
    "{new} = checkpoint(lambda a, b: self.first(a) * b.sigmoid(), {BLD}, {BLD}, use_reentrant=False); {BLD=new}",
    # buffers
    "self.steps += 1",
    "self.mean.mul_(0.5).add_({BD}.detach().mean(0))",
    "self.mean = self.mean * 0.9 + {BD}.detach().mean(0) * 0.1",
    "self.mean.copy_({BD}[0].detach())",
    "with torch.no_grad():\n    self.mean[:4] += 0.25",
    "{new} = {BLD} + self.mean; {BLD=new}",
    "{new} = {BLD} * self.steps; {BLD=new}",
    "self._buffers['mean'] = {BD}.detach().mean(0)",
    "{new} = {BLD} + self.memory.sum(0); {BLD=new}",
    # norms by hand, modes set around a call, weights put in for a call
    "{new} = F.batch_norm({BLD}.transpose(1, 2), self.mean, self.var, training=self.training)"
    ".transpose(1, 2); {BLD=new}",
    "self.norm.eval(); {new} = self.norm({BLD}.transpose(1, 2)).transpose(1, 2); "
    "self.norm.train(self.training); {BLD=new}",
    "{new} = torch.func.functional_call(self.first, {'weight': self.weight, 'bias': {BD}[0]}, ({BLD},)); {BLD=new}",
    "{new} = torch.func.functional_call(self.norm, {'weight': {BD}[0], 'bias': {BD}[-1]}, ({BLD}.transpose(1, 2),)); "
    "{BLD=new}.transpose(1, 2)",
    # caches, objects, closures, generators of Python
    "if {BLD}.shape[1] not in CACHE:\n    CACHE[{BLD}.shape[1]] = torch.arange({BLD}.shape[1]).double()\n"
    "{new} = {BLD} + CACHE[{BLD}.shape[1]][None, :, None]; {BLD=new}",
    "{tmp} = Store(); {new} = {tmp}.add({BLD}) + {tmp}.add({BLD} * 0.5); {BLD=new}",
    "{tmp} = []\ndef {tmp}f(value):\n    {tmp}.append(value)\n    return value * 0.5\n"
    "{new} = {tmp}f({tmp}f({BLD})) + {tmp}[0]\n{BLD=new}",
    "with switched(self, 0.5):\n    {new} = {BLD} * self.gain\n{BLD=new}",
    "try:\n    {new} = {BLD} @ {BLD}\nexcept RuntimeError:\n    {new} = {BLD} * 0.5\n{BLD=new}",
    "{new} = torch.view_as_real(torch.view_as_complex({BLD}.reshape(*{BLD}.shape[:-1], 4, 2)) * torch.polar("
    "torch.ones(4).double(), torch.arange(4).double())).flatten(-2); {BLD=new}",
    "for {tmp}k, {tmp}m in self.nest.items():\n    {BLD!!} = ({tmp}m[0] if {tmp}k == 'a' else {tmp}m)({BLD})",
    "{tmp} = {BLD}.reshape(-1, 8); {new} = torch.zeros_like({tmp})\n"
    "for {tmp}e, {tmp}l in enumerate((self.first, self.second)):\n"
    "    {tmp}i, = torch.where({tmp}.argmax(-1) % 2 == {tmp}e)\n"
    "    {new} = {new}.index_add(0, {tmp}i, {tmp}l({tmp}[{tmp}i]))\n"
    "{new} = {new}.view_as({BLD}); {BLD=new}",
    "{new} = self.keeps({BLD}) * self.keeps.aux; {BLD=new}",
    # parameters in glue
    "{new} = {BLD} @ self.weight; {BLD=new}",
    "{new} = F.linear({BLD}, self.weight.t(), self.bias); {BLD=new}",
    "{new} = F.linear({BLD}, self.first.weight); {BLD=new}",
    "{new} = {BLD} * self.bias; {BLD=new}",
    # keyword arguments, None
    "{new} = torch.clamp(input={BLD}, min=-1.0, max=None); {BLD=new}",
    "{tmp} = None if {BLD}.dim() == 2 else {BLD}; {new} = {tmp} if {tmp} is not None else {BLD}; {BLD=new}",
    "{tmp} = (lambda *args, **kwargs: args[0] + sum(kwargs.values()))({BLD}, a={BLD}, b={S}); {BLD=tmp}",
    "try:\n    {new} = {BLD} / 2\nfinally:\n    {tmp} = 1\n{BLD=new}",
    "assert {BLD}.shape[-1] == 8, f'{{BLD}.shape}'",
]

STATE_ACTIONS: list[str] = [
    "self.count += 1",
    "self.count += 1; {new} = {BLD} * (1 + 0.1 * self.count); {BLD=new}",
    "self.state['n'] += 1",
    "self.state['n'] = self.state.get('n', 0) + 1; {new} = {BLD} * self.state['n']; {BLD=new}",
    "self.history.append({BLD}.shape[0])",
    "self.history.append(1); {new} = {BLD} * len(self.history); {BLD=new}",
    "self.last = {BD}.detach()",
    "{new} = {BLD} + (0.0 if self.last is None else self.last.mean()); self.last = {BD}.detach(); {BLD=new}",
    "CALLS[0] += 1",
    "CALLS[0] += 1; {new} = {BLD} * CALLS[0]; {BLD=new}",
    "TABLE['calls'] += 1; {new} = {BLD} * TABLE['calls']; {BLD=new}",
    "{new} = COUNTED({BLD}); {BLD=new}",
    "type(self).total = getattr(type(self), 'total', 0) + 1; {new} = {BLD} * type(self).total; {BLD=new}",
    "if {BLD}.shape[1] not in self.cache:\n    self.cache[{BLD}.shape[1]] = torch.arange({BLD}.shape[1]).double()\n"
    "{new} = {BLD} + self.cache[{BLD}.shape[1]][None, :, None]; {BLD=new}",
    "{new} = {BLD} * self.gain; {BLD=new}",
    "{new} = {BLD} * self.settings.gain; {BLD=new}",
    "self.gain = 1.0 if self.gain == 2.0 else 2.0",
    "self.memory = torch.cat([self.memory, {BD}.detach().mean(0)[None]])",
    "self.memory = {BD}.detach()",
    "{new} = {BLD} + torch.rand({BLD}.shape, generator=self.generator, dtype=torch.float64); {BLD=new}",
    "self.inner_calls.n += 1; {new} = {BLD} * self.inner_calls.n; {BLD=new}",
    "self.weight.data.mul_(0.9)",
    "with torch.no_grad():\n    self.first.weight[0].mul_(0.5)",
    "if {BLD}.shape[1] > self.longest:\n    self.longest = {BLD}.shape[1]\n"
    "    self.offsets = torch.arange(self.longest).double()\n"
    "{new} = {BLD} + self.offsets[: {BLD}.shape[1], None]; {BLD=new}",
    "{new} = self.shrinks({BLD}); {BLD=new}",
    "self.norm.eval(); {new} = self.norm({BLD}.transpose(1, 2)).transpose(1, 2); {BLD=new}",
    "{new} = {BLD} * (1.0 if self.keeps.aux is None else 2.0); {tmp} = self.keeps({BLD}.detach()); {BLD=new}",
]
