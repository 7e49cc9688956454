"""Write the tree of src/veca into CONTRIBUTING.md, one line per file from its module docstring.

`python tools/tree.py` rewrites the tree between its markers, `--check` fails where it differs.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
TREE = re.compile(r"<!-- tree -->\n.*?<!-- end -->", re.DOTALL)


def describe_module(path: Path) -> str:
    """First line of a module's docstring, without its full stop."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].rstrip(".")


def list_package(package: Path, depth: int = 0) -> list[tuple[str, str]]:
    """Names, indented by depth, and descriptions: the package, its modules, then its subpackages."""
    lines = [("  " * depth + package.name + "/", describe_module(package / "__init__.py"))]
    modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
    lines += [("  " * (depth + 1) + path.name, describe_module(path)) for path in modules]
    for child in sorted(package.iterdir()):
        if (child / "__init__.py").exists():
            lines += list_package(child, depth + 1)
    return lines


def render_tree(package: Path = ROOT / "src/veca") -> str:
    """The tree as a Markdown code block between its markers."""
    lines = list_package(package)
    width = max(len(name) for name, _ in lines) + 2
    body = "\n".join(f"{name:{width}}{description}".rstrip() for name, description in lines)
    return f"<!-- tree -->\n```text\n{body}\n```\n<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where the tree would change")
    check = parser.parse_args().check
    text = PAGE.read_text()
    rendered = TREE.sub(lambda _: render_tree(), text)
    if check and rendered != text:
        sys.exit(f"{PAGE} differs from the docstrings: run python tools/tree.py")
    PAGE.write_text(rendered)


if __name__ == "__main__":
    main()
