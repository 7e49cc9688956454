"""Weights that ship: their names, on a folder made for the test; and every one that is in the package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from conftest import make_tiny, relative_error
from golden_pretrained import golden_features, golden_path
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import veca
import veca.hub.timm
from veca import CheckpointError, ConfigError
from veca.checkpoint import loading
from veca.checkpoint.format import cast, without_paths
from veca.checkpoint.loading import WEIGHTS, load_or_random, pretrained_name
from veca.cli.main import app

ROOT = Path(__file__).parents[2]
ALL = veca.list_models(pretrained=True)
IMAGES = torch.linspace(-1, 1, 3 * 32 * 48).view(1, 3, 32, 48)
PROVENANCE = {
    "weights": "distilled",
    "teacher": {"name": "a-teacher", "weights": "a_wheel 0.1: w.pth (sha256 00ff)"},
    "recipe": {
        "model": {"start": "/root/runs/stage 1/"},
        "teacher": {"name": "timm:vit@/opt/vit.pt"},
        "data": {"train": ["/root/data/coco/*.tar", "~/more/x.tar", "s3://bucket/a/*.tar"], "validation": "val/*.tar"},
    },
    "step": 7,
}
RUN = CliRunner().invoke


def features(model: veca.Veca) -> Tensor:
    with torch.no_grad():
        return model(IMAGES, cores=8).patches


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models in float16 that ship as `veca_tiny`, of a teacher's width, and things that do not."""
    weights = tmp_path / "weights"
    monkeypatch.setattr(loading, "WEIGHTS", weights)
    monkeypatch.chdir(tmp_path)
    for seed, tag in enumerate(("cats_coco", "birds_coco")):
        torch.manual_seed(seed)
        model = veca.create_model("veca_tiny", output_dim=40, budgets=(8, 64)).half()
        model.provenance = PROVENANCE
        veca.save(model, weights / f"veca_tiny.{tag}")
    (weights / "veca_base.unfinished").mkdir()
    veca.save(make_tiny(), weights / "somebody.else")
    return weights


def test_a_size_alone_means_its_first_tag(folder: Path) -> None:
    assert veca.list_models(pretrained=True) == ["veca_tiny.birds_coco", "veca_tiny.cats_coco"]
    birds, cats, first = (veca.load(name) for name in ("veca_tiny.birds_coco", "veca_tiny.cats_coco", "veca_tiny"))
    assert torch.equal(features(first), features(birds)), "a size alone is its first tag by the alphabet"
    assert not torch.equal(features(first), features(cats))
    assert torch.equal(features(load_or_random("veca_tiny")), features(first))
    assert (pretrained_name("veca_tiny"), pretrained_name("veca_base")) == ("veca_tiny.birds_coco", None)


def test_they_are_float32_unless_asked_otherwise(folder: Path) -> None:
    assert not veca.load("veca_tiny").training
    assert {p.dtype for p in veca.load("veca_tiny").parameters()} == {torch.float32}
    assert {p.dtype for p in load_or_random("veca_tiny").parameters()} == {torch.float32}
    assert {p.dtype for p in veca.load("veca_tiny", dtype=None).parameters()} == {torch.float16}
    assert {p.dtype for p in veca.load("veca_tiny", dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_create_model_takes_pretrained_weights_and_a_new_classifier(folder: Path) -> None:
    model = veca.create_model("veca_tiny.cats_coco", pretrained=True, num_classes=5)
    assert model.training
    assert model.head.weight.shape == (5, 40)
    assert torch.equal(features(model.eval()), features(veca.load("veca_tiny.cats_coco")))
    with pytest.raises(ConfigError, match="depth: fixed by the weights of veca_tiny"):
        veca.create_model("veca_tiny", pretrained=True, depth=3)
    with pytest.raises(ConfigError, match=r"names trained weights: pass pretrained=True, or 'veca_tiny' for random"):
        veca.create_model("veca_tiny.cats_coco")
    assert veca.create_model("veca_tiny").num_features == 192, "without pretrained, nothing changes"


@pytest.mark.parametrize("make", [veca.load, load_or_random, lambda name: veca.create_model(name, pretrained=True)])
def test_other_tags_are_an_error_that_names_those_there_are(folder: Path, make: Callable[[str], veca.Veca]) -> None:
    with pytest.raises(CheckpointError, match=r"did you mean 'veca_tiny.cats_coco'.*veca_large.*veca_tiny.birds_coco"):
        make("veca_tiny.cat_coco")
    for name in ("veca_base.unfinished", "somebody.else", "veca_tiny.", "veca_tiny/../veca_tiny.cats_coco"):
        with pytest.raises(CheckpointError, match="no model of that name"):
            make(name)


def test_a_path_of_that_name_comes_first(folder: Path) -> None:
    own = make_tiny()
    veca.save(own, "veca_tiny")
    assert torch.equal(features(veca.load("veca_tiny")), features(own))
    assert pretrained_name("veca_tiny") is None


def test_timm_lists_the_pretrained_tags(folder: Path) -> None:
    """What it registers is decided when it is imported; here it is asked for, and a file of the folder is named."""
    cfgs = veca.hub.timm._cfgs()
    assert [name for name in cfgs if "." in name] == ["veca_tiny_patch16.birds_coco", "veca_tiny_patch16.cats_coco"]
    assert [name for name in cfgs if "." not in name] == [f"{size}_patch16" for size in veca.list_models()[1:]]
    cfg = cfgs["veca_tiny_patch16.cats_coco"]
    expected = veca.load("veca_tiny.cats_coco")
    options = {"pretrained_cfg": cfg, "cores": 8, "output_dim": expected.config.output_dim}
    model = timm.create_model("veca_tiny_patch16", pretrained=True, **options).eval()
    assert model.provenance == PROVENANCE
    assert model.config == expected.config
    torch.testing.assert_close(model(IMAGES), expected(IMAGES, 8).cls)
    one = timm.create_model("veca_tiny_patch16", pretrained=True, pretrained_cfg=cfg, num_classes=3)
    assert one(IMAGES).shape == (1, 3)
    assert timm.create_model("veca_tiny_patch16", pretrained_cfg=cfg, device="meta").num_classes == 1000


def test_commands_say_what_the_weights_are(folder: Path) -> None:
    phrase = "distilled from a-teacher, not the paper's weights"
    demo = RUN(app, ["demo", "--size", "32", "--out", "r.html", "--device", "cpu"])
    assert demo.exit_code == 0, demo.output
    page = Path("r.html").read_text()
    assert "<dd>veca_tiny.birds_coco</dd>" in page
    assert f"<dd>{phrase.replace(chr(39), '&#39;')}</dd>" in page
    assert "random" not in page
    assert f"Weights: veca_tiny.birds_coco, {phrase}." in demo.stderr
    shown = RUN(app, ["info", "--model", "veca_tiny"]).stdout
    assert "veca_tiny.birds_coco" in shown
    assert phrase in shown
    facts = json.loads(RUN(app, ["info", "--model", "veca_tiny", "--json"]).stdout)
    assert (facts["dtype"], facts["provenance"]) == ("float16", PROVENANCE)


def test_convert_makes_a_folder_fit_for_publication(tmp_path: Path) -> None:
    run = make_tiny(output_dim=40)
    run.provenance = PROVENANCE
    veca.save(run, tmp_path / "run")
    to = tmp_path / "veca_tiny.cats_coco"
    made = RUN(app, ["convert", "--model", str(tmp_path / "run"), "--out", str(to), "--dtype", "float16", "--no-paths"])
    assert made.exit_code == 0, made.output
    assert sorted(path.name for path in to.iterdir()) == ["config.json", "model.safetensors"]
    assert {tensor.dtype for tensor in load_file(to / "model.safetensors").values()} == {torch.float16}
    model = veca.load(to)
    assert relative_error(features(model), features(run)) < 2e-3
    recipe = {
        "model": {"start": "stage 1"},
        "teacher": {"name": "timm:vit@vit.pt"},
        "data": {"train": ["*.tar", "x.tar", "s3://bucket/a/*.tar"], "validation": "val/*.tar"},
    }
    assert model.provenance == {**PROVENANCE, "recipe": recipe}
    assert json.loads((to / "config.json").read_text())["provenance"] == model.provenance
    again = RUN(app, ["convert", "--model", str(to), "--out", str(tmp_path / "again.safetensors")])
    assert again.exit_code == 0, again.output
    files = (to / "model.safetensors", tmp_path / "again.safetensors")
    torch.testing.assert_close(*(load_file(file) for file in files), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ("C:\\data\\coco\\x.tar", "x.tar"),
        ("../../home/me/x.tar", "x.tar"),
        ("file:///root/x.tar", "x.tar"),
        ("~me/x.tar", "x.tar"),
        ("/", ""),
        ("{'out': '/root/runs/a', 'lr': 0.1}", "{'out': 'a', 'lr': 0.1}"),
        ("facebook/dinov3-vits16", "facebook/dinov3-vits16"),
        ("https://host/a/b.tar", "https://host/a/b.tar"),
        ("3,057 images/s, a / b", "3,057 images/s, a / b"),
        (0.5, 0.5),
        (None, None),
    ],
)
def test_paths_are_reduced_and_nothing_else(told: object, left: object) -> None:
    assert without_paths([told]) == [left]


def test_values_that_do_not_fit_are_refused() -> None:
    model = make_tiny()
    with torch.no_grad():
        model.norm.weight[3] = 70_000
        with pytest.raises(ValueError, match=r"norm.weight has a value of 7e\+04, torch.float16 ends at 6.55e\+04"):
            cast(model, torch.float16)
        assert cast(model, torch.bfloat16).norm.weight.dtype == torch.bfloat16
        model.norm.weight[3] = float("nan")
        with pytest.raises(ValueError, match="norm.weight has values that are not finite"):
            cast(model, torch.bfloat16)


# What is in the package.


def test_timm_has_all_of_them() -> None:
    named = [name.replace(".", "_patch16.", 1) for name in ALL]
    assert timm.list_models("veca*", pretrained=True) == sorted(named)
    for name in named:
        assert timm.create_model(name, pretrained=True).provenance["weights"] == "distilled"


def test_only_whole_folders_of_sizes_ship() -> None:
    assert sorted(path.name for path in WEIGHTS.glob("*")) == sorted(ALL)


def test_the_repository_stays_small() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    files = [ROOT / name for name in listed.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 27e6


@pytest.mark.parametrize("name", ALL)
def test_cards_name_licence_data_and_teacher(name: str) -> None:
    card = (WEIGHTS / name / "README.md").read_text(encoding="utf-8")
    teacher = veca.load(name, "meta").provenance["teacher"]["name"]
    assert card.startswith("---\n"), "a model card opens with metadata, as the Hub reads it"
    assert re.search(r"^license: \S", card, re.MULTILINE)
    assert re.search(r"^datasets:", card, re.MULTILINE)
    assert name in card
    assert teacher.lower() in card.lower()
    assert "not the paper's weights" in " ".join(card.split())


@pytest.mark.parametrize("name", ALL)
def test_files_are_float16_and_agree_with_their_config(name: str) -> None:
    with safe_open(WEIGHTS / name / "model.safetensors", "pt") as file:
        header = json.loads(file.metadata()["veca"])
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118 (it is no dict)
    told = json.loads((WEIGHTS / name / "config.json").read_text())
    assert header["provenance"] == told["provenance"]
    assert header["config"].items() <= told.items()
    assert header["provenance"]["weights"] == "distilled"
    for text in (json.dumps(header), json.dumps(told)):
        assert not re.search(r'"(/|~|\.\.|[A-Za-z]:\\)|/(root|home|tmp|Users|mnt|work|data|opt)/', text)
    model = veca.load(name)
    assert veca.config.size_name(model.config) == name.partition(".")[0]


@pytest.mark.parametrize("name", ALL)
def test_golden_features_on_the_cpu(name: str) -> None:
    model = veca.load(name, "cpu")
    for key, expected in load_file(golden_path(name)).items():
        assert relative_error(golden_features(model)[key], expected) < 1e-4, key


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_golden_features_on_a_gpu(name: str, dtype: torch.dtype, most: float) -> None:
    found = golden_features(veca.load(name, "cuda", dtype))
    for key, expected in load_file(golden_path(name)).items():
        assert relative_error(found[key], expected) < most, key
