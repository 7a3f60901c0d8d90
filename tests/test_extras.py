"""Each extra can be missing: whatever needs it says so in one line, which names the extra.

Networks of timm and transformers are in `tests/models/own/test_libraries.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedshift.api import Results
from fedshift.data.builders import medical
from fedshift.data.table_files import read_table
from fedshift.deploy.flare.kits import check_installed
from fedshift.errors import UserError
from fedshift.experiment.export import _onnx, checked_repository
from fedshift.experiment.model_card import model_card
from fedshift.functional.differential_privacy import NoisySteps, epsilon
from fedshift.functional.pairwise_masks import _stream
from fedshift.functional.secret_noise import SecretStream
from fedshift.models import registry as models
from fedshift.models.adapters import Adapters, with_adapters
from fedshift.report.trackers import MLflow, TensorBoard, WeightsAndBiases


def small() -> Any:
    return models.build(models.parse({"name": "linear"}), (3,), 2, 0)


def file(folder: Path, name: str) -> Path:
    (folder / name).write_bytes(b"\0")
    return folder / name


WITHOUT: list[tuple[str, str, Callable[[Path], object]]] = [
    ("pandas", "tables", lambda _: Results.to_frame(object.__new__(Results))),
    ("openpyxl", "tables", lambda folder: read_table(file(folder, "a.xlsx"))),
    ("peft", "networks", lambda _: with_adapters(small(), Adapters(), (3,), 0)),
    ("pydicom", "medical", lambda folder: medical._dicom_header(file(folder, "a.dcm"), "id")),
    ("nibabel", "medical", lambda folder: medical._nifti_header(file(folder, "a.nii"))),
    ("onnx", "export", lambda _: _onnx(small(), small())),
    ("huggingface_hub", "export", lambda _: checked_repository("north/hearts")),
    ("huggingface_hub", "export", lambda _: model_card(small(), None)),
    ("opacus.accountants", "privacy", lambda _: epsilon([NoisySteps(1.0, 0.1, 1000)], 1e-5)),
    ("tensorboard", "trackers", lambda _: TensorBoard()),
    ("mlflow", "trackers", lambda _: MLflow()),
    ("wandb", "trackers", lambda _: WeightsAndBiases()),
    ("nvflare", "deploy", lambda _: check_installed()),
    ("cryptography.hazmat.primitives.ciphers", "deploy", lambda _: SecretStream(b"s" * 32, "noise")),
    ("cryptography.hazmat.primitives.ciphers", "deploy", lambda _: _stream(b"s" * 32)),
]


@pytest.mark.parametrize(
    ("package", "extra", "needs_it"), WITHOUT, ids=[f"{one[0]}-{n}" for n, one in enumerate(WITHOUT)]
)
def test_its_absence_is_one_line(
    package: str, extra: str, needs_it: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        needs_it(tmp_path)
    assert f"pip install 'fedshift[{extra}]'" in str(caught.value)
    assert "\n" not in str(caught.value)
