from __future__ import annotations

import json
import os
import pickle
import random
import struct
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, Golden, make_tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import veca
from veca import CheckpointError
from veca.checkpoint import format as checkpoint_format
from veca.checkpoint import loading
from veca.checkpoint.loading import load_or_random
from veca.checkpoint.released import save_released
from veca.config import get_config


def outputs(model: veca.Veca) -> Tensor:
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 3 * 32 * 48).view(1, 3, 32, 48), cores=24).patches


def same(a: veca.Veca, b: veca.Veca) -> bool:
    return a.config == b.config and torch.equal(outputs(a), outputs(b))


@pytest.fixture
def released() -> dict[str, object]:
    return dict(torch.load(GOLDEN / "official_checkpoint.pt", weights_only=True))


def test_file_and_folder_round_trip(tmp_path: Path) -> None:
    model = make_tiny(num_classes=3, output_dim=40)
    model.provenance = {"teacher": "none", "steps": 7}
    for path in (tmp_path / "model.safetensors", tmp_path / "deep" / "folder"):
        veca.save(model, path)
        again = veca.load(path)
        assert same(model, again)
        assert again.provenance == model.provenance
        assert not again.training
        assert all(p.requires_grad for p in again.parameters())
    description = json.loads((tmp_path / "deep" / "folder" / "config.json").read_text())
    assert model.config.to_dict().items() <= description.items()
    assert description["provenance"] == model.provenance


def test_others_may_read_what_was_saved_as_any_other_file(tmp_path: Path) -> None:
    veca.save(make_tiny(), tmp_path / "model")
    (tmp_path / "any").touch()
    modes = {file.stat().st_mode for file in (*(tmp_path / "model").iterdir(), tmp_path / "any")}
    assert len(modes) == 1


def test_load_to_dtype_and_device(tmp_path: Path) -> None:
    veca.save(make_tiny(), tmp_path)
    model = veca.load(tmp_path, device="cpu", dtype=torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    veca.save(model, tmp_path)
    assert {p.dtype for p in veca.load(tmp_path).parameters()} == {torch.float32}
    assert {p.dtype for p in veca.load(tmp_path, dtype=None).parameters()} == {torch.float16}
    assert veca.load(str(tmp_path / "model.safetensors"), device="meta").norm.weight.is_meta


def test_saves_a_compiled_model(tmp_path: Path) -> None:
    model = make_tiny()
    veca.save(torch.compile(model), tmp_path)  # type: ignore[arg-type]
    assert same(veca.load(tmp_path), model)


def test_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_tiny(), make_tiny(depth=2)
    veca.save(old, tmp_path)

    def dies(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a fi")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_format, "save_file", dies)
    with pytest.raises(OSError, match="No space"):
        veca.save(new, tmp_path)
    assert same(veca.load(tmp_path), old)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_crash_between_weights_and_config_leaves_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_tiny(), make_tiny(depth=2)
    veca.save(old, tmp_path)
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        veca.save(new, tmp_path)
    assert same(veca.load(tmp_path), new)


def test_released_file_and_its_safetensors_twin_agree(released: dict[str, object], tmp_path: Path) -> None:
    keys = ["model_family", "num_query_tokens", "hidden_dim", "num_heads", "num_layers", "mlp_ratio", "patch_size"]
    keys += ["nested_chunk_size", "rope_p_zero_freqs", "rope_zero_freqs_from"]
    config = {key: released["config"][key] for key in keys}  # type: ignore[index]
    save_file(dict(released["student"]), tmp_path / "w.safetensors", {"config": json.dumps(config)})  # type: ignore[call-overload]
    a, b = veca.load(GOLDEN / "official_checkpoint.pt"), veca.load(tmp_path / "w.safetensors")
    assert same(a, b)
    assert a.provenance["global_step"] == 7


def test_converting_back_reproduces_the_released_file(golden: Golden, tmp_path: Path) -> None:
    veca.save(golden.model(), tmp_path / "ours")
    save_released(veca.load(tmp_path / "ours"), tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    if golden.weights.suffix == ".pt":
        original = torch.load(golden.weights, weights_only=True)
        student, config = original["student"], original["config"]
        assert back["global_step"] == original["global_step"]
    else:
        student = load_file(golden.weights)
        with safe_open(golden.weights, "pt") as file:
            config = json.loads(file.metadata()["config"])
    assert set(back["student"]) == set(student)
    for name, tensor in student.items():
        assert tensor.dtype == back["student"][name].dtype
        assert torch.equal(tensor, back["student"][name]), name
    assert back["config"] == config
    assert (tmp_path / "back.pt").stat().st_size < 1.1 * sum(t.numel() * 4 for t in student.values()) + 1e5


def test_convert_a_model_of_ours_to_the_released_format(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = veca.create_model("veca_small", depth=12)
    save_released(model, tmp_path / "small.pt")
    assert torch.load(tmp_path / "small.pt", weights_only=True)["config"]["model_family"] == "small"
    again = veca.load(tmp_path / "small.pt")
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    with pytest.raises(CheckpointError, match="reset_classifier"):
        save_released(make_tiny(num_classes=2), tmp_path / "no.pt")


def test_widths_are_saved_in_every_format(tmp_path: Path) -> None:
    model = make_tiny(widths=(1.0, 0.5))
    veca.save(model, tmp_path / "ours")
    save_released(model, tmp_path / "theirs.pt")
    assert veca.load(tmp_path / "ours").config == veca.load(tmp_path / "theirs.pt").config == model.config
    veca.save(make_tiny(), tmp_path / "one")
    assert "widths" not in json.loads((tmp_path / "one" / "config.json").read_text())
    save_released(make_tiny(), tmp_path / "one.pt")
    assert "mlp_widths" not in torch.load(tmp_path / "one.pt", weights_only=True)["config"]


@pytest.mark.parametrize("prefix", ["module.", "student.", "module.student.", "_orig_mod.module."])
def test_prefixes_of_wrapped_models_are_removed(released: dict[str, object], tmp_path: Path, prefix: str) -> None:
    student = released["student"]
    released["student"] = {prefix + name: tensor for name, tensor in student.items()}  # type: ignore[attr-defined]
    torch.save(released, tmp_path / "x.pt")
    assert same(veca.load(tmp_path / "x.pt"), veca.load(GOLDEN / "official_checkpoint.pt"))


def test_older_keys_and_extra_contents(released: dict[str, object], tmp_path: Path) -> None:
    config = released["config"]
    assert isinstance(config, dict)
    config["matryoshka_chunk_size"] = config.pop("nested_chunk_size")
    config["matryoshka_budgets"] = config.pop("nested_budgets")[:4]
    for key in ("in_channels", "patch_embed_use_ln", "rope_zero_freqs_from"):
        del config[key]
    config["rope_shift_coords"] = None
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    torch.save({**released, "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "old.pt")
    model = veca.load(tmp_path / "old.pt")
    assert torch.equal(outputs(model), outputs(veca.load(GOLDEN / "official_checkpoint.pt")))
    assert model.config.budgets == (8, 16, 24, 32)
    assert model.config.coordinate_shift == 0
    save_released(model, tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)["config"]
    assert back["matryoshka_chunk_size"] == 8
    assert "nested_chunk_size" not in back


def test_legacy_torch_files_load_too(released: dict[str, object], tmp_path: Path) -> None:
    torch.save(released, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert same(veca.load(tmp_path / "legacy.pt"), veca.load(GOLDEN / "official_checkpoint.pt"))


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


def test_code_in_a_file_is_never_executed(released: dict[str, object], tmp_path: Path) -> None:
    torch.save({**released, "extra": Evil(tmp_path / "owned")}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="refused, it holds more than tensors and plain data"):
        veca.load(tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(CheckpointError):
        veca.load(tmp_path / "evil.pkl")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"hello, this is not a checkpoint", "neither a safetensors file nor a PyTorch checkpoint"),
        (b"PK\x03\x04 but no archive", "damaged or truncated checkpoint"),
        (struct.pack("<Q", 10**15) + b"{", "damaged or truncated safetensors"),
        (struct.pack("<Q", 2) + b"{}", "not of a VECA"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=message) as caught:
        veca.load(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_a_named_error(tmp_path: Path) -> None:
    veca.save(make_tiny(depth=1), tmp_path / "ours.safetensors")
    for source in (tmp_path / "ours.safetensors", GOLDEN / "official_checkpoint.pt"):
        whole = source.read_bytes()
        for length in {0, 1, 7, 8, 9, 64, 1000, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            path = tmp_path / "cut"
            path.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match="cut: "):
                veca.load(path)


def test_damaged_bytes_load_or_are_a_named_error(tmp_path: Path) -> None:
    rng = random.Random(0)
    model = make_tiny(depth=1, embed_dim=8, num_heads=1)
    veca.save(model, tmp_path / "a.safetensors")
    save_released(model, tmp_path / "b.pt")
    refused = 0
    for source in (tmp_path / "a.safetensors", tmp_path / "b.pt"):
        whole = source.read_bytes()
        for _ in range(100):
            damaged = bytearray(whole)
            for _ in range(rng.choice((1, 4, 16))):
                damaged[rng.randrange(min(len(whole), 4000))] = rng.randrange(256)
            (tmp_path / "x").write_bytes(damaged)
            try:
                veca.load(tmp_path / "x")
            except CheckpointError:
                refused += 1
    assert refused > 100


def test_foreign_weights_are_named(released: dict[str, object], tmp_path: Path) -> None:
    def refused(message: str, contents: object) -> None:
        torch.save(contents, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=message):
            veca.load(tmp_path / "x.pt")

    student, config = released["student"], released["config"]
    assert isinstance(student, dict)
    assert isinstance(config, dict)
    refused("no `student` and `config` \\(keys model", {"model": {}})
    refused("no `student` and `config`", [1, 2])
    refused("no tensor `query_token_chunks.0`", {"student": {"a": torch.zeros(1)}, "config": config})
    refused("config says 4 layers, its tensors have 3", {"student": student, "config": {**config, "num_layers": 4}})
    refused("10000000000", {"student": student, "config": {**config, "num_layers": 10**10}})
    refused("blocks.0.fc1.weight is", {"student": student, "config": {**config, "mlp_ratio": 4.0}})
    refused("rope_zero_freqs_from", {"student": student, "config": {**config, "rope_zero_freqs_from": "high"}})
    refused("no 'hidden_dim'", {"student": student, "config": {k: v for k, v in config.items() if k != "hidden_dim"}})
    missing = {name: tensor for name, tensor in student.items() if name != "final_norm.bias"}
    refused("missing final_norm.bias", {"student": missing, "config": config})
    refused("unknown head.weight", {"student": {**student, "head.weight": torch.zeros(1)}, "config": config})
    for odd in ("module", "student", "module.", 7):
        refused("unknown", {"student": {**student, odd: torch.zeros(1)}, "config": config})
    sparse = {**student, "pos_alpha": torch.ones(2).to_sparse()}
    refused("pos_alpha is .* torch.sparse_coo", {"student": sparse, "config": config})
    integers = {**student, "pos_alpha": torch.zeros(2, dtype=torch.int64)}
    refused("pos_alpha is", {"student": integers, "config": config})

    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", {"veca": json.dumps({"config": {"depht": 3}})})
    with pytest.raises(CheckpointError, match="did you mean 'depth'"):
        veca.load(tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", {"veca": json.dumps({"config": {}})})
    with pytest.raises(CheckpointError, match="missing .* and .* more; unknown a"):
        veca.load(tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", {"veca": "[" * 100_000})
    with pytest.raises(CheckpointError):
        veca.load(tmp_path / "x.safetensors")


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder, and no model of that name \\(did you mean"):
        veca.load("veca_bose")
    with pytest.raises(CheckpointError, match="holds no model.safetensors"):
        veca.load(tmp_path)
    veca.save(make_tiny(), tmp_path / "run" / "best")
    with pytest.raises(CheckpointError, match=f"holds no model.safetensors; name one of {tmp_path}/run/best$"):
        veca.load(tmp_path / "run")
    (tmp_path / "veca.onnx").write_bytes(b"\x08\n\x12\x07pytorch")
    with pytest.raises(CheckpointError, match="an exported file, .* name what it was made from"):
        veca.load(tmp_path / "veca.onnx")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        veca.load(tmp_path / "pipe")


def test_a_size_without_weights_is_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "WEIGHTS", tmp_path)
    with pytest.raises(CheckpointError, match="no weights ship for veca_tiny"):
        veca.load("veca_tiny")
    rng = torch.get_rng_state()
    a, b = load_or_random("veca_tiny"), load_or_random("veca_tiny")
    assert same(a, b)
    assert a.provenance["weights"] == "random"
    assert load_or_random("veca_tiny", device="meta").norm.weight.is_meta
    assert torch.equal(rng, torch.get_rng_state()), "the caller's random numbers are left alone"
    with pytest.raises(CheckpointError, match="no such file"):
        load_or_random(tmp_path / "nothing.pt")


def test_no_folder_is_made_where_a_pt_was_meant(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.pt: weights are written as a .safetensors file or a folder"):
        veca.save(make_tiny(), tmp_path / "model.pt")
    assert not os.listdir(tmp_path)


def random_config(dice: random.Random) -> veca.VecaConfig:
    heads, chunk = dice.choice((1, 2, 3)), dice.choice((1, 2, 4))
    cores = chunk * dice.randint(1, 4)
    return veca.VecaConfig(
        embed_dim=4 * heads * dice.randint(1, 3),
        num_heads=heads,
        depth=dice.randint(1, 3),
        mlp_ratio=dice.choice((1, 2.66667, 4, dice.uniform(0.5, 5))),
        patch_size=dice.randint(1, 5),
        in_chans=dice.choice((1, 3, 4)),
        num_cores=cores,
        core_chunk=chunk,
        budgets=tuple(dice.randint(1, cores) for _ in range(dice.randint(1, 4))),
        output_dim=dice.choice((None, 1, 9)),
        rope_zero_fraction=dice.choice((0, 0.125, 1, dice.random())),
        coordinate_shift=dice.choice((0, 0.08, 1, dice.random())),
        coordinate_rescale=dice.choice((1, 2.0, 16, dice.uniform(1, 16))),
    )


def test_every_configuration_comes_back_from_the_released_format(tmp_path: Path) -> None:
    dice = random.Random(0)
    configs = [veca.VecaConfig(embed_dim=8, num_heads=1, depth=1, num_cores=8, budgets=(4, 8))]
    configs += [random_config(dice) for _ in range(60)]
    configs += [
        get_config("veca_small", depth=1, budgets=(64,)),
        get_config("veca_small", in_chans=1, depth=1),
    ]
    for config in configs:
        with torch.random.fork_rng():
            model = veca.Veca(config)
        save_released(model, tmp_path / "a.pt")
        again = veca.load(tmp_path / "a.pt")
        assert again.config == config
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
        save_released(again, tmp_path / "b.pt")  # and with the configuration of the file that it came from
        assert veca.load(tmp_path / "b.pt").config == config


@pytest.mark.parametrize(
    "told",
    [
        "{'matryoshka_budgets': (8, 16), 'nested_budgets': (8,), 'rope_shift_coords': None, 'in_channels': 1}",
        "{'model_family': 'large', 'rope_rescale_coords': 'x', 'nested_budgets': 3}",
        "{'model_family': ['large'], 7: 8}",
        "(" * 10_000,
        "[" * 100 + "]" * 100,
        "open('x')",
        7,
        None,
    ],
)
def test_what_others_say_of_a_model_does_not_change_the_file(tmp_path: Path, told: object) -> None:
    model = make_tiny(depth=1)
    model.provenance = {"official_config": told, "global_step": "many"}
    save_released(model, tmp_path / "a.pt")
    again = veca.load(tmp_path / "a.pt")
    assert again.config == model.config
    assert "global_step" not in again.provenance


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    model = make_tiny(depth=1)
    model.provenance = {"official_config": "{'patch_embed_use_ln': True}"}
    with pytest.raises(CheckpointError, match="cannot be written in the released format: it needs"):
        save_released(model, tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_warn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    model = make_tiny(depth=1)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, :2] = value
        model.norm.bias[1] = value
    veca.save(model, tmp_path / "veca_tiny.mine")
    monkeypatch.setattr(loading, "WEIGHTS", tmp_path)
    message = r"its weights hold 3 NaN or infinite values, the first in blocks.0.mlp.fc1.weight"
    for act in (
        lambda: veca.load(tmp_path / "veca_tiny.mine"),
        lambda: veca.load(tmp_path / "veca_tiny.mine", dtype=None),
        lambda: load_or_random(tmp_path / "veca_tiny.mine"),
        lambda: veca.create_model("veca_tiny.mine", pretrained=True),
    ):
        with pytest.warns(UserWarning, match=message) as warned:
            act()
        assert [warning.filename for warning in warned] == [__file__]


def test_finite_weights_do_not_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    veca.load("veca_tiny")
    model = make_tiny(depth=1)
    with torch.no_grad():
        model.norm.weight.fill_(3e38)  # the sum is infinite, the values are not
    veca.save(model, tmp_path)
    veca.load(tmp_path)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="NaN or infinite values, the first in norm.weight"):
        veca.load(tmp_path, dtype=torch.float16)


def test_provenance_of_untrusted_files_is_checked(tmp_path: Path) -> None:
    config = make_tiny(depth=1).config.to_dict()
    tensors = dict(make_tiny(depth=1).state_dict())
    for told, message in (
        ([1], "no provenance, that is a dictionary"),
        (json.loads('{"a":' * 30 + "1" + "}" * 30), "nested more than 20 levels deep"),
    ):
        header = json.dumps({"config": config, "provenance": told})
        save_file(tensors, tmp_path / "x.safetensors", {"veca": header})
        with pytest.raises(CheckpointError, match=message):
            veca.load(tmp_path / "x.safetensors")


def test_messages_do_not_repeat_what_is_long_or_odd(tmp_path: Path) -> None:
    config = make_tiny(depth=1).config.to_dict()
    for wrong in (
        {"depth": "\x1b[31m" * 10**6},
        {"x\x1b" * 10**6: 1},
        {"budgets": [9] * 10**5},
        {"mlp_ratio": 10**400},
    ):
        header = json.dumps({"config": {**config, **wrong}})
        save_file({"a\x1b" * 10**5: torch.zeros(1)}, tmp_path / "x.safetensors", {"veca": header})
        with pytest.raises(CheckpointError) as caught:
            veca.load(tmp_path / "x.safetensors")
        assert len(str(caught.value)) < 700
        assert str(caught.value).isprintable()
