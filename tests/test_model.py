from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import make_tiny, relative_error
from sample_images import random_images
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import veca
from veca.attention import use_kernel
from veca.flops import model_flops


def test_outputs_have_the_documented_shapes(tiny: veca.Veca) -> None:
    out = tiny(random_images(), cores=16)
    assert out.cls.shape == (2, 64)
    assert out.patches.shape == (2, 15, 64)
    assert out.cores.shape == (2, 16, 64)
    assert out.coordinates.shape == (3, 2, 16, 2)
    assert out.grid == (3, 5)
    assert out.feature_map.shape == (2, 64, 3, 5)
    assert out.logits is None
    torch.testing.assert_close(out.feature_map[:, :, 2, 1], out.patches[:, 11], rtol=0, atol=0)
    torch.testing.assert_close(out.cls, out.cores[:, 0], rtol=0, atol=0)


def test_default_budget_is_all_cores(tiny: veca.Veca) -> None:
    torch.testing.assert_close(tiny(random_images()).patches, tiny(random_images(), cores=64).patches, rtol=0, atol=0)


def test_a_models_own_budget_is_that_of_calls_that_name_none(tiny: veca.Veca) -> None:
    tiny.budget = 8
    assert tiny(random_images()).cores.shape[1] == 8
    assert tiny(random_images(), cores=16).cores.shape[1] == 16
    assert veca.optimize(tiny).budget == 8


@pytest.mark.parametrize("cores", [1, 8, 13, 40, 63])
def test_c_active_cores_are_a_model_of_those_cores_alone(cores: int) -> None:
    """C active cores are a model that only ever had those C."""
    whole = make_tiny(budgets=tuple(range(1, 65)))
    small = make_tiny(num_cores=cores, core_chunk=cores, budgets=(cores,))
    state = {name: tensor for name, tensor in whole.state_dict().items() if not name.startswith(("cores.", "core_s"))}
    state["cores.0"] = torch.cat(list(whole.cores))[:cores]
    state["core_states.0"] = torch.cat(list(whole.core_states))[:cores]
    small.load_state_dict(state)
    for a, b in zip(small(random_images())[:3], whole(random_images(), cores)[:3], strict=True):
        torch.testing.assert_close(a, b)


WIDTHS = (0.25, 0.5, 0.75, 1.0)


def make_elastic_tiny(**overrides: object) -> veca.Veca:
    return make_tiny(mlp_ratio=4.0, widths=WIDTHS, **overrides)


class FirstChannels(nn.Module):
    """Reference of a narrow MLP: cores through the whole one, patches through one that only has the first channels."""

    def __init__(self, mlp: Any, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.hidden = mlp.fc1, mlp.fc2, hidden

    def forward(self, x: Tensor, cores: int, _: int) -> Tensor:
        channels = self.fc2.in_features
        kept = [*range(self.hidden), *range(channels, channels + self.hidden)]
        u, v = F.linear(x[:, cores:], self.fc1.weight[kept], self.fc1.bias[kept]).chunk(2, dim=-1)
        patches = F.linear(F.silu(u) * v, self.fc2.weight[:, : self.hidden], self.fc2.bias)
        u, v = self.fc1(x[:, :cores]).chunk(2, dim=-1)
        return torch.cat([self.fc2(F.silu(u) * v), patches], dim=1)


def with_first_channels(model: veca.Veca, width: float) -> veca.Veca:
    """A model whose patches never had more channels than those of `width`."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.mlp = FirstChannels(block.mlp, model.config.hidden_width(width))
    return model


@pytest.mark.parametrize("width", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("cores", [8, 64])
def test_a_width_is_a_model_whose_patches_have_those_channels_alone(cores: int, width: float) -> None:
    model, images = make_elastic_tiny().double(), random_images().double()
    narrow = with_first_channels(model, width)
    found, expected = (each(images, cores, width=width) for each in (model, narrow))
    for a, b in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    short = model(images, cores, cls_only=True, width=width)
    torch.testing.assert_close(short.cls, expected.cls, rtol=1e-10, atol=1e-12)
    with torch.no_grad():  # the few-cores path
        torch.testing.assert_close(model(images, cores, width=width).patches, expected.patches, rtol=1e-10, atol=1e-12)
    whole = model(images, cores)
    assert relative_error(found.patches, whole.patches) > 0.1
    for a, b in zip(model(images, cores, width=1)[:3], whole[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_gradients_of_a_width_equal_those_of_the_channels_alone() -> None:
    """The rest of the channels learn from the cores. Gradient checkpointing and hooks change nothing."""
    model, images = make_elastic_tiny().double(), random_images().double()
    narrow = with_first_channels(model, 0.25)

    def run(model: veca.Veca, **options: float) -> list[Tensor]:
        out = model(images, 8, **options)
        loss = out.patches.square().mean() + out.cls.sin().sum()
        return list(torch.autograd.grad(loss, list(model.blocks.parameters())))

    expected = run(narrow, width=0.25)
    for a, b in zip(run(model, width=0.25), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    model.set_grad_checkpointing()
    for a, b in zip(run(model, width=0.25), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for block in model.blocks:
        block.mlp.fc2.register_forward_hook(lambda *_: None)
    for a, b in zip(run(model, width=0.25), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_every_method_takes_a_width_and_a_model_has_one_of_its_own() -> None:
    model, images = make_elastic_tiny(), random_images()
    expected = model(images, 8, width=0.5)
    tokens = model.forward_features(images, 8, width=0.5)
    (patches,) = model.get_intermediate_layers(images, cores=8, width=0.5)
    model.width = 0.5
    for found in (patches, tokens[:, 8:], model(images, 8).patches, veca.optimize(model)(images, 8).patches):
        torch.testing.assert_close(found, expected.patches)
    assert relative_error(model(images, 8, width=1).patches, expected.patches) > 0.1


@pytest.mark.parametrize("width", [0, -0.5, 1.01, float("nan"), float("inf"), True, "0.5", torch.tensor(0.5)])
def test_wrong_widths_are_named(width: Any) -> None:
    with pytest.raises(veca.VecaError, match=r"width=.*; a width is a number above 0, at most 1"):
        make_elastic_tiny()(random_images(), 8, width=width)


def test_untrained_width_warns_once() -> None:
    model, images = make_tiny(mlp_ratio=8.0, widths=(1.0, 0.5)), random_images()
    with pytest.warns(UserWarning, match=r"width=0\.25 was not trained \(trained: 1, 0\.5\)"):
        model(images, 8, width=0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width in (0.25, 0.5, np.float32(0.5), 0.52, 1, None):  # 0.52 has the channels of 0.5
            model(images, 8, width=width)


def test_a_narrow_mlp_in_half_precision_and_autocast() -> None:
    model, images = make_elastic_tiny(), random_images()
    expected = model(images, 8, width=0.25).patches
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(model(images, 8, width=0.25).patches, expected) < 0.1
    assert relative_error(model.to(torch.bfloat16)(images, 8, width=0.25).patches, expected) < 0.1


@pytest.mark.parametrize(("cores", "height", "width"), [(8, 16, 16), (24, 64, 96), (64, 112, 48)])
def test_fast_path_equals_the_masked_reference(cores: int, height: int, width: int) -> None:
    model, images = make_tiny().double(), random_images(2, height, width).double()

    def run() -> tuple[Tensor, list[Tensor]]:
        out = model(images, cores)
        target = out.patches.square().mean() + out.cls.sin().sum() + out.coordinates.square().sum()
        grads = torch.autograd.grad(target, list(model.parameters()), allow_unused=True)
        return torch.cat([out.cores, out.patches], dim=1), [g for g in grads if g is not None]

    fast, fast_grads = run()
    with use_kernel("reference"):
        exact, exact_grads = run()
    torch.testing.assert_close(fast, exact, rtol=1e-9, atol=1e-10)
    for a, b in zip(fast_grads, exact_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


class FlopCount(TorchDispatchMode):
    """torch's FlopCounterMode without its global module hooks, for which every layer is called: no shortcuts."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def flops(model: veca.Veca, cores: int, **options: float) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCount() as counter:
        model(random_images(1, 128, 320), cores, **options)
    return counter.total


@pytest.mark.parametrize("width", WIDTHS)
def test_a_narrow_mlp_is_less_work_as_counted(width: float) -> None:
    model = make_elastic_tiny()
    with use_kernel("sdpa"):
        assert flops(model, 8, width=width) == model_flops(model.config, 128, 320, 8, width)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(("cores", "height", "width"), [(1, 48, 80), (8, 16, 16), (13, 128, 48), (16, 48, 80)])
def test_few_cores_are_less_work_and_the_same_numbers(
    cores: int, height: int, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    model, images = make_tiny(budgets=tuple(range(1, 65))).to(dtype), random_images(3, height, width).to(dtype)
    with torch.inference_mode():
        found = model(images, cores)
        with use_kernel("reference"):
            expected = model(images, cores)
    assert relative_error(found.cores, expected.cores) <= tolerance
    assert relative_error(found.patches, expected.patches) <= tolerance
    assert relative_error(found.coordinates, expected.coordinates) <= tolerance


def test_few_cores_are_less_work_in_inference_only(tiny: veca.Veca) -> None:
    with torch.no_grad():
        fast, many = flops(tiny, 8), flops(tiny, 64)
        with use_kernel("sdpa"):
            assert flops(tiny, 8) > 1.1 * fast
            assert flops(tiny, 64) == many
    with use_kernel("sdpa"):
        plain = flops(tiny, 8)
    assert flops(tiny, 8) == plain, "with gradients"


def test_replaced_layers_are_called(tiny: veca.Veca) -> None:
    """An adapter around a projection has a weight too, and it is not the whole of what it does."""

    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.roll(1, -1).repeat(1, 1, self.out_features // self.in_features)

    for block in tiny.blocks:
        for name in ("qkv", "proj"):
            layer = getattr(block.attn, name)
            adapter = Adapter(layer.in_features, layer.out_features)
            adapter.load_state_dict(layer.state_dict())
            setattr(block.attn, name, adapter)
    expected = tiny(random_images(), 8)
    with torch.no_grad():
        torch.testing.assert_close(tiny(random_images(), 8).patches, expected.patches)
        torch.testing.assert_close(tiny(random_images(), 8, cls_only=True).cls, expected.cls)


@pytest.mark.parametrize("cores", [1, 8, 24, 64])
def test_cls_only_is_the_same_global_feature(cores: int) -> None:
    model = make_tiny(budgets=(1, 8, 24, 64), num_classes=7, output_dim=48)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        model, images = model.to(dtype), random_images(3, 48, 112).to(dtype)
        whole, short = model(images, cores), model(images, cores, cls_only=True)
        assert (short.cores.shape, short.patches.shape, short.grid) == ((3, 1, 48), (3, 0, 48), (3, 7))
        assert short.logits is not None
        for a, b in zip(
            (short.cls, short.coordinates, short.logits), (whole.cls, whole.coordinates, whole.logits), strict=True
        ):
            assert relative_error(a, b) <= tolerance
    with pytest.raises(ValueError, match="cls_only=True"):
        _ = short.feature_map


def test_cls_only_gradients_and_checkpointing() -> None:
    model = make_tiny().double()

    def run(**options: bool) -> list[Tensor | None]:
        loss = model(random_images().double(), 8, **options).cls.sin().sum()
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    expected, found = run(), run(cls_only=True)
    model.set_grad_checkpointing()
    for a, b, c in zip(expected, found, run(cls_only=True), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(c, a, rtol=1e-9, atol=1e-12)


def test_cls_only_is_less_work(tiny: veca.Veca) -> None:
    """What is left of the last of three equal blocks is a key per token."""
    with torch.no_grad():
        assert flops(tiny, 64, cls_only=True) < 0.75 * flops(tiny, 64)
    short = tiny.to("meta")(random_images().to("meta"), 64, cls_only=True)
    assert short.cls.shape == (2, 64), "costs are counted on the meta device"


@pytest.mark.parametrize("size", [(16, 16), (16, 160), (320, 16), (224, 336)])
def test_numbers_do_not_depend_on_the_batch(tiny: veca.Veca, size: tuple[int, int]) -> None:
    images = random_images(5, *size)
    together = tiny(images, 16)
    for i in range(5):
        alone = tiny(images[i : i + 1], 16)
        assert relative_error(alone.patches[0], together.patches[i]) < 1e-5
        assert relative_error(alone.coordinates[:, 0], together.coordinates[:, i]) < 1e-5


def test_an_empty_batch_is_no_error(tiny: veca.Veca) -> None:
    assert tiny(random_images(0), 8).patches.shape == (0, 15, 64)


def test_coordinates_move_per_picture_from_the_second_block_on(tiny: veca.Veca) -> None:
    coordinates = tiny(random_images()).coordinates
    start = torch.cat(list(tiny.core_states)).tanh()
    torch.testing.assert_close(coordinates[0], start.expand(2, -1, -1))
    assert (coordinates[1] - coordinates[0]).abs().amax(-1).min() > 0
    assert not torch.allclose(coordinates[1, 0], coordinates[1, 1])
    assert coordinates.abs().max() <= 1


def test_wrong_sizes_name_the_nearest(tiny: veca.Veca) -> None:
    with pytest.raises(ValueError, match=r"image is 250×333; sides must be multiples of 16. Nearest: 256×336"):
        tiny(torch.zeros(1, 3, 250, 333))
    with pytest.raises(ValueError, match="expected \\(batch, 3, height, width\\)"):
        tiny(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match="expected \\(batch, 3, height, width\\)"):
        tiny(torch.zeros(1, 1, 32, 32))
    with pytest.raises(ValueError, match=r"torch.uint8; make them float with veca.images.normalize"):
        tiny(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="image is 0×32"):
        tiny(torch.zeros(1, 3, 0, 32))


def test_what_is_no_batch_of_images_is_told_how_to_become_one(tiny: veca.Veca) -> None:
    with pytest.raises(ValueError, match=r"\(3, 32, 32\); .*: images\[None\] makes a batch"):
        tiny(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match=r"\(1, 32, 32, 3\); .*: images.permute\(0, 3, 1, 2\)"):
        tiny(torch.zeros(1, 32, 32, 3))
    with pytest.raises(ValueError, match=r": images\[None\].permute\(0, 3, 1, 2\)"):
        tiny(torch.zeros(32, 32, 3))
    for images in ([torch.zeros(3, 32, 32)], "photo.jpg", random_images().numpy()):
        with pytest.raises(TypeError, match=f"images are {type(images).__name__}; .* veca.images.load_image"):
            tiny(images)  # type: ignore[arg-type]


@pytest.mark.parametrize("cores", [0, -1, 65, 10**9])
def test_budgets_out_of_range_are_named(tiny: veca.Veca, cores: int) -> None:
    with pytest.raises(ValueError, match=f"cores={cores}; a budget is an integer from 1 to 64"):
        tiny(random_images(), cores)


def test_a_budget_that_is_no_integer(tiny: veca.Veca) -> None:
    for cores in (8.0, "all"):
        with pytest.raises(TypeError, match=f"cores={cores!r}; a budget is an integer from 1 to 64, or None"):
            tiny(random_images(), cores)  # type: ignore[arg-type]


def test_untrained_budget_warns_once(tiny: veca.Veca) -> None:
    with pytest.warns(UserWarning, match="cores=10 was not trained"):
        tiny(random_images(), 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny(random_images(), 10)
        tiny(random_images(), 16)
    with pytest.warns(UserWarning, match="cores=11 was not trained"):
        tiny(random_images(), 11)


def test_forward_features_and_head() -> None:
    model = make_tiny(num_classes=7, output_dim=48)
    out, tokens = model(random_images(), 8), model.forward_features(random_images(), 8)
    torch.testing.assert_close(tokens, torch.cat([out.cores, out.patches], dim=1), rtol=0, atol=0)
    assert tokens.shape == (2, 8 + 15, 48)
    assert out.logits is not None
    assert out.logits.shape == (2, 7)
    torch.testing.assert_close(model.forward_head(tokens), out.logits, rtol=0, atol=0)
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), out.cls, rtol=0, atol=0)


def test_reset_classifier_replaces_the_head(tiny: veca.Veca) -> None:
    tiny.to(torch.bfloat16).reset_classifier(5)
    assert tiny.config.num_classes == 5
    logits = tiny(random_images(), 8).logits
    assert logits is not None
    assert (logits.shape, logits.dtype) == ((2, 5), torch.bfloat16)
    assert tiny.get_classifier() is tiny.head
    tiny.reset_classifier(0)
    assert tiny(random_images(), 8).logits is None
    assert tiny.num_classes == 0
    with pytest.raises(ValueError, match="num_classes"):
        tiny.reset_classifier(-1)
    with pytest.raises(ValueError, match="global_pool='avg'"):
        tiny.reset_classifier(3, "avg")


def test_intermediates_have_the_structure_of_timm() -> None:
    """The same calls on timm's DINOv3-shaped ViT and on ours give results of the same structure."""
    model = make_tiny()
    dense = timm.create_model("vit_small_patch16_dinov3", num_classes=0, depth=3, dynamic_img_size=True).eval()
    images = random_images(2, 64, 96)
    for options in (
        {},
        {"indices": 2},
        {"indices": [0, 2], "output_fmt": "NLC"},
        {"indices": [2, 0]},
        {"indices": [-1], "norm": True, "return_prefix_tokens": True},
        {"indices": [1], "intermediates_only": True, "stop_early": True},
        {"indices": [0, 1], "stop_early": True},
        {"indices": [0], "stop_early": True, "intermediates_only": True, "return_prefix_tokens": True},
    ):
        ours, theirs = model.forward_intermediates(images, **options), dense.forward_intermediates(images, **options)
        if not options.get("intermediates_only"):
            assert ours[0].shape[0] == theirs[0].shape[0]
            if not options.get("stop_early"):
                torch.testing.assert_close(ours[0], model.forward_features(images))
            ours, theirs = ours[1], theirs[1]
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert isinstance(a, tuple) == isinstance(b, tuple)
            a, b = (a[0], b[0]) if isinstance(a, tuple) else (a, b)
            assert a.shape[0] == b.shape[0]
            channels = 1 if a.ndim == 4 else 2
            assert [n for i, n in enumerate(a.shape) if i != channels] == [
                n for i, n in enumerate(b.shape) if i != channels
            ]


def test_intermediates_are_the_blocks_outputs(tiny: veca.Veca) -> None:
    seen: list[Tensor] = []
    for block in tiny.blocks:
        block.register_forward_hook(lambda _, __, out: seen.append(out[0].total()))
    final, found = tiny.forward_intermediates(
        random_images(), [2, 0], return_prefix_tokens=True, output_fmt="NLC", cores=8
    )
    for (patches, prefix), expected in zip(found, [seen[0], seen[2]], strict=True):
        torch.testing.assert_close(torch.cat([prefix, patches], dim=1), expected, rtol=0, atol=0)
    torch.testing.assert_close(final, tiny.norm(seen[2]), rtol=0, atol=0)


def test_stop_early_runs_no_more_blocks(tiny: veca.Veca) -> None:
    ran: list[int] = []
    for i, block in enumerate(tiny.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    final, found = tiny.forward_intermediates(
        random_images(), [0, 1], return_prefix_tokens=True, norm=True, output_fmt="NLC", stop_early=True
    )
    assert ran == [0, 1]
    torch.testing.assert_close(final, torch.cat(found[-1][::-1], dim=1), rtol=0, atol=0)


def test_get_intermediate_layers_follows_dinov3(tiny: veca.Veca) -> None:
    images = random_images()
    out = tiny(images, cores=16)
    (patches,) = tiny.get_intermediate_layers(images, cores=16)
    torch.testing.assert_close(patches, out.patches)
    ((feature_map, cls),) = tiny.get_intermediate_layers(images, reshape=True, return_class_token=True, cores=16)
    torch.testing.assert_close(feature_map, out.feature_map)
    torch.testing.assert_close(cls, out.cls)
    assert len(tiny.get_intermediate_layers(images, n=3)) == 3
    for n in (np.int64(2), np.arange(2), range(2)):
        assert len(tiny.get_intermediate_layers(images, n=n)) == 2
    raw = tiny.get_intermediate_layers(images, n=[0, 2], norm=False)
    normed = tiny.get_intermediate_layers(images, n=[0, 2])
    assert isinstance(raw, tuple)
    for a, b in zip(raw, normed, strict=True):
        torch.testing.assert_close(tiny.norm(a), b)


def test_wrong_layers_are_named(tiny: veca.Veca) -> None:
    with pytest.raises(ValueError, match="last 4 blocks; the model has 3"):
        tiny.get_intermediate_layers(random_images(), n=4)
    with pytest.raises(ValueError, match="block 3; the model has blocks 0 to 2"):
        tiny.get_intermediate_layers(random_images(), n=[0, 3])
    with pytest.raises(ValueError, match="no block"):
        tiny.get_intermediate_layers(random_images(), n=[])
    with pytest.raises(ValueError, match="choose 'NCHW' or 'NLC'"):
        tiny.forward_intermediates(random_images(), output_fmt="NHWC")  # type: ignore[arg-type]


def test_gradient_checkpointing_changes_memory_only(tiny: veca.Veca) -> None:
    tiny.train()

    def run() -> tuple[list[Tensor], int]:
        saved = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = tiny(random_images(), 16).patches.square().mean()
        grads = torch.autograd.grad(loss, list(tiny.parameters()), allow_unused=True)
        return [g for g in grads if g is not None], saved

    plain, plain_saved = run()
    tiny.set_grad_checkpointing()
    frugal, frugal_saved = run()
    for a, b in zip(plain, frugal, strict=True):
        torch.testing.assert_close(a, b)
    assert frugal_saved < plain_saved / 3


def test_training_augments_patch_coordinates_only(tiny: veca.Veca) -> None:
    tiny.train()
    torch.manual_seed(0)
    first, second = tiny(random_images(), 16), tiny(random_images(), 16)
    assert not torch.allclose(first.patches, second.patches)
    torch.testing.assert_close(first.coordinates[0], second.coordinates[0], rtol=0, atol=0)
    torch.manual_seed(0)
    torch.testing.assert_close(tiny(random_images(), 16).patches, first.patches)
    still = make_tiny(coordinate_shift=0.0, coordinate_rescale=1.0)
    expected = still(random_images(), 16).patches
    torch.testing.assert_close(still.train()(random_images(), 16).patches, expected)


@pytest.mark.parametrize("deferred", [False, True])
def test_initial_weights_have_the_documented_scale(deferred: bool) -> None:
    torch.manual_seed(0)
    with torch.device("meta" if deferred else "cpu"):
        model = veca.create_model("veca_tiny")
    if deferred:
        model.to_empty(device="cpu").init_weights()
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        assert norm.eps == 1e-5
        assert norm.weight.eq(1).all()
        assert norm.bias.eq(0).all()
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len(weights) == 1 + 12 * 4 + 11
    for weight in weights:
        assert weight.std().item() == pytest.approx(0.02, rel=0.2 if weight.numel() < 1000 else 0.02)
    assert all(m.bias.count_nonzero() == 0 for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    assert torch.cat(list(model.cores)).std().item() == pytest.approx(192**-0.5, rel=0.03)
    assert model.coordinate_alpha.tolist() == pytest.approx([0.01] * 11)
    assert torch.cat(list(model.core_states)).tanh()[0].norm() < 0.1, "the first core starts at the centre"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_coordinates_in_float32(tiny: veca.Veca, dtype: torch.dtype) -> None:
    exact = tiny(random_images(), 16)
    with torch.autocast("cpu", dtype):
        out = tiny(random_images(), 16)
    assert out.coordinates.dtype == torch.float32
    assert relative_error(out.patches, exact.patches) < 0.05
    half = copy.deepcopy(tiny).to(dtype)(random_images().to(dtype), 16)
    assert (half.patches.dtype, half.coordinates.dtype) == (dtype, torch.float32)
    assert relative_error(half.patches, exact.patches) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shortcuts_in_half_precision_lose_no_more_than_the_plain_way(tiny: veca.Veca, dtype: torch.dtype) -> None:
    half, images = copy.deepcopy(tiny).to(dtype), random_images(4)
    with torch.inference_mode():
        exact = copy.deepcopy(tiny).double()(images.double(), 16)
        for model, autocast in ((tiny, True), (half, False)):
            with torch.autocast("cpu", dtype, enabled=autocast):
                with use_kernel("sdpa"):
                    plain = model(images, 16)
                fast, short = model(images, 16), model(images, 16, cls_only=True)
            assert fast.patches.dtype == plain.patches.dtype
            assert relative_error(fast.patches, exact.patches) < 1.2 * relative_error(plain.patches, exact.patches)
            assert relative_error(short.cls, exact.cls) < 1.5 * relative_error(plain.cls, exact.cls)


def test_float32_pictures_into_a_half_model(tiny: veca.Veca) -> None:
    assert tiny.bfloat16()(random_images(), 8).cls.dtype == torch.bfloat16


def test_compiles_as_one_graph() -> None:
    model = make_tiny(depth=2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for cores in (8, 24, 64):
        with torch.no_grad():
            found = compiled(random_images(), cores)
            short = compiled(random_images(), cores, cls_only=True)
        torch.testing.assert_close(found.patches, model(random_images(), cores).patches)
        torch.testing.assert_close(short.cls, found.cls)
        assert found.grid == (3, 5)


def test_widths_are_compiled_as_one_graph() -> None:
    """The whole MLP is one graph, the first width below it a second; no other width compiles again."""
    torch.compiler.reset()
    model, graphs = make_elastic_tiny(depth=2), 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for width in (1.0, 0.5, 0.25, 0.75, 0.5, 1.0):
        with torch.no_grad():
            found = compiled(random_images(), 16, width=width)
            torch.testing.assert_close(found.patches, model(random_images(), 16, width=width).patches)
    assert graphs == 2


def test_compiles_as_one_graph_with_gradients() -> None:
    """Forward and backward passes are traced, but not turned into machine code."""
    model = make_elastic_tiny(depth=2)
    for checkpointed in (False, True):
        torch.compiler.reset()
        model.zero_grad()
        model.train(checkpointed).set_grad_checkpointing(checkpointed)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        out = compiled(random_images(), 16, cls_only=not checkpointed, width=0.5)
        (out.cls.sum() + out.patches.sum()).backward()
        assert model.blocks[0].attn.qkv.weight.grad is not None


def test_an_exported_program_gives_the_same_features(tiny: veca.Veca) -> None:
    exported = torch.export.export(tiny, (random_images(),), {"cores": 16}).module()
    other = torch.randn(2, 3, 48, 80)
    torch.testing.assert_close(exported(other, cores=16).patches, tiny(other, 16).patches)
    with torch.no_grad():
        few = torch.export.export(tiny, (random_images(),), {"cores": 16}).module()
        short = torch.export.export(tiny, (random_images(),), {"cores": 16, "cls_only": True}).module()
        torch.testing.assert_close(few(other, cores=16).patches, tiny(other, 16).patches)
        torch.testing.assert_close(short(other, cores=16, cls_only=True).cls, tiny(other, 16).cls)


def test_deep_copy_and_state_dict(tiny: veca.Veca) -> None:
    twin = veca.Veca(tiny.config).eval()
    twin.load_state_dict(copy.deepcopy(tiny).state_dict())
    torch.testing.assert_close(twin(random_images(), 8).patches, tiny(random_images(), 8).patches, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_inductor_and_autocast(dtype: torch.dtype) -> None:
    model = make_elastic_tiny().cuda()
    images = random_images(2, 96, 160).cuda()
    compiled = torch.compile(model, fullgraph=True)
    for width in (1, 0.25, 0.5):
        exact = copy.deepcopy(model).double()(images.double(), 16, width=width)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            out = compiled(images, 16, width=width)
            (out.patches.float().square().mean() + out.cls.float().sum()).backward()
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
        assert relative_error(out.patches, exact.patches) < tolerance
        assert out.coordinates.dtype == torch.float32
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
def test_features_on_gpu_match_cpu() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model = make_tiny()
    on_cpu = model(random_images(), 24)
    on_gpu = model.cuda()(random_images().cuda(), 24)
    assert relative_error(on_gpu.patches.cpu(), on_cpu.patches) < 1e-5
