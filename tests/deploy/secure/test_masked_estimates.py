"""Estimates at a site without labels, from masked sums and from counts with noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from asked import answer_to, forge
from federations import SECURE, write_kits
from loopback import Loopback, deploy
from outcomes import alike, audit, events
from site_yaml import edit, site_file
from test_fourth_site import LABELLED, OPTIONS, PROTOCOL, SEND, both, predicted, received, samples
from test_secure_deployments import fingerprints

from fedshift.deploy import estimates
from fedshift.deploy.crypto.masked_sums import KeyCard
from fedshift.deploy.privacy.ledger import LEDGER
from fedshift.deploy.remote.requests import EstimateRequest
from fedshift.deploy.remote.wire import body_of, seal, unseal
from fedshift.deploy.secure.site_sums import SiteEstimateSums
from fedshift.deploy.site_estimates import SiteEstimates
from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.input_sums import Moments
from fedshift.evaluation.estimate.pooled import first_part, moments_part
from fedshift.evaluation.estimate.sums import sums_of
from fedshift.functional.fixed_point import from_fixed, to_fixed
from fedshift.functional.noisy_scores import cells, nearest_counts, samples_of

FOUR = {"north": 90, "south": 80, "east": 100, "west": 85}
ESTIMATED = ("estimate", "low", "high", "unexplained", "far", "usual")


def federation(
    folder: Path,
    classes: int = 2,
    engine: Mapping[str, Any] | None = None,
    change: Any = None,
    site: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    send: Sequence[str] = SEND,
    shift: float = 0.0,
    keep: Sequence[str] = (),
    **policy: Any,
) -> tuple[dict[str, Any], Loopback]:
    """What the fifth site, without labels, estimates beside four.

    ``shift``: of its inputs, with as much noise. ``keep``: sites that send what `SEND` has, the others ``send``.
    """
    (folder / "data").mkdir(parents=True)
    places = {}
    for seed, (name, n) in enumerate({**FOUR, "va": 70}.items()):
        x, y = samples(seed, n)
        labels = {} if name == "va" else {"y": np.minimum(y, classes - 1)}
        if name == "va" and shift:
            x = (x + shift * np.random.default_rng(9).normal(size=x.shape) + shift).astype(np.float32)
        np.savez(folder / "data" / f"{name}.npz", x=x, **labels)
        sections = {"classes": [*"012"[:classes]], **({} if name == "va" else site or {})}
        file = str(folder / "data" / f"{name}.npz")
        rules = {"send": list(SEND if name in keep else send), "roster": "any", **policy}
        places[name] = site_file(folder, name, file, sections=sections, **rules)
    edit(places["va"], "data", site_labels={"va": "none"})
    write_kits(folder, list(places))
    options = {**OPTIONS, "training": {**OPTIONS["training"], "rounds": 1, **(training or {})}}
    transport = Loopback(places, change)
    deploy(folder, options, sites={**FOUR, "va": 70}, unseen={}, transport=transport, engine=dict(engine or {}))
    return received(folder), transport


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.threat("site_without_labels")
def test_masked_sums_give_the_plain_estimate(classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-5 points, since numbers are rounded to 2^-33; and of what one site adds no number is told."""
    added: list[torch.Tensor] = []
    numbers_of = SiteEstimateSums._numbers

    def known_numbers(*args: Any) -> torch.Tensor:
        added.append(numbers_of(*args))
        return added[-1]

    monkeypatch.setattr(SiteEstimateSums, "_numbers", known_numbers)
    uploads: list[tuple[str, int, Any]] = []

    def look(site: str, header: dict[str, Any], answer: Any) -> Any:
        answer_header, content, _ = unseal(answer)
        if header["do"] == "measure":
            assert answer_header["measures"].get("sums") is None
        if header["do"] == "mask":
            uploads.append((site, header["step"], content["sum"]["sum"]))
        return answer

    strict = {"secure": "required", "peers": fingerprints(tmp_path / "masked", [*FOUR, "va"])}
    trained = {"rounds": 3}
    masked, transport = federation(tmp_path / "masked", classes, SECURE, look, training=trained, **strict)
    plain, _ = federation(tmp_path / "plain", classes, training=trained)
    assert (masked["sites"], masked["samples"], masked["abstain"]) == (4, 70, plain["abstain"])
    for name in ESTIMATED:
        assert masked[name] == pytest.approx(plain[name], abs=1e-5)
    for name, measures in plain["measures"].items():
        assert (measures["estimate"] is None) == (classes > 2)
        assert masked["measures"][name] == pytest.approx(measures, abs=1e-5)
    assert any("no site's are known" in reason for reason in masked["reasons"])
    assert sorted((step, site) for site, step, _ in uploads) == [(s, site) for s in (1, 2, 3) for site in sorted(FOUR)]
    for (*_, upload), part in zip(uploads, added, strict=True):
        assert part[0] == 1
        assert not (upload == part).any()
    assert all(do != "reading" for _, do in transport.asked)
    lines = audit(tmp_path / "masked" / "north")
    kinds = {kind["kind"] for line in lines for kind in line.get("sent", {}).values()}
    assert "confidences" not in kinds
    assert "masked" in kinds
    scores = [line["step"] for line in lines if line["do"] == "mask"]
    assert scores == [1, 2, 3]
    assert [event["sites"] for event in events(tmp_path / "masked") if event.get("is") == "summed"] == [4]
    assert not list((tmp_path / "masked" / "north" / "memory").glob("*sums*")), "keys are forgotten when all is over"


@pytest.mark.slow
@pytest.mark.threat("site_without_labels")
def test_masked_sums_of_inputs_are_those_of_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target compares its samples with the sum of all; of distances it learns mean and deviation."""
    requests, uploads = list[EstimateRequest](), list[tuple[int, str, Any]]()
    estimate = SiteEstimates.estimate

    def listen(here: SiteEstimates, asked: Any, holding: Any) -> Any:
        requests.append(asked.request)
        return estimate(here, asked, holding)

    def look(site: str, header: dict[str, Any], answer: Any) -> Any:
        if header["do"] == "mask":
            uploads.append((header["step"], site, unseal(answer)[1]["sum"]["sum"]))
        return answer

    monkeypatch.setattr(SiteEstimates, "estimate", listen)
    told = [*SEND, "moments"]
    strict = {"secure": "required", "peers": fingerprints(tmp_path, [*FOUR, "va"])}
    result, transport = federation(tmp_path, 2, SECURE, look, send=told, shift=3.0, **strict)
    (request,) = requests
    rows = [samples(seed, n)[0].astype(np.float64) for seed, n in enumerate(FOUR.values())]
    every, given = np.concatenate(rows), request.inputs
    assert given is not None
    assert given.samples == len(every)
    np.testing.assert_allclose(given.total, every.sum(axis=0), atol=1e-6)
    parts = [Moments.of(some) for some in rows]
    apart = [
        reduce(add, (part for part in parts if part is not own)).apart(some)
        for own, some in zip(parts, rows, strict=True)
    ]
    assert request.pooled is not None
    assert request.pooled.distances is not None
    known = np.array([[item.spread, item.moved] for item in apart])
    np.testing.assert_allclose(request.pooled.distances.mean, known.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(request.pooled.distances.deviation, known.std(axis=0, ddof=1), atol=1e-6)
    assert {step for step, *_ in uploads} == {1, 2, 3, 4, 5}
    for step, site, upload in uploads:
        if step == 4:  # nothing of a site's own can be seen
            own = moments_part(parts[list(FOUR).index(site)])
            assert not np.isclose(from_fixed(upload[1:]).numpy(), own, rtol=1e-3).any()
    assert result["harmful"]
    assert any("its warning reads sums over the left-out sites' inputs" in reason for reason in result["reasons"])
    assert all(do != "inputs" for _, do in transport.asked)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["two", "lies"])
def test_without_masked_sums_of_inputs_the_estimate_rests_on_scores(why: str, tmp_path: Path) -> None:
    """Two sites would learn each other's sums; and one that lies about its own spoils no estimate."""

    def lie(site: str, header: dict[str, Any], answer: Any) -> Any:
        if header["do"] != "mask" or header["step"] != 4 or site != "north":
            return answer
        head, content, _ = unseal(answer)
        content["sum"]["sum"][3] += 2**60
        return seal(head, body_of(content))

    keep = ("north", "south") if why == "two" else ()
    result, _ = federation(tmp_path, 3, SECURE, lie if why == "lies" else None, send=[*SEND, "moments"], keep=keep)
    assert result["sites"] == 4
    assert not any("its warning reads" in reason for reason in result["reasons"])
    warnings = " ".join(event.get("message", "") for event in events(tmp_path))
    assert ("there are no sums of inputs" in warnings) is (why == "lies")


@pytest.mark.slow
def test_a_sum_that_lost_a_site_is_of_the_others(tmp_path: Path) -> None:
    def lose(site: str, header: dict[str, Any], answer: Any) -> Any:
        return [] if site == "west" and header["do"] == "mask" else answer

    result, _ = federation(tmp_path, 3, SECURE, lose)
    assert (result["sites"], result["abstain"]) == (3, False)
    assert any("'west' gives nothing to a sum" in event.get("message", "") for event in events(tmp_path))


def test_another_sum_of_the_same_scores_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums of the same numbers over sites that differ by a few would show these."""
    messages: list[str] = []

    def ask_otherwise(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site == "north" and header["do"] == "mask" and header["step"] == 1:
            fewer = {field: {k: v for k, v in header[field].items() if k != "west"} for field in ("cards", "scores")}
            again = forge(seal(header, body_of({})), **fewer, threshold=2)
            messages.append(answer_to(transports[0].programs[site], again)["message"])
        return answer

    transports: list[Loopback] = []
    begin = Loopback.__init__
    monkeypatch.setattr(Loopback, "__init__", lambda self, *given: (transports.append(self), begin(self, *given))[1])
    result, _ = federation(tmp_path, 3, SECURE, ask_otherwise)
    assert not result["abstain"]
    assert "masks it only once" in messages[0]


@pytest.mark.slow
def test_a_budget_gives_noisy_counts_and_they_stand_in_the_ledger(tmp_path: Path) -> None:
    budget = {"epsilon": 100.0, "delta": 1e-5, "measurement_noise": 3.0, "confidences_noise": 2.0}
    private = {"privacy": {"epsilon": 20.0, "delta": 1e-5, "clip_norm": 1.0}}
    result, _ = federation(tmp_path / "plain", 2, site={"privacy": budget}, training=private)
    assert result["sites"] == 4
    ledger = [json.loads(line) for line in (tmp_path / "plain" / "north" / "memory" / LEDGER).read_text().splitlines()]
    paid = [line for line in ledger if line.get("call") == "confidences"]
    assert [(line["noise_multiplier"], line["sample_rate"], line["steps"]) for line in paid] == [(2.0, 1.0, 1)]
    masked, _ = federation(tmp_path / "masked", 2, SECURE, site={"privacy": budget}, training=private)
    assert masked["sites"] == 4


def test_noisy_counts_are_near_the_true_ones() -> None:
    """Total variation falls with the number of samples; the projection keeps the number and no count is negative."""
    draw, off = np.random.default_rng(0), []
    for n in (200, 20000):
        second = draw.beta(0.5, 0.5, n)
        labels = (draw.random(n) < second).astype(int)
        where, number = cells(np.stack([1 - second, second], 1), labels, 0.3)
        true = np.bincount(where, minlength=number)
        counts = nearest_counts(true + 2.0 * draw.normal(size=number), n)
        assert counts.min() >= 0
        assert counts.sum() == n
        scores, again = samples_of(counts, 2, 0.3)
        assert np.array_equal(np.bincount(cells(scores, again, 0.3)[0], minlength=number), counts)
        made, truth = sums_of(scores, again, 0.3), sums_of(np.stack([1 - second, second], 1), labels, 0.3)
        off.append(abs(made.accuracy - truth.accuracy))
    assert off[1] < 0.002 < off[0] < 0.08


def test_a_part_of_a_sum_is_exact_in_counts() -> None:
    draw = np.random.default_rng(1)
    mine = sums_of(draw.dirichlet([1, 1, 1], 50), draw.integers(0, 3, 50))
    part = first_part(mine)
    back = to_fixed(torch.from_numpy(part), 4).double().numpy() * 2.0**-32
    assert np.abs(back - part).max() <= 2.0**-33
    counts = part[3:404]
    assert np.array_equal(back[3:404], counts)


@pytest.mark.parametrize("said", [2, 4])
def test_a_sum_of_another_number_of_sites_than_answered_is_none(monkeypatch: pytest.MonkeyPatch, said: int) -> None:
    class Unmasked:
        answered = ("north", "south", "east")

        def __init__(self, order: object) -> None:
            pass

        def unmask_total(self, shares: object) -> torch.Tensor:
            return torch.tensor([said, 0, 0])

    monkeypatch.setattr(estimates, "SecureSum", Unmasked)
    monkeypatch.setattr(estimates, "order_to_mask", lambda request: None)
    monkeypatch.setattr(estimates, "second_exchange", lambda added, again: {})
    plan = SimpleNamespace(agreed=SimpleNamespace(colluders=lambda sites: 0))
    asking = cast(Any, SimpleNamespace(_plan=plan, _ask=lambda *asked: {}))
    cards = {name: KeyCard(name, bytes(32), bytes(64)) for name in FOUR}
    with pytest.raises(FedshiftError, match="did not cancel"):
        estimates.Estimates._sum(asking, "run", 1, dict.fromkeys(FOUR, "run"), cards, 2)


ADAPT = {"kind": "adapt_to_one", "targets": ["va"], "seeds": [0], "test_fraction": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "protocol", "engine"),
    [
        ("fedavg", {**PROTOCOL, "targets": ["va"]}, {"aggregation": "secure"}),
        ({"name": "shot", "bottleneck": 4}, ADAPT, {"routing": "sealed"}),
    ],
)
def test_the_model_of_the_simulation(
    method: Any, protocol: dict[str, Any], engine: dict[str, Any], tmp_path: Path
) -> None:
    write_kits(tmp_path, [*LABELLED, "va"])
    deployed, simulated, _ = both(tmp_path, method, protocol, **engine)
    name = method if isinstance(method, str) else method["name"]
    assert "routing" in engine or alike(deployed, simulated.folder, name, "va")
    assert len(predicted(tmp_path)) == 70
    assert "too few sites" in received(tmp_path)["reasons"][0]
