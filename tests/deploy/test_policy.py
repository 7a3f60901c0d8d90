"""A site's policy by itself: how long rounds count, and that what a reply really holds is looked at."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import SETTING, request
from loopback import Loopback, deploy, options_of
from outcomes import audit
from site_yaml import edit, site_file, site_files
from test_hostile_coordinator import ENVELOPE, hello, program_of

from fedshift.deploy.privacy.table_view import few_samples, leaving, of_many_rows
from fedshift.deploy.remote import policy as policies
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.deploy.remote.requests import PROTOCOL, request_key
from fedshift.deploy.remote.wire import body_of, seal, unseal
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.deploy.site_server import open_site
from fedshift.errors import FedshiftError, KindRefused, Refused, UserError
from fedshift.federation.messages import Features, Update
from fedshift.federation.site import Site
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights

HOUR = 3600


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the log sees; its one entry may be changed."""
    now = [1_000_000.0]
    monkeypatch.setattr(policies.time, "time", lambda: now[0])
    return now


@pytest.mark.threat("again_and_again")
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        # Two rounds a day, done at 0 h and 10 h: a third may begin at 24 h and a bit, and a fourth at 34 h.
        ({"rounds_per_day": 2}, [(0, 1), (10, 2), (23.9, 3, False), (24.1, 3), (25, 4, False), (34.1, 4)]),
        # A round counts from its first request on.
        ({"rounds_per_day": 1}, [(0, 1), (20, 1), (23, 2, False), (24.1, 2)]),
        # A number of a day is not that of another run.
        ({"rounds_per_day": 2}, [(0, 1, True, "one"), (0, 1, True, "two"), (0, 1, False, "three")]),
        # Requests of a round that is counted already are no further rounds, up to their own limit.
        (
            {"rounds_per_day": 1, "requests_per_round": 3},
            [(0, 1), (0, 1), (0, 1), (0, 1, False), (0, 1, False, "other")],
        ),
    ],
)
def test_rounds_count_for_a_day(limits: Any, asked: Any, clock: list[float], reopened: bool, tmp_path: Path) -> None:
    """``asked``: the hour, the round, whether it is allowed, the run."""
    rule, log, begun = Policy(**limits), AuditLog(tmp_path / "audit.jsonl"), clock[0]
    for hours, number, *rest in asked:
        allowed, run = (*rest, "run") if len(rest) == 1 else rest or (True, "run")
        clock[0] = begun + hours * HOUR
        log = AuditLog(tmp_path / "audit.jsonl") if reopened else log
        if not allowed:
            with pytest.raises(Refused, match=r"rounds_per_day|requests_per_round"):
                log.check_rate("north", rule, run, number)
            continue
        log.check_rate("north", rule, run, number)
        log.append(do="call", run=run, round=number)


def test_what_does_not_work_counts_for_nothing(clock: list[float], tmp_path: Path) -> None:
    """Greetings, refusals and answers that are sent again use no round up; a call of version 1, a ``step``, does."""
    rule, log = Policy(rounds_per_day=1), AuditLog(tmp_path / "audit.jsonl")
    log.append(do="hello", run="run", round=1)
    log.append(do="call", run="run", round=2, refused="no")
    log.append(do="call", run="run", round=3, again=True)
    log.check_rate("north", rule, "run", 4)
    log.append(do="step", step="fit", run="run", round=1)
    with pytest.raises(Refused, match="rounds_per_day"):
        AuditLog(tmp_path / "audit.jsonl").check_rate("north", rule, "run", 2)


@pytest.mark.threat("kept_kind")
def test_a_kind_that_no_field_promised_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that puts features where its reply type says weights is found out by what it sends."""

    def smuggle(self: FedAvg, site: Site, weights: Weights) -> Update:
        return Update(Features({"features": next(iter(site.batches())).inputs}), site.samples, 0.0)

    monkeypatch.setattr(FedAvg, "fit", smuggle)
    program = program_of(tmp_path)
    assert "refuses to send features" in request(program)["message"]
    last = audit(program)[-1]
    assert ("refused" in last, "sent" in last) == (True, False)
    allowed = program_of(tmp_path / "open", send=["weights", "numbers", "accuracy", "features"])
    assert "error" not in request(allowed)


@pytest.mark.threat("code_or_method")
def test_groups_and_methods() -> None:
    """Features are of single samples; means and models are held to the group. Methods go by name and by their kinds."""
    rule = Policy(smallest_group=5)
    rule.check_group("north", "features", 1, "a call")
    for kind in ("weights", "numbers", "accuracy", "statistics"):
        rule.check_group("north", kind, 5, "a call")
        with pytest.raises(Refused):
            rule.check_group("north", kind, 4, "a call")
    few = Policy(methods=("fedavg", "csac"), send=("weights", "numbers"))
    few.check_method("north", "fedavg", ("weights", "numbers"))
    with pytest.raises(Refused):
        few.check_method("north", "fedprox", ("weights", "numbers"))
    with pytest.raises(KindRefused):
        few.check_method("north", "csac", ("weights", "styles"))
    Policy().check_method("north", "anything", ("weights",))


@pytest.mark.parametrize(("group", "allowed"), [(16, True), (17, False)])
def test_how_many_samples_a_call_looked_at(group: int, allowed: bool, tmp_path: Path) -> None:
    """28 training samples (of 40, 30 % held out), batches of 8, two of them left: 16 are behind the model."""
    setting = {**SETTING, "training": {"batch_size": 8, "lr": 0.1}}
    envelope = {**ENVELOPE, "mini_batches_left": 2}
    answer = request(program_of(tmp_path, smallest_group=group), setting=setting, envelope=envelope)
    assert ("error" not in answer) is allowed, answer


@pytest.mark.parametrize(
    ("policy", "method", "rule"),
    [
        ({"methods": ["csac"]}, {"name": "fedavg"}, "policy.methods: csac"),
        ({"methods": ["styles"]}, {"name": "styles", "method": "fedavg"}, "policy.methods: styles"),
        ({"send": ["numbers", "accuracy"]}, {"name": "fedavg"}, "policy.send"),
        ({"send": ["weights", "numbers"]}, {"name": "fedavg"}, "policy.send"),
        ({"smallest_group": 20}, {"name": "fedavg"}, "policy.smallest_group: 20"),
        ({"rounds_per_day": 2}, {"name": "fedavg"}, "policy.rounds_per_day: 2"),
    ],
)
def test_a_refusal_names_its_rule(policy: dict[str, Any], method: dict[str, Any], rule: str, tmp_path: Path) -> None:
    places = site_files(tmp_path, send=["weights", "numbers", "accuracy", "styles"])
    edit(places["south"], "policy", **policy)
    with pytest.raises(UserError, match=rf"site 'south' .*\(rule {rule}"):
        deploy(tmp_path, options_of(method), transport=Loopback(places))
    log = audit(tmp_path / "south")
    assert rule in log[-1]["refused"]
    if "rounds_per_day" not in rule and policy.get("send") != ["weights", "numbers"]:
        assert not any(line["do"] == "call" for line in log), "before any training"


@pytest.mark.threat("changed_log")
def test_the_audit_log_is_a_chain(tmp_path: Path) -> None:
    deploy(tmp_path, options_of("fedavg"))
    log = tmp_path / "north/memory/audit.jsonl"
    lines, last = AuditLog.check(log)
    assert [line["do"] for line in lines] == ["hello", *["call", "measure"] * 3, "end"]
    first, sent = lines[1], lines[1]["sent"]["weights"]
    assert (first["method"], first["call"], first["sent"]["samples"]) == ("fedavg", "fit", {"kind": "numbers"})
    assert (sent["kind"], sent["shapes"]["classifier.bias"]) == ("weights", [3])
    assert first["sent_bytes"] > sent["bytes"]
    assert len(first["received_digest"]) == len(first["sent_digest"]) == len(last) == 64
    text = log.read_text()
    for spoiled in (
        text.replace('"call": "fit"', '"call": "fat"', 1),
        "\n".join([*text.splitlines()[:2], *text.splitlines()[3:]]) + "\n",
        text.replace("\n", "\n\n", 1),
    ):
        log.write_text(spoiled)
        with pytest.raises(FedshiftError, match=r"audit.jsonl, line \d+"):
            AuditLog.check(log)
    log.write_text(text + '{"half a li')  # the machine stopped while it was written
    assert AuditLog.check(log) == (lines, last)


@pytest.mark.parametrize(
    ("train", "held_out", "what"),
    [(9, 0, "training samples"), (50, 9, "held-out samples"), (50, 0, None), (10, 10, None)],
)
def test_counts_of_few_samples_do_not_leave(tmp_path: Path, train: int, held_out: int, what: str | None) -> None:
    program = program_of(tmp_path, smallest_group=10)
    if what is None:
        program._check_counts({"0": (train, held_out)})
    else:
        with pytest.raises(Refused, match=f"the count of its {what}: 9 ") as caught:
            program._check_counts({"0": (train, held_out)})
        assert "9" not in (caught.value.public or "")


ROWS = 60
FIELDS = {"label": "ill", "numeric": ["age"], "categorical": ["ward"]}


def site(folder: Path, wards: Sequence[str], ages: Sequence[Any], fields: Any = FIELDS, **policy: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{age},{ward},{row % 2},p{row}" for row, (age, ward) in enumerate(zip(ages, wards, strict=True))]
    write_rows(folder, ["age,ward,ill,who", *rows])
    policy = {"smallest_group": 10, "send": ["weights", "numbers", "accuracy", "statistics"], **policy}
    data = {"name": "table", "sites": {"north": str(folder / "t.csv")}, **fields}
    return site_file(folder, "north", data, sections={"classes": ["0", "1"]}, **policy)


def write_rows(folder: Path, lines: Sequence[str]) -> None:
    (folder / "t.csv").write_text("\n".join(lines) + "\n")


def relabelled(folder: Path, label: Callable[[int, str], str]) -> None:
    """Write other labels into the table."""
    head, *rows = (folder / "t.csv").read_text().splitlines()
    cells = [row.split(",") for row in rows]
    write_rows(folder, [head, *(",".join([a, w, label(number, y), p]) for number, (a, w, y, p) in enumerate(cells))])


def answer(file: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """What a site answers to a greeting, and its audit log."""
    program = open_site(file, in_service=True)
    body = body_of({})
    header = {"do": "hello", "protocol": PROTOCOL, "run": "r", **hello(**changes)}
    sent = program.handle(seal({"key": request_key(header, body.sha256), **header}, body), "someone")
    return unseal(sent)[0], program.config.audit_log.read_text()


def lines(file: Path) -> str:
    config = load_site(file)
    return "\n".join(leaving(of_many_rows(read_holding(config), config.file.policy), config.file.policy))


AGES = [float(50 + row % 7) for row in range(ROWS)]
WARDS = ["red"] * 30 + ["blue"] * 21 + ["hospice Doe"] * 9


@pytest.mark.threat("rare_categories")
@pytest.mark.case("few rows", "a category of 9 rows at a limit of 10; of 10 rows")
def test_a_category_of_few_rows_does_not_leave(tmp_path: Path) -> None:
    file = site(tmp_path, WARDS, AGES)
    card = answer(file)[0]["card"]
    assert card["given"]["categories"] == [["blue", "red"]]
    assert "Doe" not in json.dumps(card)
    assert card["shape"] == [3]  # age, blue, red
    output = lines(file)
    assert "categories of ward: blue, red" in output
    assert "1 categories of ward in fewer than 10 rows (9 rows)" in output
    assert "Doe" not in output
    ten = ["red"] * 31 + ["blue"] * 10 + ["green"] * 10 + ["hospice Doe"] * 9
    assert answer(site(tmp_path / "ten", ten, AGES))[0]["card"]["given"]["categories"] == [["blue", "green", "red"]]


@pytest.mark.case("few rows", "a card keeps the column that names rows, and its encoding fits its samples")
def test_rare_rows_are_encoded_as_unknown_ones(tmp_path: Path) -> None:
    config = load_site(site(tmp_path, WARDS, AGES, {**FIELDS, "id": "who"}))
    shown = of_many_rows(read_holding(config), config.file.policy)
    table = shown.data.preprocessing.table
    assert table is not None
    assert table["id"] == "who"
    inputs = np.asarray(shown.domain.inputs)
    assert inputs[:30, 2].tolist() == [1] * 30
    assert not inputs[51:, 1:].any()


@pytest.mark.case("few rows", "policy.rare_categories: refuse; counts at the site, none at the coordinator")
def test_a_site_can_refuse_rare_categories(tmp_path: Path) -> None:
    file = site(tmp_path, WARDS, AGES, rare_categories="refuse")
    told, log = answer(file)
    assert "categories of column 'ward' that are in few rows" in told["message"]
    assert "rare_categories" in told["message"]
    assert "rows: 9 (rule" in log
    assert "9" not in told["message"]
    assert "rows: 9 (rule" in lines(file)
    assert "Doe" not in told["message"] + log + lines(file)


@pytest.mark.case("few rows", "3 filled cells of a numeric column: refused with column, count and remedy")
@pytest.mark.parametrize("rare", ["other", "refuse"])
def test_a_mean_of_few_cells_does_not_leave(tmp_path: Path, rare: str) -> None:
    file = site(tmp_path, ["red"] * ROWS, [*AGES[:3], *[""] * (ROWS - 3)], rare_categories=rare)
    told, log = answer(file)
    assert "so few samples of column 'age' (rule policy.smallest_group: 10): leave it out" in told["message"]
    assert "3 rows have a value" not in told["message"]
    assert "3 rows have a value" in log
    assert "3 rows have a value" in lines(file)


@pytest.mark.threat("rare_categories")
@pytest.mark.case("few rows", "3 missing cells: neither their number nor that there are any; mean and deviation stay")
def test_a_few_missing_cells_are_not_told(tmp_path: Path) -> None:
    ages = [*AGES[:-3], "", "", ""]
    file = site(tmp_path, ["red"] * ROWS, ages)
    given = answer(file)[0]["card"]["given"]
    assert (given["count"], given["any_missing"]) == ([ROWS], [False])
    mean = given["total"][0] / ROWS
    assert mean == pytest.approx(np.mean(AGES[:-3]))
    assert given["squares"][0] / ROWS - mean**2 == pytest.approx(np.var(AGES[:-3]))
    assert "stays here: that age is missing in 3 rows" in lines(file)
    many = answer(site(tmp_path / "many", ["red"] * ROWS, [*AGES[:-10], *[""] * 10]))[0]["card"]["given"]
    assert (many["count"], many["any_missing"]) == ([ROWS - 10], [True])


@pytest.mark.case("few rows", "two columns and the held-out part are too small: numbers at the site only")
def test_all_that_is_in_few_rows_is_one_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wards = ["red"] * 14 + ["blue"] * 7
    ages = [*AGES[:3], *[""] * 18]
    file = site(tmp_path, wards, ages, rare_categories="refuse")
    told, _ = answer(file)
    printed = capsys.readouterr().out
    for part in ("column 'age'", "column 'ward'", "held-out samples", "protocol.test_fraction"):
        assert part in told["message"]
        assert part in printed
    for number in ("3 rows", "rows: 7", "held-out samples: 6"):
        assert number not in told["message"]
        assert number in printed
    assert printed.startswith("warning: ")
    assert printed.count("\n") == 1


@pytest.mark.case("few rows", "sites of 8, 15, 24, 40 and 60 samples at a limit of 10, held out by 0, 0.3 and 0.5")
@pytest.mark.parametrize("samples", [8, 15, 24, 40, 60])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_a_site_knows_what_it_will_refuse_for_its_size(samples: int, share: float, tmp_path: Path) -> None:
    """What `site check` says is what a greeting is answered."""
    file = site(tmp_path, ["red"] * samples, AGES[:samples])
    config = load_site(file)
    output = few_samples(read_holding(config).domain, config.file.policy)
    refused = "error" in answer(file, split={"test_fraction": share, "split": "auto"})[0]
    if output is None:
        assert not refused
    elif "no experiment" in output:
        assert refused
    elif "about" in output:
        low, high = (float(text) for text in re.findall(r"0\.\d\d", output))
        assert refused == (share != 0.0 and not low <= share <= high)
    else:
        assert "test_fraction: 0" in output
        assert refused == (share != 0.0)


@pytest.mark.case("few rows", "every category rare and no number: nothing to encode")
def test_nothing_is_left_to_encode(tmp_path: Path) -> None:
    fields = {**FIELDS, "numeric": []}
    told, _ = answer(site(tmp_path, [f"ward {row // 6}" for row in range(ROWS)], AGES, fields))
    assert "no category is in enough rows" in told["message"]


@pytest.mark.threat("rare_categories")
@pytest.mark.case("few rows", "numbers of patients under categorical of SITE.yaml, also those allowed deliberately")
def test_patients_do_not_leave_as_categories(tmp_path: Path) -> None:
    fields = {**FIELDS, "categorical": ["ward", "who"]}
    with pytest.raises(UserError, match="'who' has 60 different values in 60 rows"):
        read_holding(load_site(site(tmp_path, WARDS, AGES, fields)))
    card = answer(site(tmp_path / "b", WARDS, AGES, {**fields, "many_categories": ["who"]}))[0]["card"]
    assert card["given"]["categories"] == [["blue", "red"], []]
    assert "p17" not in json.dumps(card)


@pytest.mark.case("few rows", "site check: a kit's file without statistics under policy.send is told so")
def test_what_a_table_needs_is_foretold(tmp_path: Path) -> None:
    output = lines(site(tmp_path, ["red"] * ROWS, AGES, send=["weights", "numbers", "accuracy"]))
    assert "statistics under policy.send" in output
    assert "mean, deviation and number of values of age" in output


@pytest.mark.case("exports per site", "a site's card tells nothing of how its file is written")
def test_the_layout_of_a_file_does_not_leave(tmp_path: Path) -> None:
    fields = {
        **FIELDS,
        "id": "who",
        "rename": {"whom": "who", "years": "age"},
        "units": {"age": 0.5},
        "missing_values": {"age": 53},
        "encoding": "cp1252",
    }
    file = site(tmp_path, ["red"] * 30 + ["blue"] * 30, AGES, fields)
    (tmp_path / "t.csv").write_text((tmp_path / "t.csv").read_text().replace("age,ward,ill,who", "years,ward,ill,whom"))
    card = answer(file)[0]["card"]
    # The ages are 50 to 56 in turns; 53 means missing in 8 of 60 rows, fewer than the limit, which is not told.
    values = [age / 2 for age in AGES if age != 53]
    assert card["given"]["total"][0] / card["given"]["count"][0] == pytest.approx(np.mean(values))
    assert card["preprocessing"]["table"]["id"] == "who"
    told = json.dumps(card)
    assert not [word for word in ("years", "whom", "cp1252", "units", "rename", "26.5") if word in told]


@pytest.mark.threat("few_samples")
@pytest.mark.case("few rows", "the name of a patient in the column of classes; the same class, listed by a person")
@pytest.mark.case("few rows", "classes 0, 1, 2 of few rows tell nothing by their names")
def test_a_class_of_few_rows_that_nobody_listed_does_not_leave(tmp_path: Path) -> None:
    file = edit(site(tmp_path, ["red"] * ROWS, AGES), classes=None)
    relabelled(tmp_path, lambda number, label: "2" if number == 0 else label)
    assert answer(file)[0]["card"]["classes"] == ["0", "1", "2"]
    relabelled(tmp_path, lambda number, _: "Doe Jane" if number == 7 else ("no", "yes")[number % 2])
    refused, log = answer(file)
    assert refused["error"] == "Refused"
    assert "names of classes that are in few rows (rule policy.smallest_group: 10)" in refused["message"]
    assert "Doe" not in json.dumps(refused) + log + lines(file)
    assert "rows: 1" in lines(file)
    assert answer(edit(file, classes=["no", "yes", "Doe Jane"]))[0]["card"]["classes"] == ["no", "yes", "Doe Jane"]
    edit(edit(file, classes=None), "policy", smallest_group=1)
    assert "Doe Jane" in answer(file)[0]["card"]["classes"]
