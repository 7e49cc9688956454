"""Folders of transformers that load by `trust_remote_code=True`: `modeling_veca.py` is saved with them."""

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

from veca.utils.files import atomic_path


class SavedWithCode:
    """Folders that `save_pretrained` writes load by `trust_remote_code=True` too: they hold a module that imports this.

    It is for programs that import transformers only. Where this module is imported, the Auto classes use its classes.
    """

    auto_map: dict[str, str]
    _code = Path(__file__).with_name("modeling_veca.py")
    _auto_classes: ClassVar[dict[str, str]]
    """Which class an Auto class makes."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "") -> None:
        """Nothing to do: transformers would copy all of this module to the folders that it saves."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        self.auto_map = {auto: f"{self._code.stem}.{name}" for auto, name in self._auto_classes.items()}
        written = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]  # a mixin
        with atomic_path(Path(save_directory, self._code.name)) as part:
            shutil.copyfile(self._code, part)
        return written
