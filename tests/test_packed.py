from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import veca
from veca.images import native_sizes
from veca.outputs import PackedOutput
from veca.packed import forward_by_kind

LIMIT = 1e-6


def make_model(**overrides: Any) -> veca.Veca:
    torch.manual_seed(0)
    options = {"embed_dim": 64, "depth": 3, "num_heads": 2, "widths": (1, 0.5, 0.25), **overrides}
    model = veca.create_model("veca_tiny", pretrained=False, **options).eval()
    for parameter in model.parameters():  # biases and cores that matter
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def random_mix(seed: int) -> tuple[list[Tensor], list[int], list[float]]:
    """Images of 1 to 5 sizes, with budgets and widths."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    grids = [(draw.randint(1, 6), draw.randint(1, 6)) for _ in range(draw.randint(1, 4))]
    grids += draw.choice(([], [(1, 1)], [(1, 64)], [(1, 1), (1, 64)]))
    chosen = [draw.choice(grids) for _ in range(draw.randint(1, 6))]
    images = [torch.randn(3, 16 * rows, 16 * columns) for rows, columns in chosen]
    budgets = [draw.choice((8, 16, 40, 64)) for _ in chosen]
    return images, budgets, [draw.choice((1, 0.5, 0.25)) for _ in chosen]


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float(((found - expected).norm() / expected.norm().clamp_min(1e-30)).detach())


def tensors(out: veca.VecaOutput) -> tuple[Tensor, Tensor, Tensor]:
    return out.cores, out.patches, out.coordinates


def assert_alike(model: veca.Veca, images: Sequence[Tensor], out: PackedOutput, **settings: Sequence[Any]) -> None:
    """Every image of a pack has what the model gives for it alone."""
    assert len(out) == len(images)
    for i, (image, found) in enumerate(zip(images, out, strict=True)):
        expected = model(image[None], **{name: values[i] for name, values in settings.items()})
        assert found.grid == expected.grid
        assert max(map(relative, tensors(found), tensors(expected))) <= LIMIT
        assert relative(out.cls[i], expected.cls[0]) <= LIMIT
        assert relative(out.feature_maps[i], expected.feature_map[0]) <= LIMIT


def gradients(model: veca.Veca, outputs: Iterable[veca.VecaOutput], factors: list[list[Tensor]]) -> dict[str, Tensor]:
    """Of the sum of all tensors of the outputs, each number times its factor, by the names of parameters."""
    model.zero_grad()
    pairs = (zip(tensors(out), own, strict=True) for out, own in zip(outputs, factors, strict=True))
    sum((x * w).sum() for each in pairs for x, w in each).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def together(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients.values()])


def test_random_mixes_forward_and_backward() -> None:
    model = make_model()
    for seed in range(200):
        images, budgets, widths = random_mix(seed)
        settings = {"cores": budgets, "width": widths} if seed % 2 else {"cores": budgets}
        out = model(veca.pack(images), **settings)
        with torch.no_grad():
            assert_alike(model, images, out, **settings)
        if seed % 4:  # tests/tools/pack_errors.py compares the gradients of all
            continue
        factors = [[torch.randn_like(x) for x in tensors(each)] for each in out]
        packed = gradients(model, out, factors)
        each = [{name: values[i] for name, values in settings.items()} for i in range(len(images))]
        alone = (model(image[None], **own) for image, own in zip(images, each, strict=True))
        expected = gradients(model, alone, factors)
        assert packed.keys() == expected.keys()
        for name, gradient in expected.items():
            assert relative(packed[name], gradient) <= 5 * LIMIT, name  # some are sums that nearly cancel
        assert relative(together(packed), together(expected)) <= LIMIT


def test_order_and_company_change_nothing() -> None:
    model, (images, budgets, widths) = make_model(), random_mix(5)
    assert len(images) > 2
    with torch.no_grad():
        out = model(veca.pack(images), cores=budgets, width=widths)
        back = model(veca.pack(images[::-1]), cores=budgets[::-1], width=widths[::-1])
        alone = model(veca.pack(images[1:2]), cores=budgets[1], width=widths[1])
    for i, each in enumerate(out):
        assert max(map(relative, tensors(back[len(images) - 1 - i]), tensors(each))) <= LIMIT
    assert max(map(relative, tensors(alone[0]), tensors(out[1]))) <= LIMIT
    assert tuple(len(part.flatten(1).T) for part in out.feature_maps) == veca.pack(images).num_patches
    assert out.patch_offsets[-1] == len(out.patches)
    assert out.core_offsets[-1] == len(out.cores) == sum(budgets)


def test_cls_only_classifier_checkpointing_and_the_model_of_one_kind() -> None:
    model, (images, budgets, widths) = make_model(num_classes=5), random_mix(5)
    batch = veca.pack(images)
    out = model(batch, cores=budgets, width=widths)
    with torch.no_grad():
        first = model(batch, cores=budgets, width=widths, cls_only=True)
        by_kind = forward_by_kind(model, batch, budgets, width=widths)
        first_by_kind = forward_by_kind(model, batch, budgets, True, widths)
        logits = torch.cat([model(x[None], c, width=w).logits for x, c, w in zip(images, budgets, widths, strict=True)])
    for each in (out, first, by_kind, first_by_kind):
        assert relative(each.cls, out.cls) <= LIMIT
        assert relative(each.logits, logits) <= LIMIT
        assert relative(each.coordinates, out.coordinates) <= LIMIT
    assert relative(by_kind.patches, out.patches) <= LIMIT
    assert first[1].cores.shape == (1, 1, 64)
    with pytest.raises(veca.VecaError, match="cls_only=True; leave it out"):
        _ = first.feature_maps
    out.patches.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_grad_checkpointing()
    model(batch, cores=budgets, width=widths).patches.sum().backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, rtol=1e-5, atol=1e-6)


def test_compiled_models_compile_once_for_all_mixes() -> None:
    model = make_model()
    compiled, graphs = torch.compile(model, backend="eager", dynamic=True), []
    for seed in (1, 5, 7, 9):
        images, budgets, _ = random_mix(seed)
        with torch.no_grad():
            assert_alike(model, images, compiled(veca.pack(images), cores=budgets), cores=budgets)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs[1:])) == 1  # not one more, whatever the mix


def test_augmented_coordinates_are_those_of_a_batch_of_one_size() -> None:
    model, images = make_model(coordinate_shift=0.2, coordinate_rescale=1.5).train(), torch.randn(2, 3, 32, 48)
    torch.manual_seed(1)
    expected = model(images, cores=8)
    torch.manual_seed(1)
    out = model(veca.pack(list(images)), cores=8)
    assert relative(torch.stack(out.feature_maps), expected.feature_map) <= LIMIT


def test_compute_chooses_for_each_image() -> None:
    model, images = make_model(), [torch.randn(3, 64, 64), torch.randn(3, 256, 256)]
    out = model(veca.pack(images), compute=0.6)
    choices = [veca.resolve_compute(model, 0.6, size=image.shape[1:]) for image in images]
    assert out.budgets == tuple(choice.cores for choice in choices)
    with pytest.raises(veca.VecaError, match="resize=True does not go with a pack"):
        model(veca.pack(images), compute=0.6, resize=True)
    with pytest.raises(veca.VecaError, match="pass the one or the other"):
        model(veca.pack(images), compute=0.6, cores=[8, 8])


def test_sizes_of_packed_images() -> None:
    batch = veca.pack([Image.new("RGB", (250, 333)), torch.zeros(3, 500, 30), torch.zeros(3, 9, 9, dtype=torch.uint8)])
    assert batch.grids == ((21, 16), (31, 2), (1, 1))
    assert veca.pack([torch.zeros(3, 16, 100_000)], max_patches=64).grids == ((1, 64),)
    for height, width, limit in (
        (480, 640, 256),
        (1, 10**6, 7),
        (10**6, 1, 7),
        (640, 480, 1),
        (31, 900, 40),
        (33, 33, 3),
    ):
        rows, columns = (side // 16 for side in native_sizes(height, width, limit))
        assert 1 <= rows * columns <= limit
        if min(rows, columns) > 3:
            assert rows / columns == pytest.approx(height / width, rel=0.15)
    assert native_sizes(480, 640, 30 * 40) == (480, 640)  # at the limit: as it is


def test_images_are_normalised_and_resized_as_elsewhere() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    from_image, from_pixels = veca.pack([image]), veca.pack([pixels])
    assert torch.equal(from_image.pixels, from_pixels.pixels)
    assert torch.equal(from_image.pixels, veca.pack([veca.images.normalize(pixels)]).pixels)
    odd = torch.randn(3, 50, 60)
    assert torch.equal(veca.pack([odd]).pixels, veca.pack([veca.images.resize_to_multiple(odd)]).pixels)


def test_dictionaries_of_naflex() -> None:
    from timm.data.naflex_transforms import patchify_image

    images = [torch.randn(3, 32, 64), torch.randn(3, 48, 16)]
    parts = [patchify_image(image, (16, 16)) for image in images]
    longest = max(len(patches) for patches, *_ in parts)

    def pad(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])

    patches, coordinates, valid = (torch.stack([pad(x) for x in each]) for each in zip(*parts, strict=True))
    naflex = {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}
    expected = veca.pack(images)
    for given in (naflex, {**naflex, "patches": patches.unflatten(2, (16, 16, 3))}):
        found = veca.pack(given)
        assert found.grids == expected.grids
        assert torch.equal(found.pixels, expected.pixels)
    model = make_model(num_classes=5)
    with torch.no_grad():
        assert torch.equal(model(naflex, cores=8).patches, model(expected, cores=8).patches)
    moved = {**naflex, "patch_coord": coordinates.flip(2)}
    with pytest.raises(veca.VecaError, match="patch_coord of image 0 are not those of a whole grid"):
        veca.pack(moved)
    with pytest.raises(veca.VecaError, match="the dictionary has patches; a pack is made of patches, patch_coord"):
        veca.pack({"patches": patches})


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_models_of_timm_take_packs(pool: str) -> None:
    import timm

    import veca.hub.timm

    torch.manual_seed(0)
    model = timm.create_model("veca_tiny_patch16", num_classes=5, depth=2, global_pool=pool).eval()
    images = [torch.randn(3, 32, 64), torch.randn(3, 48, 16), torch.randn(3, 32, 64)]
    with torch.no_grad():
        logits = model(veca.pack(images), cores=[8, 16, 8])
        expected = torch.cat([model(x[None], cores=c) for x, c in zip(images, (8, 16, 8), strict=True)])
    assert relative(logits, expected) <= LIMIT
    model.reset_classifier(0, "")
    with pytest.raises(veca.VecaError, match="global_pool='': a pack has no batch of tokens"):
        model(veca.pack(images))


def test_dictionaries_of_siglip2() -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.Siglip2ImageProcessor(patch_size=16, max_num_patches=64)
    images = [Image.effect_noise((200, 90), 50).convert("RGB"), Image.effect_noise((64, 64), 50).convert("RGB")]
    given = processor(images=images, return_tensors="pt")
    batch = veca.pack(given)
    assert batch.grids == tuple(map(tuple, given["spatial_shapes"].tolist()))
    rows, columns = batch.grids[0]
    # Channels first here, last there
    last = batch.pixels[: rows * columns].unflatten(1, (3, 256)).mT.flatten(1)
    assert torch.equal(last, given["pixel_values"][0][: rows * columns])
    given["spatial_shapes"] = given["spatial_shapes"] + 1
    with pytest.raises(veca.VecaError, match="image 0 has .* valid patches, and a grid of .*; they must agree"):
        veca.pack(given)


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        ([], {}, "the pack has no images; give at least one"),
        (torch.zeros(2, 3, 16, 16), {}, "images are Tensor; expected a list"),
        ([torch.zeros(3, 0, 16)], {}, r"image 0 of the pack has shape \(3, 0, 16\); expected"),
        ([torch.zeros(3, 16, 16), torch.zeros(1, 3, 16, 16)], {}, "image 1 of the pack has shape"),
        ([torch.zeros(3, 16, 16), torch.zeros(1, 16, 16)], {}, "images of the pack have 1 and 3 channels"),
        ([torch.zeros(3, 16, 16, dtype=torch.int64)], {}, "image 0 of the pack is torch.int64"),
        ([torch.zeros(3, 16, 16), torch.full((3, 16, 16), torch.nan)], {}, "image 1 of the pack has values that"),
        (["cat.jpg"], {}, "image 0 of the pack is str; expected a tensor or an image of Pillow"),
        ([Image.new("RGB", (0, 16))], {}, "image 0 of the pack has 0×16 pixels of mode RGB; expected RGB, no side 0"),
        ([Image.new("RGBA", (9, 9))], {}, "image 0 of the pack has 9×9 pixels of mode RGBA; expected RGB"),
        ([torch.zeros(4, 16, 16, dtype=torch.uint8)], {}, "image 0 of the pack is uint8 of 4 channels; only RGB"),
        ([torch.zeros(3, 16, 16)], {"patch_size": float("nan")}, "patch_size=nan; it must be an integer, at least 1"),
        ([torch.zeros(3, 16, 16)], {"max_patches": 0}, "max_patches=0; it must be at least 1"),
        ([torch.zeros(3, 16, 16)], {"max_patches": float("nan")}, "max_patches=nan; it must be at least 1"),
        ({}, {"max_patches": 4}, "max_patches goes with images"),
    ],
)  # fmt: skip
def test_hostile_packs(images: Any, options: Any, message: str) -> None:
    with pytest.raises(veca.VecaError, match=message):
        veca.pack(images, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spatial_shapes": torch.tensor([[torch.nan, 2]])}, "spatial_shapes is torch.float32; it must be of integers"),
        ({"spatial_shapes": torch.tensor([[-2, -2]])}, "an image of the pack has -2×-2 patches"),
        ({"spatial_shapes": torch.tensor([2, 2])}, r"spatial_shapes has shape \(2,\); expected \(1, 2\)"),
        ({"spatial_shapes": torch.ones(2, 2).long()}, r"spatial_shapes has shape \(2, 2\); expected \(1, 2\)"),
        ({"spatial_shapes": "2×2"}, "spatial_shapes is str; it must be a tensor"),
        ({"pixel_attention_mask": torch.ones(1, 5)}, r"pixel_attention_mask has shape \(1, 5\); expected \(1, 4\)"),
        ({"pixel_values": torch.zeros(4, 768)}, r"pixel_values has shape \(4, 768\); expected \(B, N, X\)"),
        ({"pixel_values": torch.zeros(1, 0, 768)}, r"pixel_values has shape \(1, 0, 768\); expected \(1, N, 768\)"),
        ({"pixel_values": torch.full((1, 4, 768), torch.inf)}, "patches of the dictionary have values that are NaN or"),
    ],
)  # fmt: skip
def test_hostile_dictionaries(changes: dict[str, Any], message: str) -> None:
    good = {"pixel_values": torch.zeros(1, 4, 768), "pixel_attention_mask": torch.ones(1, 4)}
    good["spatial_shapes"] = torch.tensor([[2, 2]])
    arrays = {name: tensor.numpy() for name, tensor in good.items()}  # as processors return for return_tensors="np"
    assert veca.pack(arrays).grids == veca.pack(good).grids == ((2, 2),)
    with pytest.raises(veca.VecaError, match=message):
        veca.pack(good | changes)


def test_a_strip_of_one_pixel_is_an_image() -> None:
    strip = torch.randn(3, 1, 100_000)
    assert veca.pack([strip]).grids == ((1, 6250),)
    batch = veca.pack([strip, torch.randn(3, 32, 32)], max_patches=50)
    assert batch.grids == ((1, 50), (2, 2))
    assert make_model()(batch, cores=8).patches.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores": [8]}, "cores has 1 values for 2 images"),
        ({"width": [1, 1, 1]}, "width has 3 values for 2 images"),
        ({"cores": [8, 65]}, "cores=65; a budget is an integer from 1 to 64"),
        ({"width": [1, 0]}, "width=0; a width is a number above 0"),
    ],
)
def test_wrong_settings_of_a_pack(options: Any, message: str) -> None:
    batch = veca.pack([torch.zeros(3, 16, 16), torch.zeros(3, 32, 16)])
    with pytest.raises(veca.VecaError, match=message):
        make_model()(batch, **options)


def test_a_pack_of_other_patches_is_refused() -> None:
    with pytest.raises(veca.VecaError, match="patches of the pack have 256 numbers; the model takes 3 channels × 16²"):
        make_model()(veca.pack([torch.zeros(1, 16, 16)]))
    with pytest.raises(veca.VecaError, match="an image of the pack has 0×4 patches"):
        veca.PackedImages(torch.zeros(0, 768), ((0, 4),))
    with pytest.raises(veca.VecaError, match=r"pixels of the pack have shape \(3, 768\); its grids need \(4, "):
        veca.PackedImages(torch.zeros(3, 768), ((1, 4),))
    with pytest.raises(veca.VecaError, match="pixels of the pack are torch.uint8"):
        veca.PackedImages(torch.zeros(4, 768, dtype=torch.uint8), ((1, 4),))


def test_models_of_transformers_take_images_of_their_own_sizes(tmp_path: Path) -> None:
    from veca.hub.transformers import VecaForImageClassification, VecaImageProcessor, VecaModel

    photos = [Image.effect_noise(size, 60).convert("RGB") for size in ((70, 40), (200, 150), (33, 90))]
    processor = VecaImageProcessor(fit="native", max_num_patches=20)
    processor.save_pretrained(tmp_path)
    processor = VecaImageProcessor.from_pretrained(tmp_path)
    inputs = processor(photos, return_tensors="pt")
    batch = veca.pack(photos, max_patches=20)
    assert veca.pack(inputs).grids == batch.grids
    torch.testing.assert_close(veca.pack(inputs).pixels, batch.pixels)
    plain = make_model(num_classes=5)
    model, classifier = VecaModel.from_veca(plain), VecaForImageClassification.from_veca(plain, num_labels=5)
    with torch.no_grad():
        expected = plain(batch, cores=16)
        tokens, logits = model(**inputs, cores=16), classifier(**inputs, cores=16).logits
    assert relative(tokens.pooler_output, expected.cls) <= LIMIT
    assert relative(logits, expected.logits) <= LIMIT
    for i, (grid, patches) in enumerate(zip(batch.grids, expected, strict=True)):
        own = tokens.last_hidden_state[i]
        assert relative(own[:16], patches.cores[0]) <= LIMIT
        assert relative(own[16 : 16 + grid[0] * grid[1]], patches.patches[0]) <= LIMIT
        assert not own[16 + grid[0] * grid[1] :].any()
    loss = classifier(**inputs, labels=torch.tensor([0, 1, 2])).loss
    loss.backward()
    assert classifier.veca.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
    with pytest.raises(veca.VecaError, match="hidden states and attentions are not returned"):
        model(**inputs, output_hidden_states=True)
    for limit in (0, -3, float("nan")):
        with pytest.raises(veca.VecaError, match=f"max_patches={limit}; it must be at least 1"):
            processor(photos, max_num_patches=limit)
    with pytest.raises(veca.VecaError, match="there are no images; give at least one"):
        processor([])
    with pytest.raises(veca.VecaError, match="belong together: pass both, or neither"):
        model(inputs["pixel_values"], spatial_shapes=inputs["spatial_shapes"])
