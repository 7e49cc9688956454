"""veca inside other programs: hooks and parametrizations take effect, the process's settings stay as they were."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny, relative_error
from interpreter import interpreted
from sample_images import random_images
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, prune

import veca
from veca import attention, block_ops
from veca.attention import use_kernel
from veca.inspect import look_inside
from veca.kernels import ops
from veca.optimized import FastVeca, unfusable_reason

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = [
    "patch_embed.proj",
    "coordinate_heads.1",
    "blocks.2.norm1",
    "blocks.2.attn.qkv",
    "blocks.2.attn.proj",
    "blocks.2.norm2",
    "blocks.2.mlp.fc1",
    "blocks.2.mlp.fc2",
    "norm",
    "output_proj",
    "head",
]
"""One of each kind; of those in blocks the last, where `cls_only` takes a path of its own."""
WAYS = {"few cores": (8, False), "all cores": (64, False), "cls_only": (8, True)}
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
"""Rounding of float32 in a model of sharp attention; a layer that is left out makes a difference of more than 1e-3."""


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def make(device: str = "cpu", **overrides: object) -> veca.Veca:
    return make_tiny(**{"output_dim": 48, "num_classes": 5, **overrides}).to(device)


@torch.no_grad()
def run(model: nn.Module, way: str = "few cores") -> list[Tensor]:
    cores, cls_only = WAYS[way]
    out = model(random_images(2, 32, 48).to(next(model.parameters()).device), cores, cls_only)
    return [out.cores, out.coordinates, out.logits] + ([] if cls_only else [out.patches])


def plain(model: nn.Module, way: str = "few cores") -> list[Tensor]:
    """Every layer called, attention by its definition; with `cls_only`, all computed and then left out."""
    with use_kernel("reference"):
        out = run(model, "few cores" if way == "cls_only" else way)
    return [out[0][:, :1], *out[1:3]] if way == "cls_only" else out


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True))


def shift_input(layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0].roll(1, -1),)


def scale_output(layer: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return 1.5 * out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYERS)
def test_hooks_fire_and_take_effect(name: str, way: str, device: str) -> None:
    model = make(device)
    layer, before, calls = model.get_submodule(name), run(model, way), []
    for register in (layer.register_forward_pre_hook, layer.register_forward_hook):
        with register(lambda *_: calls.append(name)):
            assert difference(run(model, way), before) <= TOLERANCE[device]
    assert calls == [name, name]
    for handle in (layer.register_forward_pre_hook(shift_input), layer.register_forward_hook(scale_output)):
        with handle:
            found, expected = run(model, way), plain(model, way)
        assert difference(found, expected) <= TOLERANCE[device]
        assert difference(found, before) > 1e-3
    assert difference(run(model, way), before) <= TOLERANCE[device], "and afterwards all is as it was"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_backward_hooks_of_layers_are_called(name: str, device: str) -> None:
    model, calls = make(device), []
    layer = model.get_submodule(name)
    layer.register_full_backward_pre_hook(lambda *_: calls.append("before"))
    layer.register_full_backward_hook(lambda *_: calls.append("after"))
    out = model(random_images(2, 32, 48).to(device), 8, cls_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that pictures take no gradient
        (out.logits.sum() + out.coordinates.sum()).backward()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("device", DEVICES)
def test_hooks_of_all_modules_fire_for_every_layer(device: str) -> None:
    model, called = make(device), set()
    names = {id(module): name for name, module in model.named_modules()}
    with register_module_forward_hook(lambda module, *_: called.add(names.get(id(module)))):
        found = run(model)
    assert set(LAYERS) <= called
    assert difference(found, run(model)) <= TOLERANCE[device]


@pytest.mark.parametrize("device", DEVICES)
def test_a_replaced_forward_is_called(device: str) -> None:
    """As libraries do that put weights elsewhere between calls."""
    model = make(device)
    before = run(model)
    for name in LAYERS:
        layer, calls = model.get_submodule(name), []
        own = layer.forward
        layer.forward = lambda x, own=own, calls=calls: calls.append(x) or own(x)  # type: ignore[method-assign]
        assert difference(run(model), before) <= TOLERANCE[device]
        assert len(calls) == 1
        del layer.forward


class Quantised(Tensor):
    """A weight that knows one operation, as quantised ones do."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.values = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].values, *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise NotImplementedError(f"quantised weights have no {func}")


@pytest.mark.parametrize("way", WAYS)
def test_quantised_weights_and_layers_without_bias_are_called(way: str) -> None:
    model = make()
    before = run(model, way)
    for name in LAYERS[1:]:
        layer: Any = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Quantised(layer.weight.detach()), requires_grad=False)
    assert difference(run(model, way), before) <= TOLERANCE["cpu"]
    assert "is quantised" in unfusable_reason(model)
    model = make()
    for block in model.blocks:
        block.attn.qkv.bias = block.attn.proj.bias = None
    assert difference(run(model, way), plain(model, way)) <= TOLERANCE["cpu"]
    assert unfusable_reason(model).startswith("the model has no blocks.0.attn.proj.bias")


def prune_some(layer: Any) -> None:
    prune.random_unstructured(layer, "weight", 0.5)


def old_weight_norm(layer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)
    with torch.no_grad():
        layer.weight_g *= 1.5


def new_weight_norm(layer: Any) -> None:
    parametrizations.weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original0 *= 1.5


def spectral_norm(layer: Any) -> None:
    nn.utils.spectral_norm(layer, n_power_iterations=30)
    (hook,) = layer._forward_pre_hooks.values()
    layer.train()
    hook(layer, ())  # or the norm it divides by is that of random vectors
    layer.eval()


def double(layer: Any) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    parametrize.register_parametrization(layer, "weight", Double())


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "prune": (prune_some, lambda layer: prune.remove(layer, "weight")),
    "weight_norm": (old_weight_norm, nn.utils.remove_weight_norm),
    "spectral_norm": (spectral_norm, nn.utils.remove_spectral_norm),
    "parametrize": (double, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    "new weight_norm": (new_weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
}
"""How the weights of a layer are computed from others, and how that is made permanent."""


def change(model: nn.Module, kind: str, done: int) -> None:
    """Begin (0) or make permanent (1) one of `CHANGES` in every layer that has a matrix."""
    for name in LAYERS:
        layer: Any = model.get_submodule(name)
        if isinstance(layer, nn.Linear | nn.Conv2d):
            CHANGES[kind][done](layer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CHANGES)
def test_computed_weights_are_used(kind: str, device: str) -> None:
    model = make(device)
    before = {way: run(model, way) for way in WAYS}
    change(model, kind, 0)
    with torch.no_grad():  # what a layer holds now must not be what its last call left there
        for name, parameter in model.named_parameters():
            if name.endswith(("weight_orig", "weight_g", "original", "original0")):
                parameter.mul_(0.7)
    found = {way: run(model, way) for way in WAYS}
    for way in WAYS:
        assert difference(found[way], plain(model, way)) <= TOLERANCE[device]
    change(model, kind, 1)
    for way in WAYS:
        assert difference(found[way], run(model, way)) <= TOLERANCE[device]
        assert difference(found[way], before[way]) > 1e-3


def test_compiled_and_exported_models_call_them_too() -> None:
    model = make(depth=1)
    before = run(model)
    assert difference(run(torch.compile(model, fullgraph=True, backend="eager")), before) <= TOLERANCE["cpu"]
    for name in ("blocks.0.attn.proj", "blocks.0.norm1", "patch_embed.proj"):
        model.get_submodule(name).register_forward_hook(scale_output)
    torch.compiler.reset()
    expected = plain(model)
    assert difference(run(torch.compile(model, fullgraph=True, backend="eager")), expected) <= TOLERANCE["cpu"]
    with torch.no_grad():
        for strict in (True, False):
            program = torch.export.export(model, (random_images(2, 32, 48), 8, False), strict=strict)
            assert difference(run(program.module()), expected) <= TOLERANCE["cpu"]
    assert difference(expected, before) > 1e-3


# veca.optimize


@pytest.mark.parametrize("kind", CHANGES)
def test_optimized_copy_computes_the_same_weights(kind: str) -> None:
    model = make()
    change(model, kind, 0)
    expected = run(model)
    with torch.compiler.set_stance("force_eager"):
        assert difference(run(veca.optimize(model)), expected) <= TOLERANCE["cpu"]
    assert difference(run(model), expected) == 0


def test_hooks_take_effect_in_a_compiled_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = make(depth=1)
    for name in ("attn.proj", "norm1", "mlp.fc1"):
        model.blocks[0].get_submodule(name).register_forward_hook(scale_output)
    prune_some(model.blocks[0].attn.qkv)
    assert difference(run(veca.optimize(model)), plain(model)) <= TOLERANCE["cpu"]


@pytest.mark.parametrize("name", [*LAYERS, "patch_embed", "blocks.1", "blocks.1.attn", "blocks.1.mlp", ""])
def test_what_cannot_be_folded_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.optimized.supports_fused", lambda *_: True)
    model = make()
    module = model.get_submodule(name)
    assert isinstance(veca.optimize(model), FastVeca)
    for handle in (module.register_forward_hook(scale_output), module.register_full_backward_hook(lambda *_: None)):
        with handle, pytest.raises(veca.VecaError, match=rf"^{name or 'the model'} has hooks.*prune\.remove"):
            veca.optimize(model)
    assert isinstance(veca.optimize(model), FastVeca)


@pytest.mark.parametrize("kind", CHANGES)
def test_computed_weights_are_folded_once_they_are_permanent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.optimized.supports_fused", lambda *_: True)
    model = make()
    change(model, kind, 0)
    way = "remove_parametrizations" if kind in ("parametrize", "new weight_norm") else r"prune\.remove"
    with pytest.raises(veca.VecaError, match=rf"^patch_embed\.proj .*{way}"):
        veca.optimize(model)
    change(model, kind, 1)
    assert isinstance(veca.optimize(model), FastVeca)


def test_replaced_layers_cannot_be_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.optimized.supports_fused", lambda *_: True)
    model = make()
    model.blocks[1].mlp.fc2 = nn.Sequential(OrderedDict(base=model.blocks[1].mlp.fc2))
    with pytest.raises(veca.VecaError, match=r"^blocks\.1\.mlp\.fc2 is a Sequential .*merge adapters"):
        veca.optimize(model)


def test_embed_runs_what_cannot_be_folded_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from veca.embed import EmbedSettings
    from veca.embed.batches import prepare_model

    for place in ("veca.optimized.supports_fused", "veca.embed.batches.supports_fused"):
        monkeypatch.setattr(place, lambda *_: True)
    model = make()
    assert isinstance(prepare_model(model, EmbedSettings(), torch.device("cpu")), FastVeca)
    prune_some(model.blocks[0].attn.qkv)
    assert prepare_model(model, EmbedSettings(), torch.device("cpu")) is model


@pytest.mark.gpu
def test_gpu_pruned_model_is_refused_or_folded_as_pruned() -> None:
    model = make("cuda")
    before = run(model)
    change(model, "prune", 0)
    pruned = run(model)
    with pytest.raises(veca.VecaError, match="patch_embed.proj has hooks"):
        veca.optimize(model)
    change(model, "prune", 1)
    found = [tensor.float() for tensor in run(veca.optimize(model))]
    assert difference(found, pruned) < 0.1  # bfloat16
    assert relative_error(pruned[3], before[3]) > 0.3


@pytest.mark.parametrize(("limit", "expected"), [(8, 64), (100, 100)])
def test_the_recompile_limit_is_raised_while_optimized_blocks_run(limit: int, expected: int) -> None:
    import torch._dynamo.config as config

    during: list[int] = []
    with config.patch(recompile_limit=limit), torch.compiler.set_stance("force_eager"):  # a hook would be traced
        fast = veca.optimize(make())
        assert config.recompile_limit == limit
        fast.blocks[0].register_forward_pre_hook(lambda *_: during.append(config.recompile_limit))
        run(fast)
        with pytest.raises(TypeError):
            fast.blocks[0]()
        assert during == [expected, expected]
        assert config.recompile_limit == limit


# Settings of the process


SETTINGS = """
import faulthandler, json, logging, os, random, signal, sys, threading, warnings
import numpy, PIL.Image, PIL.ImageFile, safetensors, torch, torch.compiler.config, torch.utils.flop_counter

def settings():
    return {
        "meta path": [repr(finder) for finder in sys.meta_path],
        "path": sys.path[:],
        "path hooks": len(sys.path_hooks),
        "excepthook": repr(sys.excepthook),
        "displayhook": repr(sys.displayhook),
        "recursion limit": sys.getrecursionlimit(),
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "faulthandler": faulthandler.is_enabled(),
        "threads": threading.active_count(),
        "loggers": repr(logging.root.handlers) + str(logging.root.level),
        "warnings": [repr(each) for each in warnings.filters] + [repr(warnings.showwarning)],
        "random": hash(random.getstate()),
        "numpy": repr(numpy.get_printoptions()) + repr(numpy.geterr()) + repr(numpy.random.get_state()[1][:9]),
        "pillow": [PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch defaults": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
        "torch random": torch.get_rng_state().sum().item(),
        "torch precision": [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32],
        "torch algorithms": [torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()],
        "compiler": {
            name: repr(getattr(torch.compiler.config, name))
            for name in ("cache_key_tag", "job_id", "force_disable_caches")
        },
        "module hooks": torch.nn.modules.module._has_any_global_hook(),
        "multiprocessing": torch.multiprocessing.get_start_method(allow_none=True),
        "serialization": [repr(each) for each in torch.serialization.get_safe_globals()],
    }

def check(before, what):
    after = settings()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"{what} changed {changed}"
"""


def in_a_process(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", SETTINGS + program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_importing_changes_no_setting_of_the_process() -> None:
    in_a_process("""
before = settings()
import veca
check(before, "import veca")
import timm, transformers.image_processing_utils, transformers.image_transforms, transformers.modeling_utils
before = settings()  # what they changed is their own doing
import veca.hub
check(before, "import veca.hub")
import pyarrow.parquet, rich.console, sympy, torch.distributed.tensor, typer  # their own doing
before = settings()
import veca.embed.run, veca.cli.main, veca.inspect, veca.bench, veca.probe, veca.train.distill, veca.train.finetune.run
check(before, "importing the rest")
""")


def test_using_changes_no_setting_of_the_process() -> None:
    in_a_process("""
import torch._dynamo, torch._inductor.compile_fx  # their own doing
import veca
from veca.inspect import core_maps
model, images = veca.create_model("veca_tiny", depth=2).eval(), torch.zeros(1, 3, 32, 32)
before, limits = settings(), (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit)
with torch.compiler.set_stance("force_eager"):
    for each in (model, veca.optimize(model)):
        each(images, cores=8)
        each(images, cores=8, cls_only=True)
        each.forward_intermediates(images)
        core_maps(each, images)
veca.images.normalize(veca.images.to_tensor(PIL.Image.new("RGB", (16, 16))))
check(before, "using veca")
assert limits == (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit)
""")


@interpreted
def test_only_graphs_with_our_operators_depend_on_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's caches on disk: other kernels find no graph of these, and everybody else's are found as before."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes for so little

    def is_found(function: Callable[..., Tensor]) -> bool:
        torch.compiler.reset()
        counters.clear()
        torch.compile(function)(torch.ones(4, 4), torch.ones(4))
        count = counters["aot_autograd"]
        assert count["autograd_cache_hit"] + count["autograd_cache_miss"] == 1
        return bool(count["autograd_cache_hit"])

    def ours(h: Tensor, bias: Tensor) -> Tensor:
        return ops.swiglu_op(h, bias, ops.KERNELS)

    def theirs(h: Tensor, bias: Tensor) -> Tensor:
        return h @ h  # as the other, nothing that a C++ compiler is needed for

    assert [is_found(ours), is_found(theirs), is_found(ours)] == [False, False, True]
    monkeypatch.setattr(ops, "KERNELS", "those of another version")
    assert [is_found(ours), is_found(theirs)] == [False, True]


def test_every_operator_of_a_model_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "veca":
                named[func._opname] = args[-1]
            return func(*args, **(kwargs or {}))

    named: dict[str, object] = {}
    for module in (attention, block_ops):
        monkeypatch.setattr(module, "use_triton", lambda *_: True)
    monkeypatch.setattr(block_ops, "_on_gpu", lambda _: True)
    model = make()
    with FakeTensorMode(allow_non_fake_inputs=True), Record():
        out = model(torch.empty(2, 3, 32, 48), 8)
        (out.cls.sum() + out.coordinates.sum()).backward()
    names = ("core_attention", "swiglu", "add_norm", "narrow_linear")
    assert named == dict.fromkeys([*names, *(f"{name}_backward" for name in names)], ops.KERNELS)


# Warnings


def line_of(call: Callable[..., Any]) -> tuple[str, int]:
    return inspect.getfile(call), call.__code__.co_firstlineno


def location_of_warning(call: Callable[..., Any], *args: Any) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    (found,) = [each for each in caught if "cores=10 was not trained" in str(each.message)]
    return found.filename, found.lineno


CALLS: dict[str, Callable[..., Any]] = {
    "call": lambda model, images: model(images, cores=10),
    "cls_only": lambda model, images: model(images, 10, cls_only=True),
    "forward": lambda model, images: model.forward(images, 10),
    "forward_features": lambda model, images: model.forward_features(images, 10),
    "forward_intermediates": lambda model, images: model.forward_intermediates(images, cores=10),
    "get_intermediate_layers": lambda model, images: model.get_intermediate_layers(images, cores=10),
    "look_inside": lambda model, images: look_inside(model, images, cores=10),
    "checkpoint": lambda model, images: torch.utils.checkpoint.checkpoint(model, images, 10, use_reentrant=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_untrained_budget_warns_at_the_callers_line(name: str) -> None:
    assert location_of_warning(CALLS[name], make(), random_images(2, 32, 48)) == line_of(CALLS[name])


@pytest.mark.parametrize("name", [name for name in CALLS if name != "checkpoint"])
def test_optimized_models_warn_there_too(name: str) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert location_of_warning(CALLS[name], veca.optimize(make()), random_images(2, 32, 48)) == line_of(CALLS[name])


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("checkpoint", "look_inside")])
def test_folded_models_warn_there_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise Stop  # before the first kernel

    def call(fast: FastVeca) -> None:
        with pytest.raises(Stop):
            CALLS[name](fast, random_images(2, 32, 48))

    monkeypatch.setattr(FastVeca, "_patch_rotary", stop)
    assert location_of_warning(call, FastVeca(make(), torch.float32, None, False)) == line_of(CALLS[name])


def test_models_of_timm_and_transformers_warn_there_too() -> None:
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("veca.hub.transformers")
    pytest.importorskip("veca.hub.timm")  # registers
    small = {"embed_dim": 64, "depth": 2, "num_heads": 2}

    def create(cores: int | None = None) -> Any:
        return timm.create_model("veca_tiny_patch16", cores=cores, num_classes=3, **small)

    made = lambda _: timm.create_model("veca_tiny_patch16", cores=10, **small)  # noqa: E731
    assert location_of_warning(made, None) == line_of(made)
    for name in ("call", "forward_features", "forward_intermediates", "get_intermediate_layers"):
        assert location_of_warning(CALLS[name], create(), random_images(2, 32, 48)) == line_of(CALLS[name])
    asked = lambda model: model(random_images(2, 32, 48), cores=10)  # noqa: E731
    config = transformers.VecaConfig(**small, num_labels=3)
    for kind in (transformers.VecaModel, transformers.VecaForImageClassification, transformers.VecaBackbone):
        assert location_of_warning(asked, kind(config)) == line_of(asked)


def test_files_left_out_warn_at_the_callers_line(tmp_path: Path) -> None:
    from PIL import Image

    from veca.inspect import measure_cores

    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "b.heic").touch()
    with pytest.warns(UserWarning, match="1 file was left out") as caught:
        measure_cores(make(), tmp_path, budgets=(8,), size=16)
    assert caught[0].filename == __file__


# Looking inside


def test_look_inside_projects_and_attends_once() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Softmax(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._softmax.default
            return func(*args, **(kwargs or {}))

    model, calls = make(), []
    with Softmax() as alone:
        run(model)
    with Softmax() as looked:
        look_inside(model, random_images(2, 32, 48), 8, layers=(0, 2))
    assert looked.count - alone.count == 2 * 2, "one over all tokens and one over the cores, in each of two layers"
    for i, block in enumerate(model.blocks):
        block.attn.qkv.register_forward_hook(lambda *_, i=i: calls.append(i))
    look_inside(model, random_images(2, 32, 48), 8, layers=(0, 2))
    assert calls == [0, 0, 1, 2, 2], "once by the model itself"


# Budgets


@pytest.mark.parametrize("cores", [True, False])
def test_a_budget_is_no_bool(cores: Any, tmp_path: Path) -> None:
    from veca.bench.contenders import Case
    from veca.embed import EmbedSettings
    from veca.export import export
    from veca.heads.features import FrozenVeca
    from veca.inspect import draw_cores, measure_cores
    from veca.train.finetune.settings import FinetuneClassifySettings

    model, images, says = make(), random_images(2, 32, 48), f"cores={cores}; a budget is an integer from 1 to 64"
    for call in (model, model.forward_features, torch.compile(model, backend="eager"), veca.optimize(model)):
        with pytest.raises(TypeError, match=says):
            call(images, cores)
    for method in (
        model.forward_intermediates,
        model.get_intermediate_layers,
        lambda x, cores: look_inside(model, x, cores),
    ):
        with pytest.raises(TypeError, match=says):
            method(images, cores=cores)
    for use in (
        lambda: export(model, tmp_path / "m.onnx", cores=cores),
        lambda: draw_cores(model, tmp_path / "x.png", cores=cores),
        lambda: measure_cores(model, tmp_path / "x.png", budgets=(cores, 8)),
    ):
        with pytest.raises(veca.VecaError, match=says):
            use()
    with pytest.raises(veca.VecaError, match=f"cores={cores}: must be null, or an integer"):
        EmbedSettings(cores=cores)
    with pytest.raises(veca.VecaError, match=rf"budgets\[1\]={cores}: must be an integer"):
        veca.VecaConfig(budgets=(8, cores))
    with pytest.raises(veca.VecaError, match=f"cores {cores}: a budget of tiny is an integer from 1 to 64"):
        FrozenVeca(model, "tiny", torch.device("cpu"), "float32").cores((8, cores))
    with pytest.raises(veca.VecaError, match=f"cores={cores}: must be an integer"):
        Case("veca_tiny", 224, 1, cores)
    with pytest.raises(veca.VecaError, match=rf"cores\[1\]={cores}: must be an integer"):
        FinetuneClassifySettings(size=32, cores=(8, cores)).budgets(model.config)
