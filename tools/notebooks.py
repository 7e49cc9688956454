"""Execute the notebooks of the documentation and save what they print and draw in them.

    python tools/notebooks.py           # all in docs/notebooks; minutes
    python tools/notebooks.py similar   # one of them

Each runs in a kernel and an empty folder of its own. The tests run them in small, with the values in the metadata of
a notebook's cell of parameters (`shrink`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "docs/notebooks"
TIMEOUT = 600  # seconds a cell may take


def read_notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def shrink(notebook: Any) -> None:
    """Append to the cell of parameters the assignments in its metadata, which make the notebook quick."""
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source += "\n" + "\n".join(cell.metadata["small"])


@contextmanager
def start_kernel() -> Iterator[KernelManager]:
    with tempfile.TemporaryDirectory() as sockets:  # of this user, in place of ports
        kernel = KernelManager(transport="ipc", connection_file=f"{sockets}/kernel.json")
        kernel.start_kernel()
        try:
            yield kernel
        finally:
            kernel.shutdown_kernel(now=True)


def execute(notebook: Any, folder: Path, kernel: KernelManager) -> None:
    """Run all cells in `folder`, as in a new kernel but for modules that are loaded; the first error is raised."""
    start = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}")
    notebook.cells.insert(0, start)
    NotebookClient(notebook, km=kernel, timeout=TIMEOUT, record_timing=False).execute()
    notebook.cells.remove(start)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks without .ipynb; none: all")
    names = parser.parse_args().names
    paths = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        notebook, begin = read_notebook(path), time.perf_counter()
        with start_kernel() as kernel, tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder), kernel)
        nbformat.write(notebook, path)
        size = path.stat().st_size / 1000
        print(f"{path.name}: {time.perf_counter() - begin:.0f} s, {size:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
