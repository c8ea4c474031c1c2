"""Writes a forward, statement by statement."""

from __future__ import annotations

import random
import re

from tests.fx.fuzz.actions import ACTIONS, STATE_ACTIONS
from tests.fx.fuzz.expressions import (
    ACTIVATION_CONDITIONS,
    ACTIVATION_READS,
    BUFFER_CONDITIONS,
    DATA_CONDITIONS,
    EXPRESSIONS,
    FLAG_CONDITIONS,
    READS,
    SIZE_CONDITIONS,
)

_SLOT = re.compile(r"\{(BLD|BD|BL|LD|S|IBL|IB|MBL|P)(!{0,2})\}")
_RESULT = re.compile(r"\{(BLD|BD|BL|LD|S|IBL|IB|MBL|P)=(new|tmp)\}([^;\n]*)")


class Writer:
    """Writes the forward of one class.

    Args:
        choose: the source of all choices.
        is_root: whether the inputs' data are in scope.
        modules: calls of submodules, as templates of kind BLD.
        nasty: probability of what depends on activations or state.
    """

    def __init__(self, choose: random.Random, is_root: bool, modules: list[str], nasty: float) -> None:
        self.choose = choose
        self.is_root = is_root
        self.modules = modules
        self.nasty = nasty
        self.lines: list[str] = []
        self.scope: dict[str, list[str]] = {}
        self.made = 0
        self.depth = 2

    def emit(self, text: str) -> None:
        for line in text.split("\n"):
            self.lines.append("    " * self.depth + line)

    def define(self, kind: str, name: str) -> None:
        known = self.scope.setdefault(kind, [])
        if name not in known:
            known.append(name)

    def name(self) -> str:
        self.made += 1
        return f"v{self.made}"

    def variable(self, kind: str) -> str:
        known = self.scope[kind]
        if self.choose.random() < 0.55:
            return known[-1]
        return self.choose.choice(known)

    def can_fill(self, template: str) -> bool:
        return all(self.scope.get(match[0]) for match in _SLOT.findall(template))

    def filled(self, template: str) -> str:
        return _SLOT.sub(lambda match: self.variable(match[1]), template)

    def expression(self, pool: list[tuple[str, str]]) -> None:
        kind, template = self.choose.choice([item for item in pool if self.can_fill(item[1])])
        name = self.name()
        self.emit(f"{name} = {self.filled(template)}")
        self.define(kind, name)

    def action(self, pool: list[str]) -> None:
        template = self.choose.choice([item for item in pool if self.can_fill(item)])
        new, tmp = self.name(), self.name()
        results = _RESULT.findall(template)
        body = _RESULT.sub("", template).replace("{new}", new).replace("{tmp}", tmp)
        body = "\n".join(line.rstrip("; ") for line in self.filled(body).split("\n") if line.strip("; "))
        self.emit(body)
        for kind, source, path in results:
            name = new if source == "new" else tmp
            path = path.replace("{tmp}", tmp).replace("{new}", new)
            if path:
                other = self.name()
                self.emit(f"{other} = {name}{path}")
                name = other
            self.define(kind, name)

    def condition(self) -> str:
        pools = [SIZE_CONDITIONS, FLAG_CONDITIONS]
        if self.is_root:
            pools.append(DATA_CONDITIONS)
        if self.choose.random() < self.nasty:
            pools = [ACTIVATION_CONDITIONS, BUFFER_CONDITIONS]
        pool = [item for item in self.choose.choice(pools) if self.can_fill(item)]
        return self.filled(self.choose.choice(pool or SIZE_CONDITIONS))

    def branch(self) -> None:
        name = self.name()
        kind = self.choose.choice(["BLD", "BLD", "BD"])
        before = {key: list(names) for key, names in self.scope.items()}
        self.emit(f"if {self.condition()}:")
        for half in range(2):
            self.scope = {key: list(names) for key, names in before.items()}
            self.depth += 1
            for _ in range(self.choose.randint(0, 2)):
                self.statement()
            self.expression([item for item in EXPRESSIONS if item[0] == kind])
            result = self.scope[kind][-1]
            self.emit(f"{name} = {result}")
            self.depth -= 1
            if not half:
                self.emit("else:")
        self.scope = before
        self.define(kind, name)

    def early_exit(self, returns: str) -> None:
        self.emit(f"if {self.condition()}:")
        self.depth += 1
        self.emit(self.filled(returns))
        self.depth -= 1

    def statement(self) -> None:
        what = self.choose.random()
        if what < 0.22 and self.modules:
            name = self.name()
            self.emit(f"{name} = {self.filled(self.choose.choice(self.modules))}")
            self.define("BLD", name)
        elif what < 0.52:
            self.expression(EXPRESSIONS)
        elif what < 0.78:
            self.action(ACTIONS)
        elif what < 0.78 + 0.12 * self.nasty * 3:
            self.action(STATE_ACTIONS)
        elif what < 0.92 and self.depth < 4:
            self.branch()
        elif self.is_root and what < 0.96:
            self.expression(READS)
        elif self.choose.random() < self.nasty:
            self.expression(ACTIVATION_READS)
        else:
            self.expression(EXPRESSIONS)

    def write(self, num_statements: int, returns: str, early: bool) -> str:
        for index in range(num_statements):
            if early and index == num_statements // 2:
                self.early_exit(returns)
            self.statement()
        self.emit(self.filled(returns))
        return "\n".join(self.lines)
