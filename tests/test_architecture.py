"""The direction of imports and the size of files and functions, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tracedraft

ROOT = Path(tracedraft.__file__).parent
FILES = {
    ".".join(("tracedraft", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
HEAVY = {"torch", "transformers", "wandb", "ray", "datasets", "pandas", "pyarrow"}
COMPONENTS = ("drafts", "adapters", "workloads")
# What a component may stand on besides its own folder. Everything else uses components.
GROUND = {f"tracedraft.{name}" for name in ("types", "interfaces", "errors", "config", "models.losses")}
MODELS = {"tracedraft.models", "tracedraft.target"}


def imports(source: str, package: str, known: set[str], module_level: bool = False) -> set[str]:
    """Modules that ``source``, a module inside ``package``, imports: ours whole, others by first name.

    Args:
        known: our modules, which tell ``from package import module`` from ``from module import name``.
        module_level: only what importing the module itself imports, type checking left out.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found.update(names & known if names & known else {base})
            if names - known and names & known:
                found.add(base)
        elif module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        elif module_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return {name if name.split(".")[0] == "tracedraft" else name.split(".")[0] for name in found}


def imports_of(module: str, module_level: bool = False) -> set[str]:
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return imports(path.read_text(encoding="utf-8"), package, set(FILES), module_level)


def ours(module: str) -> set[str]:
    return {name for name in imports_of(module) if name.startswith("tracedraft")}


def under(*folders: str) -> list[str]:
    return [m for m in FILES if any(m.startswith(f"tracedraft.{folder}.") for folder in folders)]


def test_the_reader_sees_every_kind_of_import():
    source = """
import torch.nn as nn
from tracedraft import chat, records
from tracedraft.decode import respond
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import wandb
class A:
    import os.path
    def f(self):
        import ray
        from . import trace
        from ..types import Update
"""
    known = {"tracedraft", "tracedraft.chat", "tracedraft.records", "tracedraft.adapters.trace"}
    always = {"torch", "tracedraft.chat", "tracedraft.records", "tracedraft.decode", "typing", "os"}
    inside = {"wandb", "ray", "tracedraft.adapters.trace", "tracedraft.types"}
    assert imports(source, "tracedraft.adapters", known) == always | inside
    assert imports(source, "tracedraft.adapters", known, module_level=True) == always


def test_types_and_interfaces_stand_below_everything():
    assert ours("tracedraft.errors") == set()
    assert ours("tracedraft.types") == set()
    assert ours("tracedraft.interfaces") <= {"tracedraft.types", "tracedraft.errors"}


@pytest.mark.parametrize("kind", COMPONENTS)
def test_components_know_interfaces_and_never_each_other(kind):
    modules = under(kind)
    assert modules
    for module in modules:
        for name in ours(module):
            own = name.startswith(f"tracedraft.{kind}.")
            ground = name in GROUND or (kind == "drafts" and any(name.startswith(m) for m in MODELS))
            assert own or ground, f"{module} imports {name}"


def test_models_know_no_component():
    for module in [*under("models"), "tracedraft.target"]:
        strangers = {name for name in ours(module) for kind in COMPONENTS if f".{kind}" in name}
        assert not strangers, f"{module} imports {strangers}"


def test_the_loop_sees_interfaces_only():
    allowed = {f"tracedraft.{name}" for name in ("interfaces", "types", "verify", "rejection", "meter", "errors")}
    assert ours("tracedraft.decode") <= allowed | {"tracedraft.prefix", "tracedraft.transcript"}
    assert ours("tracedraft.transcript") <= allowed
    assert ours("tracedraft.prefix") <= allowed
    assert ours("tracedraft.verify") <= {"tracedraft.types", "tracedraft.ranking"}


ENTRIES = ("run", "train", "eval_draft", "export", "bench", "bench_gpu")


def test_nothing_imports_the_entry_points():
    users = {
        name: {m for m in FILES if f"tracedraft.{name}" in ours(m)}
        for name in (
            "cli",
            "measure",
            "evaluate",
            "publish",
            "benchmark.command",
            "benchmark.gpu",
            "launch.command",
            *ENTRIES,
        )
    }
    assert users["cli"] == {f"tracedraft.{name}" for name in ENTRIES}
    measuring = ("cli", "evaluate", "benchmark.command", "benchmark.gpu", "launch.command", "launch.worker")
    assert users["measure"] <= {f"tracedraft.{name}" for name in measuring}
    assert users["evaluate"] | users["publish"] | users["benchmark.gpu"] <= {"tracedraft.cli"}
    assert users["benchmark.command"] <= {"tracedraft.cli", "tracedraft.benchmark.gpu"}
    assert set().union(*(users[name] for name in ENTRIES)) == set()


def test_no_import_cycle():
    state: dict[str, str] = {}

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join((*path, module))
        if module in state or module not in FILES:
            return
        state[module] = "open"
        for name in sorted(imports_of(module)):
            walk(name, (*path, module))
        state[module] = "done"

    for module in FILES:
        walk(module, ())


def test_nothing_but_commands_knows_the_launcher():
    for module in FILES:
        if not module.startswith("tracedraft.launch"):
            known = {name for name in ours(module) if name.startswith("tracedraft.launch")}
            if module.startswith("tracedraft.analysis."):  # which read what it left
                known.discard("tracedraft.launch.ledger")
            assert not known or module == "tracedraft.cli", f"{module} imports {known}"


@pytest.mark.parametrize("module", ["cli", "config", "report", "records", "launch.status", "launch.worker"])
def test_light_modules_load_nothing_heavy(module):
    todo, seen = [f"tracedraft.{module}"], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in FILES:
            continue
        seen.add(name)
        loaded = imports_of(name, module_level=True)
        assert not loaded & HEAVY, f"{name} imports {loaded & HEAVY}"
        todo += loaded


def test_the_command_line_starts_without_heavy_packages():
    code = f"import sys, tracedraft.cli, tracedraft.report; print(sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_files_and_functions_stay_small():
    long = []
    for module, path in FILES.items():
        text = path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > 400:
            long.append(f"{module}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > 60:
                    long.append(f"{module}.{node.name}: {length} lines")
    assert long == []
