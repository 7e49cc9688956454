"""Check that two versions of the source give bit-equal features, distillation and fine-tuning runs on the CPU.

`python tests/tools/compare_runs.py OLD_SRC [--new NEW_SRC]`, where each is a `src` folder. Every version runs in
processes of its own, with fixed seeds and threads, through the public API and the command line. SHA-256 of the weights
and of the logged losses are compared; the exit status is 1 where any differs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

CLOCK_COLUMNS = {"time", "seconds", "images_per_s", "memory_gib", "floor_share"}
FEATURES = """
import hashlib, json, sys, numpy, torch, veca
model = veca.load("veca_tiny").eval()
hashes = {}
for size in (64, 224):
    images = torch.from_numpy(numpy.random.default_rng(size).normal(size=(2, 3, size, size)).astype("float32"))
    for cores in (8, 64):
        with torch.inference_mode():
            out = model(images, cores)
        for name in ("cls", "patches"):
            data = getattr(out, name).contiguous().numpy().tobytes()
            hashes[f"{name} {size} px C={cores}"] = hashlib.sha256(data).hexdigest()
json.dump(hashes, open(sys.argv[1], "w"))
"""
RECIPE = """
model: {{size: veca_tiny, overrides: {{embed_dim: 32, depth: 2, num_heads: 1}}}}
teacher: {{name: "{folder}/teacher", standardize: true}}
data: {{train: ["{folder}/photos"], validation: ["{folder}/validation"], workers: 0}}
schedule: {{epochs: null, steps: 24, warmup: 4, peak: 2.0e-3, low: 1.0e-4}}
budgets: {{8: 1, 16: 1, 64: 2}}
resolutions: [{{odds: {{32: 1, 48: 1}}}}]
batch: 8
precision: float32
compile: false
ema: 0.9
validation: {{every: 8, budgets: [8, 64]}}
checkpoints: {{every: 8, keep: 2}}
log_every: 5
seed: 1
"""


def noise_image(seed: int, width: int = 60, height: int = 44) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def write_inputs(folder: Path) -> None:
    """Images, a small teacher, a small model to fine-tune, and a recipe."""
    for name, count, first in (("photos", 37, 0), ("validation", 6, 100)):
        (folder / name).mkdir()
        for i in range(count):
            noise_image(first + i).save(folder / name / f"{i:02}.png")
    for split, count in (("train", 12), ("val", 4), ("test", 4)):
        for label, name in enumerate(("blue", "green", "red")):
            (folder / "classes" / split / name).mkdir(parents=True)
            for i in range(count):
                noise_image(1000 * label + i + len(split)).save(folder / "classes" / split / name / f"{i}.png")
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for part in ("images", "masks"):
            (folder / "scenes" / part / split).mkdir(parents=True)
        for i in range(count):
            mask = rng.integers(0, 3, (4, 5), dtype=np.uint8).repeat(12, 0).repeat(12, 1)
            noise_image(5000 + i, 60, 48).save(folder / "scenes/images" / split / f"{i}.png")
            Image.fromarray(mask).save(folder / "scenes/masks" / split / f"{i}.png")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16, "image_size": 48}
    teacher = transformers.Dinov2Model(transformers.Dinov2Config(**shape))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.normal_(std=0.3)
    teacher.save_pretrained(folder / "teacher")
    about = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "BitImageProcessor"}
    (folder / "teacher/preprocessor_config.json").write_text(json.dumps(about))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))


def call(source: Path, *arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{source}: {' '.join(map(str, arguments))[:200]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def hash_weights(path: Path) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_table(path: Path) -> str:
    with path.open(newline="") as file:
        rows = [{k: v for k, v in row.items() if k not in CLOCK_COLUMNS} for row in csv.DictReader(file)]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def hash_run(folder: Path) -> dict[str, str]:
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    weights = [folder / "model.safetensors", *sorted(newest.glob("*.safetensors"))]
    weights += [path for name in ("best/model.safetensors", "head.safetensors") if (path := folder / name).is_file()]
    hashes = {str(path.relative_to(folder)): hash_weights(path) for path in weights}
    return hashes | {name: hash_table(folder / name) for name in ("metrics.csv", "validation.csv")}


def run_all(source: Path, inputs: Path, out: Path) -> dict[str, str]:
    """Hashes of everything one version makes, by name."""
    out.mkdir()
    call(source, "-c", FEATURES, out / "features.json")
    hashes = {f"features: {k}": v for k, v in json.loads((out / "features.json").read_text()).items()}
    veca_command, device = ("-m", "veca"), ("--device", "cpu")
    call(source, *veca_command, "distill", inputs / "recipe.yaml", "--out", out / "distill", *device)
    # The model to fine-tune is this version's own, whose equality is checked too. It once was a positional argument.
    usage = call(source, *veca_command, "finetune", "classify", "--help")
    named_model = ("--model", out / "distill") if "--model" in usage else (out / "distill",)
    common = ("--epochs", 4, "--workers", 0, "--set", "ema=0.9", "--cores", "8,64", *device)
    classify = ("--data", inputs / "classes", "--size", 32, "--set", "batch=8", "--set", "head_epochs=5", *common)
    segment = ("--data", inputs / "scenes", "--size", 32, "--set", "batch=4", *common)
    mixed = (*classify, "--set", "mixup=0.2", "--set", "augment=trivial", "--head", "new")
    for name, task, options in (
        ("classify", "classify", classify), ("classify-mixup", "classify", mixed), ("segment", "segment", segment)
    ):  # fmt: skip
        call(source, *veca_command, "finetune", task, *named_model, "--out", out / name, *options)
    for name in ("distill", "classify", "classify-mixup", "segment"):
        hashes |= {f"{name}: {key}": value for key, value in hash_run(out / name).items()}
    return hashes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="src folder of the version to compare with")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[2] / "src")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        inputs = Path(temporary) / "inputs"
        inputs.mkdir()
        write_inputs(inputs)
        old, new = (
            run_all(source.resolve(), inputs, Path(temporary) / name)
            for name, source in (("old", arguments.old), ("new", arguments.new))
        )
    differ = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    for name in sorted({*old, *new}):
        print("DIFFERS" if name in differ else "equal  ", name)
    sys.exit(f"{len(differ)} of {len(old)} differ" if differ else None)


if __name__ == "__main__":
    main()
