import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from veca import create_model
from veca.attention import masked_attention
from veca.inspect import core_maps, core_profiles, heat, look_inside, pca, to_rgb
from veca.inspect.projections import PcaColours, otsu_threshold
from veca.optimized import optimize
from veca.rope import patch_coordinates


@pytest.fixture
def model():
    torch.manual_seed(1)
    model = create_model("veca_tiny", depth=4).eval()
    with torch.no_grad():  # new weights look everywhere alike: sharpen them, and let the cores move
        for block in model.blocks:
            block.attn.qkv.weight *= 4
        model.coordinate_alpha.fill_(0.5)
    return model


def turned(x, coordinates, config):
    """Queries or keys (B, H, S, d) at coordinates (B, S, 2), as complex numbers times e^(i angle)."""
    count = config.head_dim // 4
    frequencies = [2 * math.pi / 100 ** (i / count) if i < count - 2 else 0.0 for i in range(count)]  # 2 are off
    angles = (coordinates[..., None] * torch.tensor(frequencies, dtype=x.dtype)).flatten(-2)[:, None]
    half = config.head_dim // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def direct(model, images, cores, layer):
    """All S × S probabilities of one block in float64, from the input of the block and the definition."""
    config = model.config
    ((patches, bank),) = model.forward_intermediates(
        images, [layer - 1], return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True, cores=cores
    )
    out = model(images, cores=cores)
    places = patch_coordinates(*out.grid, images.device, torch.float64).expand(len(images), -1, -1)
    places = torch.cat([out.coordinates[layer], places], dim=1)
    block = model.blocks[layer]
    qkv = block.attn.qkv(block.norm1(torch.cat([bank, patches], dim=1)))
    q, k, v = qkv.unflatten(-1, (3, config.num_heads, -1)).permute(2, 0, 3, 1, 4)
    identity = torch.eye(v.shape[2], dtype=v.dtype).expand(*v.shape[:2], -1, -1)
    return masked_attention(turned(q, places, config), turned(k, places, config), identity, cores)


@torch.no_grad()
def test_core_maps_are_the_attention_of_the_definition(model):
    images = torch.randn(2, 3, 48, 80)
    model.double()
    maps = core_maps(model, images.double(), cores=16, layers=(-1, 1), per_head=True)
    assert maps.shape == (2, 2, 3, 16, 3, 5)
    for found, layer in zip(maps, (3, 1), strict=True):
        expected = direct(model, images.double(), 16, layer)[:, :, :16, 16:]
        torch.testing.assert_close(found.flatten(-2), expected, rtol=1e-9, atol=1e-12)
    assert maps.std() > 0.01, "maps all alike would prove nothing"
    torch.testing.assert_close(core_maps(model, images.double(), 16, (3, 1)), maps.mean(2))

    single = core_maps(model.float(), images, cores=16, layers=(-1, 1), per_head=True)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, maps.float(), rtol=1e-3, atol=1e-5)


def test_core_maps_of_half_precision_are_float32_and_near(model):
    images = torch.randn(1, 3, 64, 64)
    exact = core_maps(model, images, layers=(2,))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = core_maps(model, images, layers=(2,))
    half = core_maps(model.bfloat16(), images, layers=(2,))
    for rounded in (mixed, half):
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - exact).abs().max() < 0.25 * exact.max()
        assert torch.corrcoef(torch.stack([rounded.flatten(), exact.flatten()]))[0, 1] > 0.98


def test_core_maps_leaves_the_model_as_it_was(model):
    images = torch.randn(1, 3, 32, 32)
    before = model(images).patches
    core_maps(model, images)
    with pytest.raises(ValueError, match="multiples of 16"):
        core_maps(model, images[..., :31])
    with pytest.raises(ValueError, match="budget"):
        core_maps(model, images, cores=65, layers=(0, 1, 2))
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)
    assert torch.equal(model(images).patches, before)


@pytest.mark.parametrize(("layers", "says"), [((4,), "block 4"), ((0, -5), "block -5"), ((), "no block")])
def test_core_maps_names_a_block_that_is_not_there(model, layers, says):
    with pytest.raises(ValueError, match=says):
        core_maps(model, torch.randn(1, 3, 32, 32), layers=layers)


@torch.no_grad()
def test_look_inside_is_all_of_one_pass(model):
    images = torch.randn(2, 3, 48, 80)
    found = look_inside(model, images, cores=16, layers=(-1, 1))
    assert torch.equal(found.maps, core_maps(model, images, 16, (-1, 1)))
    assert torch.equal(found.profiles, core_profiles(model, images, 16, (-1, 1)))
    assert torch.equal(found.output.patches, model(images, cores=16).patches)


class Largest(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.size = max(self.size, out.untyped_storage().nbytes() // out.element_size())
        return out


def test_core_maps_makes_nothing_quadratic_in_the_patches():
    model = create_model("veca_tiny", embed_dim=16, num_heads=2, depth=2, patch_size=4).eval()
    with Largest() as largest:
        maps = core_maps(model, torch.randn(1, 3, 256, 256), cores=8)
    patches = maps[0, 0, 0].numel()
    assert 0 < largest.size < patches**2 // 16


def by_svd(features, components):
    """Principal components by another road: the singular vectors of the centred features."""
    x = features.reshape(-1, features.shape[-1]).double().numpy()
    x = x - x.mean(0)
    rows = np.linalg.svd(x, full_matrices=False)[2][:components]
    rows *= np.sign(rows[np.arange(components), np.abs(rows).argmax(1)])[:, None]
    y = x @ rows.T
    low, high = np.percentile(y, [1, 99], axis=0)
    return ((y - low) / (high - low)).clip(0, 1).reshape(*features.shape[:-1], components)


@pytest.mark.parametrize("shape", [(500, 12), (3, 8, 9, 20), (5, 40)])  # the last has fewer rows than columns
def test_pca_agrees_with_svd(shape):
    torch.manual_seed(0)
    features = 5 + torch.randn(shape) * torch.linspace(3, 1, shape[-1]) @ torch.randn(shape[-1], shape[-1])
    np.testing.assert_allclose(pca(features).numpy(), by_svd(features, 3), atol=1e-4)
    assert pca(features, 1).shape == (*shape[:-1], 1)


def test_pca_gives_equal_features_equal_colours_in_all_maps():
    torch.manual_seed(0)
    first, second = torch.randn(6, 6, 10), torch.randn(6, 6, 10)
    second[2, 3] = first[0, 0]
    colours = pca(torch.stack([first, second]))
    assert torch.equal(colours[0, 0, 0], colours[1, 2, 3])
    torch.testing.assert_close(pca(torch.stack([second, first])), colours.flip(0))


def test_pca_like_others_gives_equal_features_their_colours():
    torch.manual_seed(0)
    first, second = torch.randn(6, 6, 10), 3 * torch.randn(4, 9, 10)
    second[2, 3] = first[0, 0]
    colours = pca(second, like=first)
    torch.testing.assert_close(colours[2, 3], pca(first)[0, 0])
    assert torch.equal(pca(first, like=first), pca(first))
    assert colours.min() == 0
    assert colours.max() == 1
    with pytest.raises(ValueError, match="must be finite"):
        pca(first, like=torch.full((3, 10), math.nan))


def test_pca_is_not_squashed_by_one_outlier():
    torch.manual_seed(0)
    features = torch.randn(1000, 4) * torch.tensor([9.0, 1.0, 1.0, 1.0])
    features[0] = 1e4
    colours = pca(features, 1)
    assert colours.min() == 0
    assert colours.max() == 1
    assert 0.15 < colours.std() < 0.4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pca_of_a_line_has_one_component(dtype):
    torch.manual_seed(0)
    line = 3 + torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None] * torch.randn(16, dtype=torch.float64)
    colours = pca(line.to(dtype))
    assert (colours[:, 1:] == 0.5).all(), "rounding noise must not be shown as structure"
    assert colours[:, 0].std() > 0.25
    assert colours[0, 0] in (0, 1)
    assert colours[-1, 0] == 1 - colours[0, 0]


@pytest.mark.parametrize("features", [torch.full((4, 4, 8), 0.1), torch.zeros(9, 3), torch.randn(1, 5)])
def test_pca_of_equal_features_is_grey(features):
    assert (pca(features) == 0.5).all()


def test_pca_keeps_what_varies_in_a_few_rows_only():
    features = torch.zeros(1000, 3)
    features[:3] = 1.0
    assert pca(features, 1).flatten().unique().tolist() == [0, 1]


def test_levels_beyond_the_fitted_range_are_not_clipped():
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    fitted = PcaColours.fit(features)
    torch.testing.assert_close(fitted.levels(features).clamp(0, 1), pca(features))
    far = fitted.levels(3 * features)
    assert far.min() < -0.2
    assert far.max() > 1.2
    torch.testing.assert_close((far[:2] + far[2:4]) / 2, fitted.levels(3 * (features[:2] + features[2:4]) / 2))


def test_otsu_splits_values_as_scikit_image_does():
    filters = pytest.importorskip("skimage.filters")
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(300, generator=generator), 5 + 2 * torch.randn(100, generator=generator)])
    threshold = filters.threshold_otsu(values.numpy(), nbins=4096)
    assert ((values > otsu_threshold(values)) == (values > threshold)).float().mean() > 0.995


@pytest.mark.parametrize(
    ("features", "components"),
    [
        (torch.tensor([[0.0, math.nan]]), 1),
        (torch.zeros(3, 4, dtype=torch.int64), 1),
        (torch.zeros(0, 4), 1),
        (torch.zeros(5, 2), 3),
        (torch.zeros(5, 2), 0),
        (torch.tensor(1.0), 1),
    ],
)
def test_pca_refuses_what_has_no_components(features, components):
    with pytest.raises(ValueError, match=r"components=|must be finite"):
        pca(features, components)


def test_heat_gets_lighter_with_the_value():
    colours = heat(torch.linspace(0, 1, 101))
    luminance = colours @ torch.tensor([0.2126, 0.7152, 0.0722])
    assert (luminance.diff() > 0).all()
    torch.testing.assert_close(colours[50], torch.tensor([0xBC, 0x37, 0x54]) / 255)


def test_to_rgb_draws_one_square_per_value():
    values = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    picture = to_rgb(values, size=(8, 4))
    assert picture.size == (8, 4)
    assert (np.asarray(picture)[:, :4] == (255, 0, 0)).all()
    assert (np.asarray(picture)[:, 4:] == (0, 255, 0)).all()
    smooth = to_rgb(values, size=(8, 4), smooth=True)
    assert len(smooth.getcolors()) > 2
    assert to_rgb(torch.zeros(2, 3)).getpixel((0, 0)) == (0, 0, 4)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        to_rgb(torch.zeros(2, 3, 4))


def test_maps_of_a_model_whose_blocks_are_compiled(tiny):
    images = torch.rand(2, 3, 32, 48)
    torch.testing.assert_close(core_maps(optimize(tiny), images), core_maps(tiny, images))
