from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import veca
from veca.cli.main import app
from veca.train.recipe import Recipe, RecipeError, load_recipe

ELASTIC = {"overrides": {"widths": [1, 0.75, 0.5, 0.25]}}


def recipe(**values: object) -> Recipe:
    return Recipe.from_dict(values)


def test_defaults_are_the_papers_first_stage() -> None:
    plain = recipe()
    assert (plain.schedule.epochs, plain.schedule.warmup) == (135, 25)
    assert (plain.schedule.peak, plain.schedule.low, plain.weight_decay) == (4e-4, 5e-5, 0.015)
    assert plain.budgets == {8: 1, 16: 1, 24: 2, 32: 2, 40: 3, 48: 3, 56: 4, 64: 4}
    assert (plain.batch, plain.odds_at(0)) == (128, {256: 1})


def test_a_recipe_goes_through_yaml_and_back() -> None:
    phases = [{"until": 7000, "odds": {256: 0.5, 384: 0.5}}, {"odds": {256: 0.2, 768: 0.8}}]
    schedule = {"epochs": None, "steps": 50_000, "warmup": 7000}
    first = recipe(
        model={"size": "veca_base", "overrides": {"depth": 4}}, resolutions=phases, schedule=schedule, ema=0.999
    )
    assert Recipe.from_dict(yaml.safe_load(first.to_yaml())) == first
    assert [first.odds_at(step) for step in (0, 6999, 7000, 10**9)] == [phases[0]["odds"]] * 2 + [phases[1]["odds"]] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "unknown key 'modle' .did you mean 'model'"),
        ({"schedule": {"peek": 1}}, "unknown key 'schedule.peek' .did you mean 'peak'.*Known: epochs, steps"),
        ({"model": {"size": "veca_bass"}}, "model: unknown model 'veca_bass' .did you mean 'veca_base'"),
        ({"model": {"overrides": {"depth": 0}}}, "model: depth=0: must be from 1 to 1,024"),
        ({"model": "veca_base"}, "model='veca_base': must be keys with values"),
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"batch": "128"}, "batch='128': must be an integer"),
        ({"batch": True}, "batch=True: must be an integer"),
        ({"compile": 1}, "compile=1: must be true or false"),
        ({"weight_decay": "much"}, "weight_decay='much': must be a finite number"),
        ({"weight_decay": float("nan")}, "weight_decay=nan: must be a finite number"),
        ({"precision": "half"}, "precision='half': must be 'bfloat16' or 'float32'"),
        ({"ema": 1.0}, "ema=1.0: must be null, or between 0 and 1"),
        ({"ema": "off"}, "ema='off': must be null, or a finite number"),
        ({"budgets": {}}, "budgets={}: must be choices with odds"),
        ({"budgets": {8: 0}}, "budgets={8: 0}: must be choices with odds"),
        ({"budgets": {128: 1}}, "budgets=128: must be from 1 to 64, the core bank"),
        ({"budgets": [8, 16]}, "budgets=.8, 16.: must be keys with values"),
        ({"resolutions": [{"odds": {250: 1}}]}, "resolutions.odds=250: must be multiples of 16"),
        ({"resolutions": []}, "resolutions.until=.*: must be rising, and null in the last phase"),
        ({"resolutions": [{"odds": {256: 1}, "until": 5}]}, "until=.5.: must be rising, and null in the last phase"),
        ({"schedule": {"steps": 10}}, "must be one of the two, the other null"),
        ({"schedule": {"epochs": 10}}, "schedule.warmup=25: must be from 0 to under 10"),
        ({"schedule": {"low": 1.0}}, "schedule.low=1.0: must be from 0 to peak = 0.0004"),
        ({"teacher": {"trust_remote_code": 1}}, "teacher.trust_remote_code=1: must be true or false"),
        ({"teacher": {"micro_batch": 0}}, "teacher.micro_batch=0: must be at least 1"),
        ({"teacher": {"micro_batch": {256: 128, 768: 0}}}, "must be at least 1"),
        ({"teacher": {"cache": "targets"}}, "teacher.cache: targets are no longer cached on disk. Remove the key"),
        ({"teacher": {"cache_gb": 5}}, "teacher.cache_gb: targets are no longer cached on disk"),
        ({"widths": {}}, "widths=.*: must be null for a model of one width; model.elastic or model.overrides.widths"),
        ({"model": ELASTIC, "widths": {"tied": 0.8}}, "widths.tied=0.8: must be such that all shares sum to at most 1"),
        ({"model": ELASTIC, "widths": {"match": -1}}, "widths.match=-1: must be at least 0"),
        ({"model": {"elastic": [1, 0.5]}}, "model.elastic=.*: must be null unless there is model.start"),
        ({"model": {**ELASTIC, "elastic": [1], "start": "a"}}, "model.elastic=.*no model.overrides.widths"),
        ({"model": {"elastic": [0.5], "start": "a"}}, "model: widths="),
        ({"validation": {"widths": [2]}}, r"validation.widths\[0\]=2: must be above 0, at most 1"),
        ({"data": {"views": 0}}, "data.views=0: must be null, or at least 1"),
        ({"data": {"max_pixels": 0}}, "data.max_pixels=0: must be at least 1"),
        ({"data": {"augment_on": "tpu"}}, "data.augment_on='tpu': must be 'auto'"),
        ({"data": {"train": 3}}, "data.train=3: must be a list"),
        ({"data": {"train": ["a", 3]}}, r"data.train\[1\]=3: must be text"),
        ({"teacher": {"micro_batch": {"big": 1}}}, "teacher.micro_batch.big='big': must be an integer"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_an_impossible_value_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(values)


def test_settings_of_a_model_of_one_width_are_its_budgets() -> None:
    plain = recipe(budgets={8: 1, 64: 3})
    assert list(plain.settings().items()) == [((8, 1.0), 1), ((64, 1.0), 3)]
    assert plain.largest_setting() == (64, 1.0)
    assert plain.grid() == ([256], [64], [1.0])


def test_settings_are_tied_forced_and_uniform() -> None:
    shares = {"smallest": 0.1, "largest": 0.2, "tied": 0.3}
    elastic = recipe(model=ELASTIC, budgets={8: 1, 24: 2, 48: 1, 64: 0}, widths=shares)
    odds = elastic.settings()
    assert sum(odds.values()) == pytest.approx(1)
    assert odds[8, 0.25] == pytest.approx(0.1 + 0.25 * (0.3 + 0.4 / 4))
    assert odds[24, 0.75] == pytest.approx(0.5 * (0.3 + 0.4 / 4))
    assert odds[24, 0.5] == pytest.approx(0.5 * 0.4 / 4)
    assert odds[48, 1.0] == pytest.approx(0.2 + 0.25 * (0.3 + 0.4 / 4))
    assert not any(odds[64, width] for width in (0.25, 0.5, 0.75, 1.0)), "its odds are 0"
    assert elastic.largest_setting() == (48, 1.0)
    assert recipe(model={"size": "veca_tiny", "start": "a", "elastic": [1, 0.5]}).model.config().widths == (1.0, 0.5)


def test_numbers_are_read_as_people_write_them() -> None:
    """YAML takes 4e-4 for text, and one path for no list."""
    values = yaml.safe_load("{schedule: {peak: 3e-4, low: 1e-6}, data: {train: /data/photos}}")
    assert values["schedule"]["peak"] == "3e-4"
    found = Recipe.from_dict(values)
    assert (found.schedule.peak, found.data.train) == (3e-4, ("/data/photos",))


def test_changes_on_the_command_line_are_applied(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("# A comment.\nmodel: {size: veca_small}\nbatch: 64\n")
    assert load_recipe(path).batch == 64
    changes = ["batch=8", "schedule.peak=1e-3", "data.train=[a, b]", "budgets.8=5", "ema=0.9", "model.size=veca_tiny"]
    found = load_recipe(path, ["budgets={16: 1}", *changes])
    assert (found.batch, found.schedule.peak, found.data.train) == (8, 1e-3, ("a", "b"))
    assert (found.budgets, found.ema, found.model.size) == ({16: 1, 8: 5}, 0.9, "veca_tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("batch", "--set batch: must be key=value"),
        ("=3", "--set =3: must be key=value"),
        ("batch.size=3", "batch has no keys of its own"),
        ("bacth=3", "unknown key 'bacth' .did you mean 'batch'"),
        ("batch=[1", "the value is not YAML"),
    ],
)
def test_impossible_changes_are_refused(tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text("batch: 64\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "r.yaml", [change])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "holds list, not the keys"),
        ("a: [\n", "cannot be read"),
        ("", "holds NoneType"),
        ("!!python/object/apply:os.system [ls]\n", "cannot be read: could not determine a constructor"),
    ],
)
def test_files_that_are_no_recipes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "r.yaml")


def test_a_wrong_name_shows_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("batch: 64\n")
    with pytest.raises(RecipeError, match=r"smal.yaml: no such recipe .did you mean 'small.yaml'.*: small.yaml"):
        load_recipe(tmp_path / "smal.yaml")
    with pytest.raises(RecipeError, match=rf"small: no such recipe .did you mean '{tmp_path}/small.yaml'"):
        load_recipe(tmp_path / "small")
    with pytest.raises(RecipeError, match="no such recipe"):
        load_recipe(tmp_path / "nowhere" / "smal.yaml")


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mixed_images_need_a_teacher_that_runs_live(name: str) -> None:
    values = {"teacher": {"resident": "float8"}, "data": {"resident": 288, "augment": "flip", name: 0.5}}
    with pytest.raises(RecipeError, match=rf"data\.{name}=0.5: must be 0 with teacher.resident"):
        Recipe.from_dict(values)


def test_several_teachers_run_live() -> None:
    values = {"teacher": {"resident": "float8"}, "data": {"resident": 288, "augment": "flip"}}
    with pytest.raises(RecipeError, match=r"teachers=.*other.*: must be empty with teacher.resident"):
        Recipe.from_dict({**values, "teachers": [{"name": "other"}]})


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = Path(veca.__file__).parents[2] / "recipes" / "quick.yaml"
    result = CliRunner().invoke(app, ["distill", str(quick), "--set", "data.train=nowhere", "--device", "cpu"])
    assert "'nowhere': no such file" in str(result.exception)
    assert not list(tmp_path.iterdir())
    Image.new("RGB", (64, 64)).save(tmp_path / "7.png")
    unknown = ["--set", "data.train=7.png", "--set", "teacher.name=timm:resnet"]
    result = CliRunner().invoke(app, ["distill", str(quick), *unknown, "--device", "cpu"])
    assert "resnet" in str(result.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["7.png"]
    assert "quick.yaml" in str(CliRunner().invoke(app, ["distill"]).exception)
