from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

import veca
from veca import ConfigError, VecaConfig
from veca.config import SIZES, get_config, size_name


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("veca_small", 21_628_961),
        ("veca_small_plus", 28_719_137),
        ("veca_base", 85_725_089),
        ("veca_large", 303_195_301),
    ],
)
def test_parameter_counts_of_the_paper(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = veca.create_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_tiny_is_what_it_says() -> None:
    config = SIZES["veca_tiny"]
    assert (config.embed_dim, config.num_heads, config.depth, config.mlp_dim) == (192, 3, 12, 512)


def test_list_models_are_all_creatable() -> None:
    with torch.device("meta"):
        assert [veca.create_model(name).config for name in veca.list_models()] == list(SIZES.values())


def test_frozen_and_equal_after_json() -> None:
    config = get_config("veca_small", output_dim=48, budgets=[8, 16])
    assert VecaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.depth = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("embed_dim", 100),
        ("embed_dim", 768.0),
        ("embed_dim", "768"),
        ("embed_dim", True),
        ("embed_dim", 10**9 * 48),
        ("depth", 0),
        ("depth", 10**9),
        ("num_heads", 0),
        ("num_heads", -12),
        ("mlp_ratio", math.nan),
        ("mlp_ratio", -1.0),
        ("mlp_ratio", 1e-9),
        ("num_cores", 0),
        ("num_cores", 1000),
        ("core_chunk", 7),
        ("core_chunk", 0),
        ("budgets", (0,)),
        ("budgets", (65,)),
        ("budgets", ()),
        ("budgets", 8),
        ("budgets", (8.0,)),
        ("widths", ()),
        ("widths", (0.5,)),
        ("widths", (0.0, 1.0)),
        ("widths", (1.0, 1.5)),
        ("widths", (1.0, 0.25, 0.5)),
        ("widths", (1.0, 1.0)),
        ("widths", (True,)),
        ("widths", 1.0),
        ("output_dim", 0),
        ("num_classes", -1),
        ("rope_zero_fraction", 1.5),
        ("coordinate_shift", -0.1),
        ("coordinate_rescale", 0.5),
        ("patch_size", 0),
        ("in_chans", 0),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        VecaConfig.from_dict({field: value})


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'embed_dim'"):
        VecaConfig.from_dict({"embed_dims": 768})
    with pytest.raises(ConfigError, match="did you mean 'veca_small'"):
        veca.create_model("veca_smal")
    with pytest.raises(ConfigError, match="did you mean 'num_classes'"):
        veca.create_model("veca_tiny", n_classes=3)


def test_size_name_ignores_heads_and_training_options() -> None:
    for name, config in SIZES.items():
        assert size_name(dataclasses.replace(config, num_classes=5, output_dim=9, coordinate_shift=0.0)) == name
    assert size_name(VecaConfig(depth=11)) is None


def test_a_model_of_one_width_is_written_as_before_there_were_widths() -> None:
    assert "widths" not in VecaConfig().to_dict()
    assert "widths" not in VecaConfig(widths=(1,)).to_dict()
    for widths in ((1.0, 0.5, 0.25), (0.25, 1.0)):
        config = get_config("veca_small", widths=widths)
        assert config.to_dict()["widths"] == list(widths)
        assert VecaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("name", "width", "channels"),
    [
        ("veca_base", 1, 2048),
        ("veca_base", 0.75, 1536),
        ("veca_base", 1 / 3, 704),
        ("veca_tiny", 0.125, 64),
        ("veca_tiny", 1e-9, 64),
        ("veca_large", 1, 2730),
        ("veca_large", 0.9999, 2730),
        ("veca_large", 0.5, 1344),
    ],
)
def test_widths_are_whole_groups_of_channels(name: str, width: float, channels: int) -> None:
    assert SIZES[name].hidden_width(width) == channels


@pytest.mark.parametrize("ratio", [0.5, 1.4, 2.66667, 4.0])
def test_width_one_is_the_whole_mlp(ratio: float) -> None:
    config = VecaConfig(embed_dim=64, num_heads=1, mlp_ratio=ratio)
    assert config.hidden_width(1) == config.mlp_dim


def test_an_mlp_of_less_than_a_group_is_used_whole() -> None:
    assert VecaConfig(embed_dim=16, num_heads=1, mlp_ratio=2.0).hidden_width(0.25) == 32
