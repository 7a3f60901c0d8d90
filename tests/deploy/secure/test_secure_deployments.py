"""Secure aggregation in deployments: the bits of the local engine, whoever is lost, and nothing single leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import FOUR, deploy_secure, secure_options, simulate_secure, write_kits
from loopback import Change, Killed, Loopback, Without, killed_at, losing, through_deaths
from outcomes import alike, audit, events, model, result, rounds_of, same
from site_yaml import site_file, write_data

from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.secure.identity import Identity
from fedshift.deploy.site_server import open_site
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import Masked
from tried import slow_after

CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}
FIVE = {**FOUR, "down": 19}


def fingerprints(folder: Path, sites: list[str]) -> dict[str, str]:
    write_kits(folder, sites)
    return {site: Identity.of_kit(folder / site, site).fingerprint for site in sites}


@pytest.mark.parametrize("method", slow_after(1, [{}, CSAC]))
def test_same_bits_as_the_local_engine_and_nothing_single_leaves(method: dict[str, Any], tmp_path: Path) -> None:
    """BatchNorm's statistics and counters included."""
    options = secure_options(method, model={"name": "mlp", "hidden": [6], "batch_norm": True})
    peers = fingerprints(tmp_path, list(FOUR))
    send = ["masked", "numbers", "accuracy", "metrics"]
    there, transport = deploy_secure(tmp_path, options, secure="required", peers=peers, send=send)
    here = simulate_secure(tmp_path, options)
    name = options["methods"][0]["name"]
    assert alike(here, there, name)
    ours, theirs = result(here, name, "west"), result(there, name, "west")
    assert (ours["selected"], set(theirs["bytes_up"])) == (theirs["selected"], {"masked", "accuracy"})
    sums, sites = transport.asked.count(("north", "unmask")), len(FOUR)
    shares = 33 * sites * sites + 28 * sites + 32 * sites + 33 * sites  # sealed, commitments, and what is revealed
    shares += 32 * (sites - 1)  # codes that confirm who answered
    assert theirs["bytes_up"]["masked"] - ours["bytes_up"]["masked"] == sums * sites * shares
    lines = audit(transport.programs["north"])
    sent = {piece["kind"] for line in lines for piece in line.get("sent", {}).values() if line["do"] != "measure"}
    assert sent == {"numbers", "masked"}
    assert {"key", "confirm", "unmask"} <= {line["do"] for line in lines}
    assert all(line["roster"] == sorted(FOUR) for line in lines if line["do"] == "call")
    memory = transport.programs["north"].config.memory
    assert not [path for path in memory.rglob("*") if "upload" in path.name or path.name == "key"]
    assert not list((there / name / "west" / "seed-0").glob("memory/**/*"))


def test_sums_of_drawn_sites_are_refused_before_training(tmp_path: Path) -> None:
    """Their differences show single models. With noise of a site's own budget they may; without a budget it refuses."""
    options = secure_options()
    options["protocol"] |= {"sites_per_round": 3}
    for carry_out in (deploy_secure, simulate_secure):
        with pytest.raises(UserError, match=r"sites_per_round.*leave it out, or write training\.privacy"):
            carry_out(tmp_path, options, FIVE)


def between(folder: Path, change: Change, sites: dict[str, int] = FIVE, **policy: Any) -> Loopback:
    """Sites in this process, which also take part in sums of some of them, and somebody between them and the
    coordinator."""
    write_kits(folder, list(sites))
    files, policy = write_data(folder / "data", sites), {"roster": "any", **policy}
    return Loopback({name: site_file(folder, name, files[name], **policy) for name in sites}, change)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_sites_are_lost_between_the_exchanges(wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a rounded wire, where a site that was away has not seen what was rounded before."""
    options = secure_options()
    transport = between(tmp_path, losing(("up", "call", 1), ("down", "unmask", 1), ("east", "confirm", 2)))
    there, _ = deploy_secure(tmp_path, options, FIVE, transport=transport, engine={"quorum": 4, "wire": wire})
    records = rounds_of(there)
    assert [list(record["extra"].get("missing", {})) for record in records[-2:]] == [["up"], []]
    monkeypatch.setattr(Without, "absent", {("up", 1)})
    monkeypatch.setattr("fedshift.experiment.runs.round_loop.LocalFederation", Without)
    here = simulate_secure(tmp_path, options, FIVE)
    ours, theirs = model(here, "fedavg", "west"), model(there, "fedavg", "west")
    if wire == "float32":
        assert same(ours, theirs)
    else:
        assert not same(ours, theirs)
        assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 0.02
        down = [result(run, "fedavg", "west")["bytes_down"]["weights"] for run in (here, there)]
        assert down[1] < 0.55 * down[0]


@pytest.mark.slow
def test_killed_between_exchanges_the_bits_are_equal(tmp_path: Path) -> None:
    """Coordinator and sites begin anew each time: from nothing, and from a checkpoint."""
    options = secure_options(CSAC)
    moments = [("north", "confirm", 0), ("up", "call", 1), ("east", "unmask", 1), ("up", "confirm", 2)]
    change = killed_at(*moments)
    (there, transport), deaths = through_deaths(
        lambda: deploy_secure(tmp_path, options, transport=between(tmp_path, change, FOUR, roster="first"))
    )
    assert deaths == len(moments)
    here = simulate_secure(tmp_path, options)
    assert alike(here, there, "csac")
    lines = audit(transport.programs["north"])
    assert sum(bool(line.get("again")) for line in lines) >= deaths, "answers that were kept are given again"


@pytest.mark.slow
def test_a_site_that_is_back_after_the_others_told_their_shares_is_in_no_sum(tmp_path: Path) -> None:
    options = secure_options()

    def once(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        killing = killed_at(("down", "unmask", 1))
        return killing(site, header, losing(("up", "call", 1))(site, header, answer))

    quorum = {"quorum": 4}
    with pytest.raises(Killed):
        deploy_secure(tmp_path, options, FIVE, transport=between(tmp_path, once), engine=quorum)
    there, _ = deploy_secure(tmp_path, options, FIVE, transport=between(tmp_path, losing()), engine=quorum)
    record = rounds_of(there)[-2]
    assert "before others were told" in record["extra"]["missing"]["up"]
    other = tmp_path / "other"
    through, _ = deploy_secure(other, options, FIVE, transport=between(other, losing(("up", "call", 1))), engine=quorum)
    assert alike(through, there)


@pytest.mark.slow
@pytest.mark.parametrize("do", ["confirm", "unmask"])
def test_too_few_in_the_second_exchange_end_the_run_which_goes_on_later(do: str, tmp_path: Path) -> None:
    options, away = secure_options(), [(site, do, 1) for site in ("up", "down", "east")]
    with pytest.raises(FedshiftError, match=r"needs 3 of 5 sites.*site 'down': it is away"):
        deploy_secure(tmp_path, options, FIVE, transport=between(tmp_path, losing(*away)))
    # A site of the sum that is away now, too, is waited for by name.
    gone = losing(("north", "call", 1))
    with pytest.raises(FedshiftError, match="'north' is in the sum"):
        deploy_secure(tmp_path, options, FIVE, transport=between(tmp_path, gone), engine={"quorum": 4})
    there, _ = deploy_secure(tmp_path, options, FIVE, transport=between(tmp_path, losing()))
    here = simulate_secure(tmp_path, options, FIVE)
    assert alike(here, there)


def rewritten(answer: Message, changes: dict[str, Any], **tensors: Any) -> Message:
    header, content, _ = unseal(answer)
    field = next(iter(content), None)
    if tensors and field is not None:
        content = {field: Masked({**content[field], **tensors})}
    return seal({**header, **changes}, body_of(content))


LAYOUT = [["loss"], [["weights", "weights", "w", "torch.float32", [7]]]]


@pytest.mark.threat("sum_wrong_shares")
@pytest.mark.parametrize(
    ("do", "spoil"),
    slow_after(
        4,
        [
            ("call", lambda answer: rewritten(answer, {"layout": None})),
            ("call", lambda answer: rewritten(answer, {"layout": LAYOUT})),
            ("call", lambda answer: rewritten(answer, {"layout": LAYOUT}, sum=torch.zeros(10, dtype=torch.int64))),
            ("call", lambda answer: rewritten(answer, {}, sum=torch.zeros(3))),
            ("call", lambda answer: rewritten(answer, {}, sealed=torch.zeros(1, dtype=torch.uint8))),
            ("call", lambda answer: seal(json.loads(answer.header), body_of({}))),
            ("call", lambda answer: rewritten(answer, {"mini_batches": 10**6})),
            ("confirm", lambda answer: rewritten(answer, {}, north=torch.ones(32, dtype=torch.uint8))),
            ("confirm", lambda answer: rewritten(answer, {}, north=torch.ones(31, dtype=torch.uint8))),
            ("confirm", lambda answer: seal(json.loads(answer.header), body_of({}))),
            ("unmask", lambda answer: rewritten(answer, {}, own=torch.ones(5, 33, dtype=torch.uint8))),
            ("unmask", lambda answer: rewritten(answer, {}, own=torch.ones(5, 33))),
            ("unmask", lambda answer: seal(json.loads(answer.header), body_of({}))),
            ("key", lambda answer: rewritten(answer, {"card": "none"})),
        ],
    ),
)
def test_garbage_costs_at_most_its_site(do: str, spoil: Callable[[Message], Message], tmp_path: Path) -> None:
    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        return spoil(answer) if site == "east" and header["do"] == do and isinstance(answer, Message) else answer

    options = secure_options(training={"rounds": 1}, model={"name": "linear"})
    transport = between(tmp_path, change)
    there, _ = deploy_secure(tmp_path, options, FIVE, transport=transport, engine={"quorum": 4})
    missing = rounds_of(there)[-1]["extra"]
    assert list(missing.get("missing", {})) == ([] if do in ("confirm", "unmask") else ["east"])


def test_a_site_that_refuses_is_left_out_and_no_other(tmp_path: Path) -> None:
    options = secure_options()
    transport = between(tmp_path, losing(), FOUR)
    engine = {"quorum": 3, "on_refusal": "leave_out"}
    site_yaml = site_file(tmp_path, "up", str(tmp_path / "data/up.npz"), send=["numbers", "accuracy", "metrics"])
    transport = Loopback(
        {**{name: program.config.path for name, program in transport.programs.items()}, "up": site_yaml}
    )
    with pytest.raises(UserError, match=r"'up' refuses to send masked.*policy.send"):
        deploy_secure(tmp_path, options, transport=transport, engine={"quorum": 3})
    there, _ = deploy_secure(tmp_path / "again", options, transport=transport, engine=engine)
    here = simulate_secure(tmp_path, options, **engine, refuse_at={"up": ["weights"]})
    assert alike(here, there)
    assert ("up", "unmask") not in transport.asked


def test_where_models_leave_masked_a_plain_run_is_refused_before_it_trains(tmp_path: Path) -> None:
    plain = {"aggregation": "plain"}
    with pytest.raises(UserError, match=r"'north' sends a model only masked.*policy.secure: required"):
        deploy_secure(tmp_path, secure_options(), engine=plain, secure="required")
    other = tmp_path / "left out"
    transport = between(other, losing(), FOUR)
    transport.programs["up"] = open_site(site_file(other, "up", str(other / "data/up.npz"), secure="required"))
    there, _ = deploy_secure(
        other, secure_options(), transport=transport, engine={**plain, "on_refusal": "leave_out", "quorum": 3}
    )
    record = rounds_of(there)[-1]
    assert list(record["extra"]["refused"]) == ["up"]
    assert any("'up' sends models only masked" in str(event) for event in events(other))


def test_a_run_of_fewer_sites_than_a_site_wants_is_refused_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"at least 5 sites.*only 4 train"):
        deploy_secure(tmp_path, secure_options(), smallest_sum=5)


def test_a_site_that_lost_its_key_is_lost_until_the_run_ends(tmp_path: Path) -> None:
    transport = between(tmp_path, losing())

    def forget(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if (site, header["do"], header.get("round")) == ("north", "unmask", 1):
            for key in transport.programs["up"].config.memory.glob("*/sums/key"):
                key.unlink()
        return answer

    transport.change = forget
    there, _ = deploy_secure(tmp_path, secure_options(), FIVE, transport=transport, engine={"quorum": 4})
    records = rounds_of(there)
    assert "another key than before" in records[-1]["extra"]["missing"]["up"]
