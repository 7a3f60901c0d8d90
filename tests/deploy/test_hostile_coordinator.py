"""A coordinator that asks a site for more than it may: what leaves is held to the site's policy whatever is asked."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from asked import SETTING, full_answer, part_of, request
from outcomes import audit
from safetensors.torch import save_file
from site_yaml import SITES, site_file, write_data

from fedshift.deploy.agreed_terms import AgreedTerms
from fedshift.deploy.audit.crafted import LAYOUTS, Layout, craft, read_off, samples_read
from fedshift.deploy.cli.site import agree_site
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.deploy.remote.requests import PROTOCOL, SeedSplit
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram, open_site
from fedshift.errors import Refused, UserError
from fedshift.evaluation.metrics import counts_by_class
from fedshift.models import registry as models
from fedshift.weights import Weights
from tried import slow_after

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
    lines = audit(again)
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
    lines = audit(program)
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
    file.write_text("age,ill\n" + "".join(f"{40 + row},{'ny'[row % 2]}\n" for row in range(20)))
    data = {"name": "table", "sites": {"north": str(file)}, "label": "ill", "numeric": ["age"]}
    program = open_site(site_file(tmp_path, "north", data, sections={"classes": ["n", "y"]}))
    file.write_text(file.read_text().replace("41,", "Jane Doe,"))
    answer = request(program)
    assert ("error" in answer, "Jane Doe" in json.dumps(answer)) == (True, False)
    lines = audit(program)
    assert "Jane Doe" in lines[-1]["failed"]


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
    assert ([pair is not None for pair in pairs], json.loads(json.dumps(pairs))) == (shown, pairs)
    assert pairs[0] in (None, [counts[0], counts[0]])


@pytest.fixture
def program(tmp_path: Path) -> SiteProgram:
    files = write_data(tmp_path / "data", SITES)
    return SiteProgram(load_site(site_file(tmp_path, "north", files["north"])))


@pytest.mark.threat("code_or_method", "kept_kind", "files_and_errors", "wrong_key")
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
        ({"key": "a" * 64}, "key"),
        ({"setting": {**SETTING, "classes": 300}}, "classes"),
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
    program.config.memory.joinpath("agreed.json").write_text('{"models": 3}')
    assert "agreed.json" in request(program)["message"]


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


WIDTH = 8
WIDE = {"name": "mlp", "hidden": [1500]}
WIDE_INPUT = 4096
ALL_AT_ONCE = {"batch_size": 100_000, "lr": 1.0, "momentum": 0.0}


def site(tmp_path: Path, samples: int, **policy: Any) -> SiteProgram:
    """A site of noise under the default policy, but for what ``policy`` says."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(5)
    file = tmp_path / "data.npz"
    np.savez(file, x=draws.normal(size=(samples, WIDTH)).astype(np.float32), y=np.arange(samples) % 3)
    site_yaml = tmp_path / "SITE.yaml"
    data = {"name": "arrays", "sites": {"north": str(file)}}
    rules = {"policy": policy} if policy else {}
    site_yaml.write_text(
        yaml.safe_dump({"site": "north", "data": data, "classes": ["0", "1", "2"], "device": "cpu", **rules})
    )
    return SiteProgram(load_site(site_yaml))


def ask_with(
    program: SiteProgram, weights: Weights, network: Mapping[str, Any], exchange: int = 1, **training: Any
) -> tuple[dict[str, Any], Weights | None]:
    """What FedAvg's call answers to these weights: the header, and the model if there is one."""
    answer, content = full_answer(
        program,
        weights,
        "curious",
        envelope={"exchange": exchange, "round": exchange, "progress": 0.0, "mini_batches_left": 10**6},
        setting={**SETTING, "network": dict(network), "input_shape": [WIDTH], "training": {**ALL_AT_ONCE, **training}},
    )
    model = content.get("weights")
    return answer, model if isinstance(model, Weights) else None


def rows_of(program: SiteProgram) -> torch.Tensor:
    train, _ = program._rows(SeedSplit(test_fraction=0.3, split="auto", seed=0))
    return torch.from_numpy(np.asarray(program.holding.domain.inputs)[train])


def attack(program: SiteProgram, network: Mapping[str, Any], layout: Layout, **training: Any) -> tuple[int, int, str]:
    """(rows read, rows of the site, the refusal if there was one)."""
    rows = rows_of(program)
    built = models.build(models.parse(network), (WIDTH,), 3, 0)
    like = torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(1))  # the attacker knows mean and deviation
    crafted = craft(built, like, len(rows), layout, torch.Generator().manual_seed(2))
    answer, after = ask_with(program, crafted, network, **training)
    read = 0 if after is None else samples_read(read_off(built, crafted, after, layout), rows)
    return read, len(rows), str(answer.get("message", ""))


@pytest.mark.threat("crafted_network")
@pytest.mark.parametrize("samples", slow_after(1, [60, 300]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_crafted_network_reads_a_site_and_is_refused(layout: Layout, samples: int, tmp_path: Path) -> None:
    """Where the check is off, the attack gets most rows: so the check is what stops it."""
    read, rows, refused = attack(site(tmp_path / "off", samples, exposure=1), WIDE, layout)
    assert not refused
    assert read > 0.3 * rows
    read, rows, refused = attack(site(tmp_path / "default", samples), WIDE, layout)
    assert read == 0
    assert "policy.exposure" in refused


def test_a_plain_round_of_the_same_site_is_answered(tmp_path: Path) -> None:
    program = site(tmp_path, 60)
    plain = models.build(models.parse({"name": "mlp"}), (WIDTH,), 3, 0)
    answer, after = ask_with(program, weights_of(plain), {"name": "mlp"}, batch_size=32, lr=0.1)
    assert after is not None, answer
    line = json.loads(program.config.audit_log.read_text().splitlines()[-1])
    assert 0 < line["exposure"] < program.policy.exposure_limit(42)


def weights_of(network: torch.nn.Module) -> Weights:
    return Weights({name: tensor.contiguous() for name, tensor in network.state_dict().items()})


def test_what_a_refused_call_made_is_not_kept(tmp_path: Path) -> None:
    """Neither is it sent when the same request comes again, nor does the network count as agreed to."""
    program = site(tmp_path, 60)
    _, _, first = attack(program, WIDE, "bins")
    _, _, again = attack(program, WIDE, "bins")
    assert "policy.exposure" in first
    assert "policy.exposure" in again
    assert not list(program.config.memory.glob("r/answer-*"))
    assert program.terms.in_force().models == ()
    assert "exposure" not in first.partition("policy.exposure")[0]
    line = json.loads(program.config.audit_log.read_text().splitlines()[-1])
    assert line["exposure"] > program.policy.exposure  # for the site's eyes
    assert str(line["exposure"]) not in again


@pytest.mark.threat("crafted_network")
def test_what_remains_a_few_rows(tmp_path: Path) -> None:
    """A unit that reacts to a single row shows it. In honest training, too, a few rows stand alone."""
    program = site(tmp_path, 300)
    rows = rows_of(program)
    built = models.build(models.parse({"name": "mlp", "hidden": [4]}), (WIDTH,), 3, 0)
    crafted = craft(built, rows, len(rows), "traps", torch.Generator().manual_seed(2))
    answer, after = ask_with(program, crafted, {"name": "mlp", "hidden": [4]})
    assert after is not None, answer
    assert samples_read(read_off(built, crafted, after, "traps"), rows) > 0


@pytest.mark.threat("crafted_network")
def test_what_remains_a_coordinator_that_aims_below_the_limit(tmp_path: Path) -> None:
    """Narrow bins for a part of the rows, wide ones for the rest: the docs say so."""
    program = site(tmp_path, 300)
    rows = rows_of(program)
    built = models.build(models.parse(WIDE), (WIDTH,), 3, 0)
    like = torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(1))
    crafted = craft(built, like, len(rows), "bins", torch.Generator().manual_seed(2))
    name = "features.hidden1.0"
    measured = like @ crafted[f"{name}.weight"][0]
    wide, narrow = torch.linspace(0.02, 0.8, 12), torch.linspace(0.802, 0.9999, 1488)
    crafted[f"{name}.bias"].copy_(-measured.quantile(torch.cat([wide, narrow])))
    answer, after = ask_with(program, crafted, WIDE)
    assert after is not None, answer
    assert 0.1 * len(rows) < samples_read(read_off(built, crafted, after, "bins"), rows) < 0.4 * len(rows)


HEADS: tuple[dict[str, Any], ...] = ({"name": "linear"}, {"name": "mlp", "hidden": [4]})


@pytest.mark.threat("other_terms")
def test_another_network_is_refused_until_the_site_agrees(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    assert "error" not in request(program)
    other = {**SETTING, "network": HEADS[1]}
    for do in ("call", "measure"):
        assert "policy.models" in request(program, do=do, round=1, setting=other)["message"]
    (waiting,) = program.terms.requests()
    assert ([term["hidden"] for term in waiting.lacks.models], waiting.times) == ([[4]], 2)
    assert (waiting.coordinator, waiting.run) == ("someone", "r")
    assert "error" not in request(program)  # the first one still works
    agree_site(program.config.path, yes=True)
    assert "policy.models" not in request(program, setting=other)["message"]  # its weights are those of another network
    assert program.terms.requests() == ()
    assert "policy.models" not in request(open_site(program.config.path), setting=other)["message"]


def test_a_person_agrees_to_nothing_that_came_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that asks again and again would otherwise find the moment of the question."""
    program = program_of(tmp_path)
    assert "error" not in request(program)
    wide = {"name": "mlp", "hidden": [999]}
    request(program, setting={**SETTING, "network": HEADS[1]})

    def while_asked(question: str, **_: Any) -> str:
        assert "policy.models" in request(program, setting={**SETTING, "network": wide})["message"]
        return "a"

    monkeypatch.setattr("typer.prompt", while_asked)
    agree_site(program.config.path)
    assert [term.get("hidden") for term in program.terms.in_force().models][1:] == [[4]]
    assert [term["hidden"] for asks in program.terms.requests() for term in asks.lacks.models] == [[999]]


def test_terms_that_several_processes_write_are_all_kept(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    assert "error" not in request(program)

    def ask(part: int) -> None:
        terms = AgreedTerms(program.config.memory, program.name, program.policy)
        for width in range(part, 20, 4):
            with contextlib.suppress(Refused):
                terms.check(network=models.parse({"name": "mlp", "hidden": [width + 1]}), agree=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    waiting = program.terms.requests()
    assert sorted(waiting_request.lacks.models[0]["hidden"] for waiting_request in waiting) == [
        [width + 1] for width in range(20)
    ]
    assert len({waiting_request.number for waiting_request in waiting}) == 20


def test_networks_that_the_site_file_lists(tmp_path: Path) -> None:
    program = program_of(tmp_path, models=[HEADS[1]])
    assert "policy.models" in request(program)["message"]
    assert program.terms.requests() == ()  # the file decides
    assert "error" not in request(program_of(tmp_path, models=list(HEADS)))
    assert "error" not in request(program_of(tmp_path, models="all"))
    with pytest.raises(UserError, match="policy"):
        program_of(tmp_path, models=[{"name": "mpl"}])


@pytest.mark.threat("other_terms")
def test_other_splits_are_refused_until_the_site_agrees(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    many = request(program, do="hello", **hello(seeds=list(range(6))))
    assert "policy.splits: 5" in many["message"]
    assert program.terms.in_force().splits == ()
    program = program_of(tmp_path / "fresh")
    assert "error" not in request(program, do="hello", **hello(seeds=[0, 1]))
    part = part_of(program)
    for change in ({"seed": 2}, {"test_fraction": 0.29}):
        for do in ("call", "measure"):
            other = {**part, "split": {**part["split"], **change}}
            assert "policy.splits" in request(program, do=do, round=1, part=other)["message"]
    assert "policy.splits" in request(program, do="hello", **hello(seeds=[0, 2]))["message"]
    for seed in (0, 1):
        chosen = {**part, "split": {**part["split"], "seed": seed}}
        assert "error" not in request(program, do="measure", round=1, part=chosen)
    agree_site(program.config.path, yes=True)
    assert "error" not in request(program, do="hello", **hello(seeds=[0, 2]))
    assert "error" not in request(program_of(tmp_path / "five"), do="hello", **hello(seeds=list(range(5))))
    free = program_of(tmp_path / "free", splits="all")
    assert "error" not in request(free, do="hello", **hello(seeds=list(range(20))))


@pytest.mark.threat("other_terms")
def test_measurements_of_a_day_are_counted(tmp_path: Path) -> None:
    """By themselves: several models may be measured in one round."""
    program = program_of(tmp_path, measurements_per_day=3)
    answers = [request(program, do="measure", round=1) for _ in range(4)]
    assert ["error" in answer for answer in answers] == [False, False, False, True]
    assert "policy.measurements_per_day: 3" in answers[-1]["message"]
    assert "error" not in request(program)  # training goes on
    again = open_site(program.config.path)
    assert "policy.measurements_per_day" in request(again, do="measure", round=2)["message"]


def test_the_defaults_limit_a_day() -> None:
    rule = Policy()
    assert rule.rounds_per_day is not None
    assert rule.measurements_per_day is not None
    assert (rule.models, rule.splits) == ("first", 5)
    assert 0 < rule.exposure_limit(10) <= 0.8


def test_a_wide_layer_is_read_as_a_linear_one() -> None:
    """A unit's weights moved by a sample times what its bias moved by; a wide layer keeps them transposed."""
    network = models.build(models.parse({"name": "mlp", "hidden": [3]}), (WIDE_INPUT,), 3, 0)
    before = weights_of(network)
    sample, moved = torch.linspace(-1, 1, WIDE_INPUT), torch.tensor([0.5, -1.0, 2.0])
    name = next(name for name, tensor in before.items() if tuple(tensor.shape) == (WIDE_INPUT, 3))
    after = {**before, name: before[name] - sample[:, None] * moved}
    bias = name.replace("weight", "bias")
    shown = read_off(network, before, Weights({**after, bias: before[bias] - moved}), "traps")
    torch.testing.assert_close(shown, sample.expand(3, -1), rtol=1e-4, atol=1e-5)
