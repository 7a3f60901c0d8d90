"""A coordinator that asks a site for more than it may: what leaves is held to the site's policy whatever is asked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from loopback import (
    SETTING,
    SITES,
    request,
    site_file,
    write_data,
)
from safetensors.torch import save_file

from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.remote.requests import PROTOCOL
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram, open_site
from fedshift.evaluation.metrics import counts_by_class

ENVELOPE = {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 5}


def program_of(tmp_path: Path, **policy: Any) -> SiteProgram:
    files = write_data(tmp_path / "data", {"north": 40})
    return open_site(site_file(tmp_path, "north", files["north"], **policy))


@pytest.mark.threat("few_samples")
@pytest.mark.parametrize(("batch_size", "allowed"), [(1, False), (9, False), (10, True)])
def test_a_model_made_of_a_few_samples_does_not_leave(batch_size: int, allowed: bool, tmp_path: Path) -> None:
    """With one mini-batch of one sample, weights divided by biases are that sample."""
    program = program_of(tmp_path, smallest_group=10)
    training = {"batch_size": batch_size, "lr": 1.0}
    answer = request(program, setting={**SETTING, "training": training}, envelope={**ENVELOPE, "mini_batches_left": 1})
    assert ("error" not in answer) is allowed, answer
    if not allowed:
        assert "policy.smallest_group: 10" in answer["message"]


def test_a_refusal_does_not_say_how_many_there_are(tmp_path: Path) -> None:
    program = program_of(tmp_path, smallest_group=10_000)
    answer = request(program)
    held = str(len(program.holding.domain))
    assert "smallest_group" in answer["message"]
    assert held not in answer["message"]
    assert "smallest_group" in request(program, do="hello", **hello(seeds=[]))["message"]


def hello(**changes: Any) -> dict[str, Any]:
    from fedshift import __version__

    split = {"test_fraction": 0.3, "split": "auto"}
    return {"version": __version__, "methods": [], "seeds": [0], "split": split, "on_refusal": "stop", **changes}


@pytest.mark.threat("again_and_again")
def test_requests_of_a_round_and_measurements_are_counted(tmp_path: Path) -> None:
    program = program_of(tmp_path, rounds_per_day=2, requests_per_round=3)
    for exchange in range(3):
        assert "error" not in request(program, envelope={**ENVELOPE, "round": 0, "exchange": exchange})
    answer = request(program, envelope={**ENVELOPE, "round": 0, "exchange": 9})
    assert "policy.requests_per_round: 3" in answer["message"]
    assert "error" not in request(program, do="measure", round=1)
    assert "policy.rounds_per_day: 2" in request(program, do="measure", round=2)["message"]
    # The log remembers, too, for a site that is started again.
    assert "policy.rounds_per_day: 2" in request(open_site(program.config.path), do="measure", round=2)["message"]


@pytest.mark.parametrize("strange", ["x", -1, 1.5, None, True, 10**30, [[]]])
def test_a_strange_envelope_leaves_the_log_whole(strange: Any, tmp_path: Path) -> None:
    program = program_of(tmp_path)
    for name in ("round", "exchange", "mini_batches_left"):
        answer = request(program, envelope={**ENVELOPE, name: strange})
        assert "envelope" in answer["message"]
    request(program, call="\ud800")
    again = open_site(program.config.path)
    assert "error" not in request(again)
    lines, _ = AuditLog.check(again.config.audit_log)
    assert len(lines) == 5


@pytest.mark.parametrize("progress", [-0.1, 1.1, True, "1", None])
def test_progress_is_a_share(progress: Any, tmp_path: Path) -> None:
    assert "envelope" in request(program_of(tmp_path), envelope={**ENVELOPE, "progress": progress})["message"]


@pytest.mark.threat("files_and_errors")
def test_files_that_a_request_names_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(tmp_path, send=["weights", "numbers", "accuracy", "styles"])
    monkeypatch.setenv("FEDSHIFT_WEIGHTS", str(tmp_path / "weights"))
    (tmp_path / "weights").mkdir()
    np.savez(tmp_path / "patients.npz", patient_ids=np.arange(4))
    for named in (True, str(tmp_path / "patients.npz"), "../patients.npz", "IMAGENET1K_V1", "missing.npz"):
        network = {"name": "resnet18", "pretrained": named}
        for wrapped in (network, {"name": "frozen", "backbone": network, "head": {"name": "linear"}, "size": 32}):
            answer = request(program, setting={**SETTING, "network": wrapped, "input_shape": [3, 8, 8]})
            assert "must be the plain name" in answer["message"], answer
            assert "patient_ids" not in answer["message"]
    options = {"style_space": "vgg", "vgg_encoder": str(tmp_path / "patients.npz")}
    answer = request(program, setting={**SETTING, "method": {"name": "ccst", "options": options}})
    assert "must be the plain name" in answer["message"], answer
    prepared = {"name": "fedavg", "options": {"prepare": {"name": "styles", **options}}}
    assert "must be the plain name" in request(program, setting={**SETTING, "method": prepared})["message"]


def test_weights_that_the_site_holds_ready_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(tmp_path)
    monkeypatch.setenv("FEDSHIFT_WEIGHTS", str(tmp_path / "weights"))
    (tmp_path / "weights").mkdir()
    save_file({"other": torch.zeros(2)}, tmp_path / "weights" / "ready.safetensors")
    network = {"name": "resnet18", "pretrained": "ready.safetensors"}
    answer = request(program, setting={**SETTING, "network": network, "input_shape": [3, 8, 8]})
    assert "must be the plain name" not in answer["message"]  # it was opened, and does not fit


@pytest.mark.threat("wrong_key")
def test_an_answer_that_was_kept_is_held_to_the_policy_of_now(tmp_path: Path) -> None:
    program = program_of(tmp_path, smallest_group=2)
    assert "error" not in request(program)
    assert "error" not in request(program)
    lines, _ = AuditLog.check(program.config.audit_log)
    assert lines[-1]["again"]
    assert lines[-1]["sent"] == lines[-2]["sent"]
    file = program.config.path
    file.write_text(file.read_text().replace("smallest_group: 2", "smallest_group: 10000"))
    assert open_site(file).policy.smallest_group == 10_000
    assert "smallest_group" in request(open_site(file))["message"]


@pytest.mark.threat("files_and_errors")
def test_a_fault_in_the_data_is_said_without_them(tmp_path: Path) -> None:
    """The owner's file goes bad during a run: its cells are for the owner's eyes."""
    file = tmp_path / "data.csv"
    rows = [f"{40 + row},{'ny'[row % 2]}" for row in range(20)]
    file.write_text("\n".join(["age,ill", *rows]) + "\n")
    site_yaml = site_file(tmp_path, "north", str(file))
    whole = yaml.safe_load(site_yaml.read_text())
    data = {"name": "table", "sites": {"north": str(file)}, "label": "ill", "numeric": ["age"]}
    site_yaml.write_text(yaml.safe_dump({**whole, "data": data, "classes": ["n", "y"]}))
    program = open_site(site_yaml)
    file.write_text(file.read_text().replace("41,", "Jane Doe,"))
    answer = request(program)
    assert "error" in answer
    assert "Jane Doe" not in json.dumps(answer)
    lines, _ = AuditLog.check(program.config.audit_log)
    assert "Jane Doe" in lines[-1]["failed"]


@pytest.mark.threat("wrong_key")
def test_a_request_cannot_bear_the_key_of_another(tmp_path: Path) -> None:
    assert "key" in request(program_of(tmp_path), key="a" * 64)["message"]


@pytest.mark.threat("few_samples")
@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([40, 40, 40], [True, True, True]),
        ([40, 3, 30], [True, False, False]),  # else the whole and the two others tell of the three
        ([40, 3, 30, 0], [True, False, False, True]),
        ([3, 40], [False, False]),
        ([40, 4, 4, 50], [False, False, False, True]),
        ([40, 6, 6, 50], [True, False, False, True]),
    ],
)
def test_classes_kept_back_cannot_be_had_from_the_others(counts: list[int], shown: list[bool]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    pairs = counts_by_class(np.zeros_like(labels), labels, len(counts), smallest_group=10)
    assert [pair is not None for pair in pairs] == shown
    assert json.loads(json.dumps(pairs)) == pairs
    assert pairs[0] in (None, [counts[0], counts[0]])


@pytest.fixture
def program(tmp_path: Path) -> SiteProgram:
    files = write_data(tmp_path / "data", SITES)
    return SiteProgram(load_site(site_file(tmp_path, "north", files["north"])))


def test_a_whole_request_is_answered(program: SiteProgram) -> None:
    assert "error" not in request(program)


@pytest.mark.threat("code_or_method", "kept_kind", "files_and_errors")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"call": "round"}, "not a call"),
        ({"call": "mini_batches"}, "not a call"),
        ({"call": "_own"}, "not a call"),
        ({"call": "__init__"}, "not a call"),
        ({"call": 3}, "call: input should be a valid string"),
        ({"do": "shell"}, "does not know"),
        ({"protocol": PROTOCOL + 1}, "install the same fedshift"),
        ({"run": "../../etc"}, "names a file"),
        ({"memory": {"optimizer": "../../secret"}}, "names a file"),
        ({"key": "../../x"}, "key"),
        ({"setting": {**SETTING, "method": {"name": "os:system", "options": {}}}}, "has no method"),
        ({"setting": {**SETTING, "method": {"name": "/tmp/x.py:Y", "options": {}}}}, "has no method"),
        ({"setting": {**SETTING, "method": {"name": "deepall", "options": {}}}}, "needs the samples"),
        ({"setting": {**SETTING, "method": {"name": "fedavg", "options": {"local_epochs": -1}}}}, "local_epochs"),
        ({"setting": {**SETTING, "training": {"rounds": "many"}}}, "setting cannot be read: rounds"),
        ({"setting": None}, "setting: input should be"),
        ({"envelope": {"exchange": "one"}}, "envelope"),
        ({"part": None}, "part: input should be"),
    ],
)
def test_a_strange_request_is_answered_with_an_error(changes: dict[str, Any], what: str, program: SiteProgram) -> None:
    answer = request(program, **changes)
    assert what in answer["message"], answer
    assert "Traceback" not in answer["message"]


@pytest.mark.threat("code_or_method")
@pytest.mark.parametrize("form", [str, lambda name: {"name": name}], ids=["name", "mapping"])
def test_no_code_comes_in_with_an_option(form: Any, program: SiteProgram, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    for name in (f"{evil}:Y", "os:system"):
        for method, options in (("styles", {"method": form(name)}), ("fedavg", {"prepare": form(name)})):
            answer = request(program, setting={**SETTING, "method": {"name": method, "options": options}})
            assert "error" in answer, answer
    assert not (tmp_path / "ran").exists()


def test_requests_with_anything_in_them_never_crash_a_site(program: SiteProgram) -> None:
    draws = random.Random(1)
    strange = [None, -1, 0, 10**30, "", "x" * 500, [], {}, [[]], True, 1.5, "../..", {"a": None}]
    names = ["do", "run", "call", "key", "envelope", "memory", "kept", "checkpoint", "wire", "setting", "part"]
    for _ in range(300):
        request(program, **{draws.choice(names): draws.choice(strange)})
    later = {"exchange": 1, "round": 2, "progress": 0.0, "mini_batches_left": 5}
    assert "error" not in request(program, envelope=later)
    AuditLog.check(program.config.audit_log)


@pytest.mark.threat("changed_log")
def test_nothing_leaves_that_cannot_be_logged(program: SiteProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    answer = request(program)
    assert "nothing was sent" in answer["message"]
