"""Whose sums a site takes part in, for the life of its project, and the attacks on sums that differ by a few sites."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asked import SETTING
from federations import FOUR, call_request, deploy_secure, layout_of, secure_options, simulate_secure
from loopback import Loopback, losing
from outcomes import alike, audit, events, model, same
from site_yaml import edit
from test_private_sums import PRIVATE, federation_with_budget
from test_secure_deployments import FIVE, between
from test_secure_site import ENVELOPE, START, Coordinator

from fedshift.deploy.crypto.masked_sums import SecureSum
from fedshift.deploy.json_files import CARDS
from fedshift.deploy.remote.orders import order_in, revealed_of, upload_of
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.deploy.remote.wire import body_of
from fedshift.deploy.secure.site_sums import ROSTERS, Rosters
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.federation.secure.integer_sums import threshold
from fedshift.functional.fixed_point import from_fixed
from tried import slow_after

NAMES = sorted(FOUR)
TRAIN = {"north": 29, "south": 11, "east": 18, "up": 16}
"""Training samples of each site."""
WHOLE = {**SETTING, "training": {"batch_size": 4096}}
"""Every site trains on one mini-batch: all its samples."""


class Subtracting(Coordinator):
    """A coordinator that has sums of like models made, and computes with them."""

    def sum_of(self, names: Sequence[str], exchange: int, left: Mapping[str, int] | None = None, **changes: Any) -> Any:
        """The sum of these sites' contributions, as numbers; or the first refusal, a text."""
        envelopes = {
            name: {**ENVELOPE, "exchange": exchange, "mini_batches_left": (left or {}).get(name, 500)} for name in names
        }
        changes = {"setting": WHOLE, **changes}
        total: SecureSum | None = None
        length = 0
        for name in names:
            asked = {"names": names, "envelope": envelopes[name], "envelopes": envelopes, **changes}
            header, _ = self.to_mask(name, **asked)
            order = order_in(call_request(header), body_of({"weights": START}).sha256)[0]
            answer, content = self.ask(name, header, {"weights": START})
            if "error" in answer:
                return answer["message"]
            total, length = total or SecureSum(order), layout_of(answer).length
            total.add(name, upload_of(content, order, length)[0])
        assert total is not None
        told = {}
        for name in names:
            answer, content = self.unmask(name, total, total.answered)
            if "error" in answer:
                return answer["message"]
            told[name] = revealed_of(content, total.order, total.answered)
        return from_fixed(total.unmask_total(told)[1:])


@pytest.mark.threat("sum_changed_roster")
@pytest.mark.case("differences of sums", "a coordinator asks four sites, then three of them, with the same request")
@pytest.mark.parametrize("roster", ["any", "first"])
def test_the_difference_of_two_sums_is_a_model_where_the_sites_allow_it(roster: str, tmp_path: Path) -> None:
    """Before this rule: exact to the rounding of integers. With it the second sum is refused by each of the sites."""
    asking = Subtracting(tmp_path, roster=roster)
    whole = asking.sum_of(NAMES, 1)
    three = asking.sum_of([name for name in NAMES if name != "north"], 2)
    if roster == "first":
        assert "differs by north" in three
        for site in ("south", "east", "up"):
            lines = audit(asking.sites[site])
            assert site != "east" or "policy.roster" in lines[-1]["refused"]
        return
    gap = whole - three
    model = gap[2:] / gap[0]  # after the weight and the loss
    assert np.allclose(model, plain(tmp_path, "north", WHOLE), rtol=0, atol=4e-8)


def plain(folder: Path, site: str, setting: Mapping[str, Any], exchange: int = 1) -> Any:
    alone = Coordinator(folder / f"{site} alone {exchange}")
    envelope = {**ENVELOPE, "exchange": exchange}
    header, _ = alone.to_mask(site, setting=setting, envelope=envelope)
    del header["sum"]
    _, content = alone.ask(site, header, {"weights": START})
    weights: Any = content["weights"]
    return torch.cat([tensor.double().flatten() for tensor in weights.values()]).numpy()


@pytest.mark.slow
@pytest.mark.threat("sum_changed_roster")
@pytest.mark.case("differences of sums", "sums of all triples of four sites are solved by least squares")
@pytest.mark.parametrize("roster", ["any", "first"])
def test_sums_of_drawn_sites_are_equations_for_each_model(roster: str, tmp_path: Path) -> None:
    """As `protocol.sites_per_round` draws them; here the model does not change between rounds."""
    asking = Subtracting(tmp_path, roster=roster)
    triples = list(itertools.combinations(NAMES, 3))
    sums = [asking.sum_of(names, number) for number, names in enumerate(triples, 1)]
    if roster == "first":
        assert [isinstance(sum_or_text, str) for sum_or_text in sums] == [False, True, True, True]
        return
    matrix = np.array([[float(name in names) for name in NAMES] for names in triples])
    solved = np.linalg.lstsq(matrix, torch.stack(sums).numpy(), rcond=None)[0]
    for name, row in zip(NAMES, solved, strict=True):
        assert np.allclose(row[2:] / row[0], plain(tmp_path, name, WHOLE), rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.threat("sum_unequal_work")
def test_what_remains_settings_that_fit_one_site(tmp_path: Path) -> None:
    """With one set of sites, the coordinator still chooses how all of them train. Of 11, 16, 18 and 29 samples only the
    29 are two mini-batches of 20, so the sums with 20 and with 4096 differ by that site's second step, exactly. And two
    weightings of like models are two equations. Only noise, or a site's own rules on settings, end this.
    """
    asking, twenty = Subtracting(tmp_path), {**SETTING, "training": {"batch_size": 20}}
    whole_epochs, two = asking.sum_of(NAMES, 1, setting=WHOLE), asking.sum_of(NAMES, 2, setting=twenty)
    first, second = plain(tmp_path, "north", WHOLE, 1), plain(tmp_path, "north", twenty, 2)
    step = (two - whole_epochs)[2:] * 2**8 / 29
    assert np.allclose(step, second - first, rtol=0, atol=1e-7)
    assert step.abs().max() > 1e-3
    alike = asking.sum_of(NAMES, 3, setting=WHOLE, weighing=["uniform", 0, 4])
    without = (whole_epochs * 2**8 - 11 * alike)[2:]  # the site of 11 samples is in it no more
    others = [(samples - 11) * plain(tmp_path, name, WHOLE, 3) for name, samples in TRAIN.items()]
    assert np.allclose(without, sum(others), rtol=0, atol=1e-5)


@pytest.mark.case("differences of sums", "the second sum is asked for with as little noise as the coordinator likes")
def test_noise_that_the_coordinator_chooses_is_no_reason_for_other_sums(tmp_path: Path) -> None:
    asking = Subtracting(tmp_path)
    assert isinstance(asking.sum_of(NAMES, 1), torch.Tensor)
    privacy = {"clip_norm": 1.0, "noise_multiplier": 0.05}
    setting = {
        **SETTING,
        "training": {"privacy": privacy},
        "draws": {"south": {"stream": "", "noise_multiplier": 0.05}},
    }
    assert "policy.roster" in asking.sum_of(NAMES[1:], 2, setting=setting)


PAIRS = [
    ("one site more", NAMES, [*NAMES, "west"]),
    ("one site less", NAMES, NAMES[1:]),
    ("one in the place of another", NAMES, [*NAMES[:3], "west"]),
    ("two in the place of two", NAMES, [*NAMES[:2], "west", "x"]),
    ("three others", [*NAMES, "v"], ["a", "b", "c", *NAMES[:2]]),
    ("only itself in common", ["a", "b", "north"], ["c", "d", "north"]),
    ("a part of three", [*NAMES, "v", "w"], NAMES[1:]),
]


@pytest.mark.case("differences of sums", "a second set of sites: more, fewer, others, in either order")
@pytest.mark.parametrize(("before", "after"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_a_site_has_one_set_of_sites(before: list[str], after: list[str], tmp_path: Path) -> None:
    for number, (first, second) in enumerate([(before, after), (after, before)]):
        rosters = Rosters(tmp_path / str(number), "north", Policy())
        assert (rosters.note(sorted(first), "r"), rosters.note(sorted(first), "another run")) == (1, 1)
        with pytest.raises(Refused, match=r"policy\.roster"):
            rosters.note(sorted(second), "r")
        with pytest.raises(Refused, match=r"policy\.roster"):
            Rosters(tmp_path / str(number), "north", Policy()).check(sorted(second))
        assert Rosters(tmp_path / str(number), "north", Policy(roster="any")).note(sorted(second), "r") == 2
        agreed = Rosters(tmp_path / str(number), "north", Policy(roster=tuple(first)))
        assert agreed.check(sorted(first)) == 2
        with pytest.raises(Refused, match=r"policy\.roster"):
            agreed.check(sorted(second))


@pytest.mark.case("differences of sums", "a list of two sites, of one twice, and a word that is none")
@pytest.mark.parametrize("roster", [["a", "b"], ["a", "b", "b"], "last", []])
def test_a_rule_that_is_none_is_refused(roster: Any) -> None:
    with pytest.raises(ValueError, match="roster"):
        Policy(roster=roster)


@pytest.mark.threat("sum_lost_record")
def test_the_record_is_on_the_disk_before_anything_masked_leaves(tmp_path: Path) -> None:
    asking = Coordinator(tmp_path)
    config = asking.sites["north"].config
    assert "error" not in asking.mask("north")[0]
    (line,) = (config.memory / ROSTERS).read_text().splitlines()
    assert json.loads(line)["roster"] == NAMES
    lines, _ = AuditLog.check(config.audit_log)
    assert (lines[-1]["roster"], lines[-1]["rosters"]) == (NAMES, 1)
    asking.ask("north", {"do": "end"})  # the run is over, and the record stays
    asking.restart("north")
    answer, _ = asking.mask("north", names=NAMES[:3], run="another")
    assert "differs by up" in answer["message"]


@pytest.mark.slow
@pytest.mark.case(
    "kills", "a site dies after its record, its upload or its mark is written, and before its answer left"
)
@pytest.mark.parametrize(
    "dies_in",
    [
        ("fedshift.deploy.secure.site_sums", "flush_folder"),
        ("fedshift.deploy.crypto.masked_sums", "write_private"),
        ("fedshift.deploy.crypto.masked_sums", "write_bytes"),
        ("fedshift.deploy.crypto.masked_sums", "write_object"),
        ("fedshift.deploy.site_server", "keep_answer"),
        ("fedshift.deploy.site_server", "AuditLog.append"),
    ],
)
def test_a_site_killed_anywhere_goes_on(
    dies_in: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the write: the request comes again, the sum is whole, and the record has one line."""
    for number, after in enumerate((False, True), 1):
        asking = Subtracting(tmp_path / str(number))
        module, name = dies_in
        target = ".".join((module, name))
        genuine: Any = importlib.import_module(module)
        for part in name.split("."):
            genuine = getattr(genuine, part)

        def dying(*arguments: Any, after: bool = after, genuine: Any = genuine, **options: Any) -> None:
            if after:
                genuine(*arguments, **options)
            raise KeyboardInterrupt  # as a kill, nothing catches it

        with monkeypatch.context() as patch:
            patch.setattr(target, dying)
            with pytest.raises(KeyboardInterrupt):
                asking.mask("north", setting=WHOLE, weights=START)
        asking.restart("north")
        total = asking.sum_of(NAMES, 1)
        assert isinstance(total, torch.Tensor), total
        assert len((asking.sites["north"].config.memory / ROSTERS).read_text().splitlines()) == 1


@pytest.mark.threat("sum_lost_record")
@pytest.mark.case("records that are lost", "rosters.jsonl deleted, cut, changed; also under a running site")
@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("how", slow_after(1, ["deleted", "cut", "changed", "an older copy"]))
def test_a_record_that_is_lost_is_noticed(how: str, restarted: bool, tmp_path: Path) -> None:
    asking = Coordinator(tmp_path, roster="any")
    file = asking.sites["north"].config.memory / ROSTERS
    asking.mask("north", names=NAMES[:3])
    older = file.read_bytes()
    later = {**ENVELOPE, "exchange": 2}
    assert "error" not in asking.mask("north", envelope=later, envelopes=dict.fromkeys(FOUR, later))[0]
    whole = file.read_bytes()
    assert len(whole.splitlines()) == 2
    if how == "deleted":
        file.unlink()
    else:
        spoilt = {"cut": whole[:-1], "changed": whole.replace(b"east", b"west", 1), "an older copy": older}
        file.write_bytes(spoilt[how])
    if restarted:
        asking.restart("north")
    last = {**ENVELOPE, "exchange": 3}
    answer, _ = asking.mask("north", envelope=last, envelopes=dict.fromkeys(FOUR, last))
    assert "rosters.jsonl" in answer["message"], answer
    file.write_bytes(whole)
    assert "error" not in asking.mask("north", envelope=last, envelopes=dict.fromkeys(FOUR, last))[0]


@pytest.mark.threat("sum_unequal_work")
@pytest.mark.case("unequal work", "one site is let train 200 mini-batches and the others one each")
def test_no_site_of_a_sum_is_let_do_a_part_of_its_work(tmp_path: Path) -> None:
    """A site whose training is cut short refuses, so none can be made to outweigh the others."""
    asking = Subtracting(tmp_path)
    setting = {**SETTING, "method": {"name": "fedavg", "options": {"local_epochs": 50}}, "training": {"batch_size": 8}}
    refusal = asking.sum_of(NAMES, 1, {**dict.fromkeys(NAMES, 1), "north": 200}, setting=setting)
    assert "mini_batches_left" in refusal
    assert isinstance(asking.sum_of(NAMES, 2, setting=setting), torch.Tensor)  # sites of 12 to 29 samples, whole work


@pytest.mark.threat("sum_unequal_work")
@pytest.mark.case("unequal work", "the last mini-batch of one site is left out; a learning rate that falls for others")
def test_a_site_that_is_told_less_than_the_others_refuses(tmp_path: Path) -> None:
    asking = Subtracting(tmp_path)
    setting = {**SETTING, "training": {"batch_size": 8}}
    assert "mini_batches_left" in asking.sum_of(NAMES, 1, {"north": 3}, setting=setting)
    header, _ = asking.to_mask("north")
    header["sum"]["envelopes"] = {name: {**ENVELOPE, "progress": 0.999 * (name != "north")} for name in FOUR}
    assert "not asked for the same" in asking.ask("north", header, {"weights": START})[0]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"methods": [{"name": "fedavg"}, {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 2}]},
        {"methods": [{"name": "csac", "acquisition_steps": 3, "calibration_epochs": 1}, {"name": "scaffold"}]},
        {"methods": [{"name": "fedadg", "task_epochs": 1, "adversarial_epochs": 1}, {"name": "fedavg"}]},
        {"training": {"rounds": 3, "mini_batches": 17, "batch_size": 4, "lr": 0.1, "lr_schedule": "cosine"}},
        {"methods": [{"name": "fedavg", "exchanges_per_epoch": 2}], "training": {"rounds": 3, "batch_size": 8}},
        {"training": {"rounds": 2, "batch_size": 29, "lr": 0.1, "lr_step": "mini_batch", "lr_schedule": "linear"}},
    ],
)
def test_an_honest_run_with_unequal_sites_is_never_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Sites of 3 to 290 samples; budgets that are no whole number of rounds; and the bits of the local engine."""
    sites = {"north": 290, "south": 5, "east": 26, "up": 9}
    options = secure_options(**changes)
    there, transport = deploy_secure(tmp_path, options, sites)
    here = simulate_secure(tmp_path, options, sites)
    for method in options["methods"]:
        (name,) = (path.name for path in there.iterdir() if path.name.startswith(method["name"]))
        assert alike(here, there, name)
    for program in transport.programs.values():
        lines = audit(program)
        assert not [line for line in lines if "refused" in line or "failed" in line]


@pytest.mark.case("unequal work", "a budget of less than a whole round, or than what comes before the first")
@pytest.mark.parametrize("method", [{"name": "fedavg", "local_epochs": 5}, {"name": "csac"}])
def test_less_than_a_whole_round_is_refused_before_training(method: dict[str, Any], tmp_path: Path) -> None:
    options = secure_options(method, training={"rounds": 2, "mini_batches": 9, "batch_size": 4})
    with pytest.raises(UserError, match=r"training\.mini_batches.*less than one"):
        simulate_secure(tmp_path, options)


@pytest.mark.slow
def test_a_run_waits_for_a_site_that_is_lost_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    """With a quorum, too: no site is told of a sum without it, or the run could never go on."""
    options = secure_options()
    for lost in (("up", "call", 1), ("down", "call", 2)):
        transport = between(tmp_path, losing(lost), roster="first")
        with pytest.raises(FedshiftError, match=rf"'{lost[0]}' is not in the sum.*deploy resume"):
            deploy_secure(tmp_path, options, FIVE, transport=transport, engine={"quorum": 3})
        assert ("north", "confirm") not in transport.asked or lost[2] == 2
    transport = between(tmp_path, losing(("up", "confirm", 2), ("east", "unmask", 2)), roster="first")
    there, _ = deploy_secure(tmp_path, options, FIVE, transport=transport, engine={"quorum": 3})
    assert same(model(simulate_secure(tmp_path, options, FIVE), "fedavg", "west"), model(there, "fedavg", "west"))


def test_a_run_that_begins_without_a_site_is_not_begun(tmp_path: Path) -> None:
    """It would keep the others to sums without it."""
    transport = between(tmp_path, losing(("up", "key", 0)), roster="first")
    transport.change = lambda site, header, answer: losing(("up", "key", 0))(site, {**header, "round": 0}, answer)
    with pytest.raises(FedshiftError, match=r"'up' gives no key.*policy\.roster"):
        deploy_secure(tmp_path, secure_options(), FIVE, transport=transport, engine={"quorum": 3})
    assert not list(tmp_path.rglob(ROSTERS))


@pytest.mark.slow
@pytest.mark.case("revoked sites", "secure sums after a site has left whose sums the others were in")
def test_a_site_that_left_is_named_before_training_until_each_site_lists_the_new_set(tmp_path: Path) -> None:
    options = secure_options(protocol={"targets": ["sites"], "seeds": [0], "test_fraction": 0.3})
    _, before = deploy_secure(tmp_path, options, FOUR, unseen={}, roster="first")
    places = {name: program.config.path for name, program in before.programs.items()}
    three = {name: size for name, size in FOUR.items() if name != "up"}
    (tmp_path / "deployment" / CARDS).unlink()
    transport = Loopback({name: places[name] for name in three})
    with pytest.raises(UserError) as raised:
        deploy_secure(tmp_path, {**options, "name": "without"}, three, unseen={}, transport=transport)
    text = str(raised.value)
    assert all(f"site '{name}' takes part in sums of east, north, south, up only" in text for name in three)
    assert "policy.roster" in text
    assert {call for _, call in transport.asked} == {"hello"}, "nothing was trained"
    transport = Loopback({name: edit(places[name], "policy", roster=sorted(three)) for name in three})
    assert deploy_secure(tmp_path, {**options, "name": "without"}, three, unseen={}, transport=transport)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed")
def test_sites_that_train_with_noise_may_be_drawn_and_others_not(tmp_path: Path) -> None:
    """Noise of which the coordinator alone decides is no reason: a site needs a budget, which says how much it is."""
    options = secure_options(training={**PRIVATE, "rounds": 2})
    options["protocol"] |= {"sites_per_round": 3}
    with pytest.raises(UserError, match=r"sites_per_round: site '\w+' has no budget"):
        deploy_secure(tmp_path / "without", options, FOUR)
    _, transport = deploy_secure(tmp_path, options, FOUR, transport=federation_with_budget(tmp_path))
    rosters = set()
    for program in transport.programs.values():
        lines = audit(program)
        rosters |= {tuple(line["roster"]) for line in lines if "roster" in line}
        assert not (program.config.memory / ROSTERS).exists()
    assert ({len(roster) for roster in rosters}, len(rosters)) == ({3}, 2)


@pytest.mark.threat("sum_changed_roster")
def test_survivors_are_the_whole_roster(tmp_path: Path) -> None:
    """A coordinator that leaves out a site between the exchanges, by itself."""
    asking = Coordinator(tmp_path)
    total = asking.mask_all()
    for three in itertools.combinations(NAMES, 3):
        for site in three:
            assert "unmasks no sum without" in asking.unmask(site, total, list(three))[0]["message"]
    assert "error" not in asking.unmask("north", total, total.answered)[0]


@pytest.mark.slow
def test_targets_whose_sums_differ_are_refused_before_training(tmp_path: Path) -> None:
    """Leaving out one site after the other gives sums that differ by two; the start is the same for all."""
    options = secure_options(protocol={"targets": ["north", "south"], "seeds": [0], "test_fraction": 0.3})
    with pytest.raises(UserError, match=r"with and without 'north', 'south'.*name one target"):
        deploy_secure(tmp_path, options, FIVE)
    assert deploy_secure(tmp_path / "any", options, FIVE, roster="any")


@pytest.mark.threat("sum_threshold")
@pytest.mark.parametrize(
    ("sites", "colluders", "needed"),
    [(3, 0, 2), (4, 0, 3), (5, 0, 3), (6, 0, 4), (5, 1, 4), (4, 1, 3), (6, 2, 5), (10, 3, 7), (3, 2, 3)],
)
def test_how_many_sites_unmask(sites: int, colluders: int, needed: int) -> None:
    """⌈(H + c + 1) / 2⌉ by hand."""
    assert threshold(sites, colluders) == needed
    assert 2 * needed - sites > colluders
    assert 2 * (needed - 1) - sites <= colluders


@pytest.mark.threat("sum_threshold")
def test_sites_agree_on_how_many_unmask(tmp_path: Path) -> None:
    asking = Coordinator(tmp_path, colluders=2)
    header, order = asking.to_mask("north", threshold=4)
    fewer = call_request({**header, "sum": {**header["sum"], "threshold": 3}})
    other = order_in(fewer, body_of({"weights": START}).sha256)[0]
    assert order.binding != other.binding
    for wrong in (2, 3, 5, True, "4"):
        header["sum"]["threshold"] = wrong
        message = asking.ask("north", header, {"weights": START})[0]["message"]
        assert (
            "policy.colluders: 2" in message
            or "does not say what the sum is of" in message
            or "sum.threshold" in message
        )
    assert "error" not in asking.mask("north", threshold=4)[0]


@pytest.mark.slow
def test_a_run_asks_for_as_many_as_the_most_careful_site(tmp_path: Path) -> None:
    options, sites = secure_options(), FIVE
    transport = between(tmp_path, losing(("up", "call", 1), ("down", "call", 1)), colluders=1)
    with pytest.raises(FedshiftError, match="needs 4"):
        deploy_secure(tmp_path, options, sites, transport=transport, engine={"quorum": 3})
    there, _ = deploy_secure(tmp_path, options, sites, transport=between(tmp_path, losing(), colluders=1))
    assert same(model(simulate_secure(tmp_path, options, sites), "fedavg", "west"), model(there, "fedavg", "west"))
    with pytest.raises(UserError, match=r"policy\.colluders"):
        deploy_secure(tmp_path / "many", options, sites, colluders=5)


@pytest.mark.parametrize(("sites", "colluders", "warns"), slow_after(1, [(5, 0, True), (4, 0, False), (5, 1, False)]))
def test_an_odd_number_of_sites_is_said_to_be_weak(sites: int, colluders: int, warns: bool, tmp_path: Path) -> None:
    chosen = dict(list(FIVE.items())[:sites])
    options = secure_options(training={"rounds": 1})
    deploy_secure(tmp_path, options, chosen, roster="any", colluders=colluders)
    assert any("policy.colluders: 1" in str(event) for event in events(tmp_path)) == warns
