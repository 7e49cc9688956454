"""The tests that timm and transformers have for their own models, run on ours.

    python tests/tools/suites.py timm
    python tests/tools/suites.py transformers

They are taken from the source distribution of the version that is installed, which pip downloads to a temporary
folder. Further arguments go to pytest: `-k veca_tiny`, `-x`, `--tb short`. What fails and is skipped, and why, is
told in results/ecosystem.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

TIMM_EDITS = {
    # What a model that joins timm adds to the lists there. `timm` is the name of the module that registers ours.
    "NON_STD_FILTERS = [": "NON_STD_FILTERS = ['veca_*', ",
    "FEAT_INTER_FILTERS = [": "FEAT_INTER_FILTERS = ['timm', ",
    # Configurations are checked up to this size; ours say 512. On the meta device it costs nothing.
    "if max(input_size) > 320:": "if max(input_size) > 512:",
}
ABSENT = {
    "exporters/test_export.py": "class ExportTesterMixin: pass",
    "generation/test_utils.py": "class GenerationTesterMixin: pass",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}",
}
"""What transformers' tests import and the source distribution lacks. So tests of exporters are not run."""
SCRIPT = "no torch.jit.script: budget and kernel are chosen by plain Python; torch.export and torch.compile do work"
TRACE = "no symbolic trace: the size of pictures is checked, and a placeholder has none; torch.export does work"
KNOWN = {
    "test_model_forward_torchscript": SCRIPT,
    "test_model_forward_fx_torchscript": TRACE,
    "test_model_forward_fx": TRACE,
    "test_model_backward_fx": TRACE,
}
"""Tests that fail, and why; one that passes all the same is an error."""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    import pytest

    for item in items:
        if reason := KNOWN.get(item.originalname):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def source(package: str, folder: Path) -> Path:
    """The source distribution of the installed version, unpacked."""
    wanted = f"{package}=={version(package)}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-binary", package, "--dest", str(folder), wanted], check=True)
    (archive,) = folder.glob(f"{package}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def prepare_timm(folder: Path) -> list[str]:
    """Write the tests to `folder`; the arguments for pytest."""
    text = (source("timm", folder / "sdist") / "tests" / "test_models.py").read_text()
    for old, new in TIMM_EDITS.items():
        if text.count(old) != 1:
            raise SystemExit(f"timm {version('timm')}: its tests have no {old!r}; see TIMM_EDITS in {__file__}")
        text = text.replace(old, new)
    (folder / "test_models.py").write_text(f"import veca.hub\n{text}")
    return ["test_models.py", "-k", "veca_"]


def prepare_transformers(folder: Path) -> list[str]:
    """Write the tests to `folder`; the arguments for pytest."""
    tests = source("transformers", folder / "sdist") / "tests"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), "parameterized"], check=True)  # what the tests need beside ours
    package = folder / "tests"
    for name, text in ABSENT.items():
        file = package / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    for name in ("test_modeling_common.py", "test_backbone_common.py", "test_configuration_common.py"):
        (package / name).write_text((tests / name).read_text())
    (package / "test_modeling_veca.py").write_text("import suites\n\nglobals().update(suites.transformers_tests())\n")
    for place in (package, *{(package / name).parent for name in ABSENT}):
        (place / "__init__.py").touch()
    return ["tests/test_modeling_veca.py"]


def transformers_tests() -> dict[str, Any]:
    """The classes of tests, in the way of those of transformers for DINOv3. Called where its mixins are."""
    import torch
    from tests.test_backbone_common import BackboneTesterMixin
    from tests.test_configuration_common import ConfigTester
    from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor
    from transformers.models.auto import modeling_auto as auto

    from veca.hub.transformers import VecaBackbone, VecaConfig, VecaForImageClassification, VecaModel
    from veca.model import Block

    # By these names the mixins know what a class is for; the Auto classes know ours otherwise.
    auto.MODEL_MAPPING_NAMES["veca"] = "VecaModel"
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["veca"] = "VecaForImageClassification"
    auto.MODEL_FOR_BACKBONE_MAPPING_NAMES["veca"] = "VecaBackbone"

    class Tester:
        """A small model and something to show it; its attributes are what the mixins ask for."""

        batch_size, image_size, patch_size, num_channels = 3, 32, 16, 3
        hidden_size, num_hidden_layers, num_attention_heads, num_labels = 32, 2, 4, 10
        is_training = True
        num_cores = 8
        seq_length = num_cores + (image_size // patch_size) ** 2
        encoder_seq_length = seq_length

        def get_config(self) -> VecaConfig:
            return VecaConfig(
                image_size=self.image_size, patch_size=self.patch_size, num_channels=self.num_channels,
                hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
                num_attention_heads=self.num_attention_heads, num_cores=self.num_cores, budgets=[self.num_cores],
                num_labels=self.num_labels,
            )  # fmt: skip

        def prepare_config_and_inputs(self) -> tuple[VecaConfig, Any, Any]:
            pixels = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
            return self.get_config(), pixels, ids_tensor([self.batch_size], self.num_labels)

        def prepare_config_and_inputs_for_common(self) -> tuple[VecaConfig, dict[str, Any]]:
            config, pixels, _ = self.prepare_config_and_inputs()
            return config, {"pixel_values": pixels}

    class VecaModelTest(ModelTesterMixin, unittest.TestCase):
        all_model_classes = (VecaModel, VecaForImageClassification, VecaBackbone)
        test_resize_embeddings = False
        test_can_init_all_missing_weights_before_2023 = True  # what it does without the year in a file

        def setUp(self) -> None:
            self.model_tester = Tester()
            # The layer that is checkpointed is ours.
            self.enterContext(patch("tests.test_modeling_common.GradientCheckpointingLayer", Block))

        def test_config(self) -> None:
            ConfigTester(self, VecaConfig, has_text_modality=False, embed_dim=96).run_common_tests()

        def test_attention_outputs(self) -> None:
            """What cores take from all tokens: patches do not attend to patches."""
            self.model_tester.encoder_seq_length = Tester.num_cores
            self.model_tester.key_length = Tester.seq_length
            super().test_attention_outputs()

        def test_retain_grad_hidden_states_attentions(self) -> None:
            """Hidden states only: attentions are computed beside the fused ones and carry no gradient."""
            self.has_attentions = False
            super().test_retain_grad_hidden_states_attentions()

        def test_model_get_set_embeddings(self) -> None:
            """As in transformers' tests of vision models: pixels have no `nn.Embedding`."""
            for kind in self.all_model_classes:
                model = kind(self.model_tester.get_config())
                assert isinstance(model.get_input_embeddings(), torch.nn.Module)
                assert model.get_output_embeddings() is None

    class VecaBackboneTest(BackboneTesterMixin, unittest.TestCase):
        all_model_classes = (VecaBackbone,)
        config_class = VecaConfig

        def setUp(self) -> None:
            self.model_tester = Tester()

    return {each.__name__: each for each in (VecaModelTest, VecaBackboneTest)}


def main() -> int:
    prepare = {"timm": prepare_timm, "transformers": prepare_transformers}.get((sys.argv[1:] or [""])[0])
    if prepare is None:
        raise SystemExit("python tests/tools/suites.py timm|transformers [arguments of pytest]")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sdist").mkdir()
        chosen = prepare(folder)
        (folder / "conftest.py").write_text("from suites import pytest_collection_modifyitems\n")
        (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore\n")
        paths = [name, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        pytest = [sys.executable, "-m", "pytest", "-p", "no:schemathesis", "-p", "no:cacheprovider", "-q", "-ra"]
        return subprocess.run([*pytest, *chosen, *sys.argv[2:]], cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
