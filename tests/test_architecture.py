"""Holds the architecture that docs/architecture.md tells: order of packages, single users, no effects of an import."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.private_access import accesses_without_reason, private_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "roundpipe"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in SOURCES]

PUBLIC_NAMES = {
    "AutoRoundPipe",
    "BackwardError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "DeadlockError",
    "Device",
    "DeviceMemoryError",
    "ExecutePlan",
    "ForkError",
    "GradScaler",
    "HostMemoryError",
    "LossError",
    "MicrobatchError",
    "NonFiniteError",
    "ModelExecutePlan",
    "NotCopyableError",
    "OptimizerCtx",
    "PartitionError",
    "Pipe",
    "RankError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "RunReport",
    "ScheduleError",
    "Span",
    "SynchronizationError",
    "Timeline",
    "TraceError",
    "balance_by_size",
    "balance_by_time",
    "clip_grad_norm_",
    "compile",
    "distributed",
    "doing_recompute",
    "explain",
    "get_recompute_data",
    "num_microbatches",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
}

PUBLIC_PACKAGES = {"distributed/__init__.py"}
"""Packages that users import from; nothing below imports from them."""

SOLE_USERS = {
    "tabulate": {"reports/tables.py"},
    "matplotlib": {"tools/graph_report.py", "reports/plotting.py"},
    "safetensors": {"wrappers/checkpoint_files.py"},
    "torch.utils._pytree": {"core/trees.py"},
    "torch.distributed.pipelining.microbatch": {"runtime/microbatch/merge.py"},
}
"""Module (and what is below it) -> the only files that may import it."""

WITHOUT_TORCH = {"core/errors.py", "core/checks.py", "core/balance.py", "core/execute_plan.py", "core/schedule.py"}
THROUGH_TORCH = {"sympy"}  # torch itself requires it
OPTIONAL = {"transformers", "peft", "safetensors", "tokenizers", "matplotlib", "sklearn", "accelerate"}


@cache
def lines_of(inside: str = "") -> dict[str, int]:
    """Package or module to its line in docs/architecture.md, the lowest 0; of the root, or of one package."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    blocks = [block.strip().splitlines() for block in re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    if inside:
        (lines,) = [block for block in blocks if all(line.startswith(f"{inside}: ") for line in block)]
    else:
        lines = blocks[0]
    table: dict[str, int] = {}
    for number, line in enumerate(reversed(lines)):
        for name in line.removeprefix(f"{inside}: ").split():
            assert name not in table, f"docs/architecture.md gives {name} two lines"
            table[name] = number
    return table


def member(name: str, inside: str = "") -> str:
    """The package or module, of the root or of one package, that a file is in."""
    return Path(name).with_suffix("").parts[1 if inside else 0]


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(), filename=name)


@cache
def imported_modules(name: str) -> list[str]:
    """Every module that a file imports, at its top or inside a function; names taken from it are resolved."""
    package = ["roundpipe", *Path(name).parts[:-1]]
    found: list[str] = []
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            below = [f"{module}.{alias.name}" for alias in node.names]
            found += [each if file_of(each) or module.startswith("torch") else module for each in below]
    return found


def file_of(module: str) -> str | None:
    """The package's file that a module name stands for."""
    if module.split(".")[0] != "roundpipe":
        return None
    parts = Path(*module.split(".")[1:])
    for candidate in (parts.with_suffix(".py") if parts.name else None, parts / "__init__.py"):
        if candidate is not None and (PACKAGE / candidate).is_file():
            return str(candidate)
    return None


def own_imports(name: str) -> set[str]:
    """The package's files that a file imports."""
    return {target for module in imported_modules(name) if (target := file_of(module)) is not None}


def is_below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


@pytest.mark.parametrize("inside", ["", "fx", "runtime"])
def test_every_package_has_a_line_and_every_line_its_packages(inside: str) -> None:
    names = [name for name in NAMES if name.startswith(inside and inside + "/")]
    members = {member(name, inside) for name in names}
    assert members - {"__init__" if inside else ""} == set(lines_of(inside))


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_to_lower_lines(name: str) -> None:
    for inside in ("", "fx", "runtime"):
        if not name.startswith(inside and inside + "/"):
            continue
        table, own = lines_of(inside), member(name, inside)
        if inside == "" and table[own] == max(table.values()):
            continue  # the root: __init__ takes its names from api
        for target in own_imports(name):
            if target.startswith(inside and inside + "/") and member(target, inside) != own:
                assert table[member(target, inside)] < table[own], f"{name} imports {target}"


def walks() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The numbered walks of docs/architecture.md: heading, and (file, function) per step."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        steps = re.findall(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", section, re.MULTILINE)
        if steps:
            yield section.splitlines()[0], steps


def function_of(file: str, name: str) -> ast.AST:
    """The definition of a function or method, or of a class, by its qualified name."""
    node: ast.AST = tree_of(file)
    for part in name.split("."):
        children = ast.iter_child_nodes(node)
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        definitions = [child for child in children if isinstance(child, kinds) and child.name == part]
        assert definitions, f"docs/architecture.md: {file} has no {name}"
        node = definitions[0]
    return node


def names_used(node: ast.AST) -> set[str]:
    """Names and attributes that code mentions, to call them or to hand them on to be called."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} | {
        child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)
    }


def called_name(name: str) -> str:
    """What a caller writes: a method's own name, a class's for its constructor and its ``__call__``."""
    *owners, last = name.split(".")
    return owners[-1] if last == "__init__" else last


@pytest.mark.parametrize(("heading", "steps"), list(walks()), ids=[heading for heading, _ in walks()])
def test_each_step_of_a_walk_leads_to_the_next(heading: str, steps: list[tuple[str, str]]) -> None:
    for (file, name), (_, following) in pairwise(steps):
        assert called_name(following) in names_used(function_of(file, name)), f"{heading}: {name} -> {following}"
    function_of(*steps[-1])


def test_there_is_a_walk_of_a_microbatch_and_of_a_compile() -> None:
    lengths = {heading: len(steps) for heading, steps in walks()}
    assert len(lengths) == 4 and min(lengths.values()) >= 3, lengths


def test_a_microbatch_passes_through_few_files() -> None:
    """On its way from the user's call to the computation of a stage."""
    forward = next(steps for heading, steps in walks() if "to a stage" in heading)
    assert len({file for file, _ in forward}) <= 12


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (?!term)", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 20 <= len(rows) <= 30


def test_no_file_is_long() -> None:
    assert not [str(path) for path in [*SOURCES, *TESTS] if len(path.read_text().splitlines()) > 400]


def test_a_test_says_why_it_takes_what_is_private() -> None:
    found = list(accesses_without_reason(private_names(map(tree_of, NAMES)), TESTS))
    assert not found, "a comment on the line, or above it, says why: " + " ".join(found)


def test_no_two_classes_have_one_name() -> None:
    classes = [
        node.name.lstrip("_") for name in NAMES for node in ast.walk(tree_of(name)) if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in classes if classes.count(name) > 1}


def test_the_root_holds_the_entry_points_alone() -> None:
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "api.py", "py.typed"}


def test_packages_import_nothing_by_themselves() -> None:
    """So that importing one file never brings a package that stands above it."""
    for name in NAMES:
        if name.endswith("/__init__.py") and name not in PUBLIC_PACKAGES:
            assert not own_imports(name), name


def test_every_package_says_what_lives_in_it() -> None:
    for name in NAMES:
        if name.endswith("/__init__.py"):
            assert len((ast.get_docstring(tree_of(name)) or "").splitlines()) > 1, name


@pytest.mark.parametrize("module", SOLE_USERS)
def test_sole_users(module: str) -> None:
    users = {name for name in NAMES if any(is_below(found, module) for found in imported_modules(name))}
    assert users <= SOLE_USERS[module], f"{module} is imported by {sorted(users)}"


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_without_torch(name: str) -> None:
    assert not [module for module in imported_modules(name) if is_below(module, "torch")]
    assert not [target for target in own_imports(name) if target not in WITHOUT_TORCH]


def private_torch_names(name: str) -> Iterator[str]:
    """Torch names with a private part that a file uses, cut behind that part."""
    dotted = [module for module in imported_modules(name) if is_below(module, "torch")]
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id == "torch":
                dotted.append(".".join(["torch", *reversed(parts)]))
    for text in dotted:
        found = re.match(r"torch(?:\.[A-Za-z]\w*)*\._(?!_)\w+(?:(?<=_C)\.\w+)?", text)
        if found and found[0] != "torch._C":  # the part in front of a longer name
            yield found[0]


def test_a_private_torch_module_has_one_user() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for name in NAMES:
        for private in private_torch_names(name):
            users[private].add(name)
    assert not {private: sorted(files) for private, files in users.items() if len(files) > 1}


def test_optional_packages_are_imported_lazily_and_declared() -> None:
    for name in NAMES:
        if member(name) == "integrations":
            continue  # who imports one of these has its library
        at_top = [node for node in tree_of(name).body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in at_top:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not {module.split(".")[0] for module in modules} & OPTIONAL, name


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    declared = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in [*project["dependencies"], *extras]}
    for name in NAMES:
        roots = {module.split(".")[0] for module in imported_modules(name)}
        assert roots <= declared | THROUGH_TORCH | {"roundpipe", "__future__"} | sys.stdlib_module_names, name


def test_the_package_never_prints() -> None:
    for name in NAMES:
        if name in {"tools/command_line.py", "__main__.py"}:
            continue
        calls = [node.func for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"], name


IMPORT_QUIETLY = """
import sys, threading
import torch

def refuse(name):
    def asked(*args, **kwargs):
        raise SystemExit(f"import roundpipe called {name}")
    return asked

for owner, names in (
    (torch.cuda, ("is_available", "device_count", "init", "_lazy_init", "current_device")),
    (torch.accelerator, ("is_available", "device_count", "current_accelerator", "current_device_index")),
):
    for name in names:
        setattr(owner, name, refuse(f"{owner.__name__}.{name}"))
threads = threading.active_count()
import roundpipe
assert threading.active_count() == threads, threading.enumerate()
loaded = set(sys.modules) & {OPTIONAL!r}
assert not loaded, loaded
slow = {"torch.distributed.pipelining", "torch._dynamo"} & set(sys.modules)
assert not slow, slow
"""


def test_importing_starts_nothing_asks_nothing_and_prints_nothing() -> None:
    script = IMPORT_QUIETLY.replace("{OPTIONAL!r}", repr(OPTIONAL))
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:roundpipe", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_public_names() -> None:
    import roundpipe

    assert set(roundpipe.__all__) == PUBLIC_NAMES
    assert roundpipe.ExecutePlan is roundpipe.ModelExecutePlan
    assert all(hasattr(roundpipe, name) for name in PUBLIC_NAMES)


def test_public_signatures() -> None:
    import roundpipe

    def names(function: object) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]

    assert names(roundpipe.compile) == [
        *("model", "example_args", "example_kwargs", "optim_dtype", "name", "model_run_config", "pin_model"),
        *("devices", "balance", "fallback", "process_group", "shard_optimizer", "wrap_kwargs"),
    ]
    pipe = roundpipe.RoundPipe
    assert names(pipe)[:5] == ["model", "optim_dtype", "name", "model_run_config", "pin_model"]
    assert {"devices", "process_group", "shard_optimizer"} <= set(names(pipe))
    assert names(pipe.forward) == ["args", "roundpipe_run_config", "kwargs"]
    of_losses = "input_args input_kwargs label loss_fn return_outputs run_config loss_reduction loss_scope".split()
    assert names(pipe.forward_backward) == names(pipe.forward_loss) == of_losses
    assert names(pipe.step) == ["step_fn", "is_async", "args", "kwargs"]
    assert names(pipe.optim_named_parameters) == ["prefix", "remove_duplicate"]


def test_the_wheel_has_every_file_of_the_package_and_no_test() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    data = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert set(setuptools["package-data"]["roundpipe"]) == data - set(NAMES)
    assert "py.typed" in data  # the package is typed
    assert setuptools["packages"]["find"]["include"] == ["roundpipe*"]
