"""VECA in other libraries: `import veca.hub` makes timm and transformers know it, each if it is installed.

`veca.hub.timm` and `veca.hub.transformers` hold the classes; either one can be imported by itself too. For scripts that
import neither, `python -m veca.hub SCRIPT …` runs them with VECA registered.
"""

import importlib
from importlib.util import find_spec

from veca.errors import warn_caller

for _library in ("timm", "transformers"):
    if find_spec(_library):
        try:
            importlib.import_module(f"{__name__}.{_library}")
        except ImportError as error:  # too old: the other library is registered all the same
            warn_caller(f"VECA is not registered in {_library}: {error}; update it: pip install --upgrade {_library}")
