"""A model goes to Hugging Face's hub by the hub's own package. Nothing here reaches a network."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedshift.errors import UserError
from fedshift.experiment.export import checked_repository, push

hub = pytest.importorskip("huggingface_hub")
TOKEN = "hf_aSecretThatNobodyMaySee"


class Hub:
    """Keeps what is asked of it; refuses what the signatures of the real interface do not take."""

    real = hub.HfApi

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any]] = {}
        self.problem: Exception | None = None

    def __call__(self) -> Hub:
        return self

    def _note(self, name: str, *args: Any, **options: Any) -> None:
        if self.problem is not None:
            raise self.problem
        self.asked[name] = dict(inspect.signature(getattr(self.real, name)).bind(self, *args, **options).arguments)

    def create_repo(self, *args: Any, **options: Any) -> None:
        self._note("create_repo", *args, **options)

    def upload_folder(self, **options: Any) -> Any:
        self._note("upload_folder", **options)
        folder = Path(options["folder_path"])
        names = [file.name for file in folder.iterdir()]
        self.uploaded = sorted(hub.utils.filter_repo_objects(names, allow_patterns=options["allow_patterns"]))
        return SimpleNamespace(commit_url="https://hub.example/north/hearts/commit/1")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr(hub, "HfApi", found)
    monkeypatch.setattr(hub, "get_token", lambda: TOKEN)
    return found


def test_both_files_go_to_a_repository_that_only_its_owner_sees(fake: Hub, tmp_path: Path) -> None:
    for name in ("model.onnx", "README.md", "patients.csv"):
        (tmp_path / name).write_text("-")
    assert push("north/hearts", tmp_path, ["model.onnx", "README.md"]).endswith("commit/1")
    assert fake.uploaded == ["README.md", "model.onnx"]
    made = fake.asked["create_repo"]
    assert (made["repo_id"], made["private"], made["exist_ok"]) == ("north/hearts", True, True)
    assert fake.asked["upload_folder"]["repo_id"] == "north/hearts"


@pytest.mark.parametrize("name", ["hearts", "a/b/c", "north/../x", "./exported", "north/he arts", ""])
def test_a_name_that_is_no_repository_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match="OWNER/NAME"):
        checked_repository(name)


@pytest.mark.parametrize(
    "problem",
    [
        hub.errors.LocalTokenNotFoundError("no token"),
        hub.errors.OfflineModeIsEnabled("offline"),
        hub.errors.HTTPError(f"403 for {TOKEN}\nmore lines"),
    ],
    ids=["no token", "offline", "refused"],
)
def test_a_refusal_is_one_line_without_the_token(problem: Exception, fake: Hub, tmp_path: Path) -> None:
    fake.problem = problem
    with pytest.raises(UserError, match="hf auth login") as caught:
        push("north/hearts", tmp_path, ["model.onnx"])
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
