"""The structure of the sources: no import cycles, and one meaning for each public name."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"
SHARED_NAMES = {
    "main",  # `python -m veca` and the command
    "Out",  # the option --out, whose help differs from command to command
    "VecaConfig",  # ours, and the one of transformers
}
MODULES = {
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
    for path in sorted(SOURCES.rglob("*.py"))
}


def imported_modules(tree: ast.Module) -> set[str]:
    """The modules of ours that a module imports when it is imported itself, not in functions or for type checkers."""
    modules = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A name in an import may be that of a module in a package.
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in MODULES else str(node.module) for name in named}
    return modules & MODULES.keys()


def top_level_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar(" not in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_no_module_imports_itself_through_others() -> None:
    graph = {name: imported_modules(tree) for name, tree in MODULES.items()}
    assert sum(map(len, graph.values())) > len(graph)  # they were found
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_a_public_name_is_defined_in_one_module() -> None:
    defined = defaultdict(list)
    for module, tree in MODULES.items():
        for name in top_level_names(tree):
            defined[name].append(module)
    twice = {name: modules for name, modules in defined.items() if len(modules) > 1 and name not in SHARED_NAMES}
    assert twice == {}
