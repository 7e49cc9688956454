"""VECA where others look for models: `veca.hub.timm`, `veca.hub.transformers`; for other runtimes, `veca.hub.export`.

Importing `veca` is enough for timm: its models are registered at once if timm is there already, or else right after it
is imported, so that nobody waits for a library they do not use. transformers is asked for: `import
veca.hub.transformers`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTimm(MetaPathFinder):
    """Finds timm as it would be found anyway, and has our models registered once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "timm":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register_timm()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_timm() -> None:
    """Make `timm.create_model("veca_small_patch16")` known, now or when timm is imported."""
    if sys.modules.get("timm") is not None:
        importlib.import_module("veca.hub.timm")
    elif not any(isinstance(finder, _AfterTimm) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTimm())


register_timm()
