"""CCST and `prepare: styles`: what is shared, and that the method stays what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from lost import site_of
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import CNN, IMAGE, MLP, bytes_of, domains, federation, images, plans, run, setting, start_of, step_on
from torch import Tensor

import fedshift
from fedshift.data.domain import Domain
from fedshift.data.site_data import SiteData
from fedshift.errors import ReplyRefused, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.fits.private import check_private
from fedshift.experiment.predict import load_model
from fedshift.experiment.runs.run_identity import comparable, first_difference
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Site
from fedshift.federation.site_runner import Setting
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.composition.options import preparation_of
from fedshift.methods.composition.styles import StylesOption
from fedshift.methods.federated.ccst import CCST
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.federated.fedsr import FedSR
from fedshift.methods.rounds import start_run
from fedshift.models import registry as models

SIZES = {"b": 8, "a": 6, "c": 7}


def coloured(name: str, number: int) -> Domain:
    return images(name, number, channels=3)


def styled(method: Method, **options: Any) -> Method:
    """A method whose sites draw their samples in the styles of all."""
    return method.model_copy(update={"prepare": StylesOption(**options)})


def inside(method: Method, site: Site) -> AbstractContextManager[None]:
    """What surrounds the method's calls at a site."""
    prepared = preparation_of(method)
    assert prepared is not None
    return prepared.inside(site)


def begun(method: Any, found: list[Domain], network: dict[str, object] = CNN) -> tuple[Federation, Any]:
    """The federation after the styles went round."""
    where = federation(method, found, network)
    state = start_run(method, where, start_of(method, found, network))
    where.settle()
    return where, state


def seen(method: Any, where: Federation, name: str, repeats: int = 40) -> dict[int, list[Tensor]]:
    """What training draws of every row of a site, inside a step, un-normalised."""
    site = site_of(where, name)
    site.begin(type(site.envelope)(9, 1, 0.0, 10_000))
    out: dict[int, list[Tensor]] = {row: [] for row in range(site.samples)}
    with inside(method, site):
        for batch in site.batches(repeats):
            for row, sample in zip(batch.rows.tolist(), batch.inputs * 0.25 + 0.5, strict=True):
                if not any(torch.allclose(sample, known, atol=1e-5) for known in out[row]):
                    out[row].append(sample)
    return out


INNER: dict[str, Callable[[], Any]] = {
    "fedavg": lambda: FedAvg(local_epochs=2),
    "fedsr": lambda: FedSR(steps_per_round=4),
    "csac": lambda: CSAC(acquisition_epochs=2, calibration_epochs=1),
}


@pytest.mark.parametrize("name", INNER)
def test_it_is_the_inner_method_with_other_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work, report and bytes are those of the inner method and the bank; with the samples as they are, its weights."""
    inner = INNER[name]()
    found = [images(site, number) for site, number in SIZES.items()]
    method = styled(inner)
    state, where = run(method, found)
    plain, alone = run(inner, found)
    assert "styles" in method.calls.shares
    assert all(runner.site.data._restyle is None for runner in where._runners.values()), "only a call has styles"
    assert state.weights != plain.weights
    assert state.weights.keys() == plain.weights.keys()
    assert set(state.report) == set(plain.report)
    assert where.progress.used == alone.progress.used
    extra = sum(where.ledger.total["up"].values()) - sum(alone.ledger.total["up"].values())
    assert extra == where.ledger.total["up"]["styles"] == 3 * 4 * 2
    foretold = bytes_of(method, where, found=found)
    assert sum(where.ledger.total["up"].values()) == foretold.up
    assert sum(where.ledger.total["down"].values()) == foretold.down
    # The bank's exchanges move the seeds of those that follow, so the same is asked at level 1 of one's own style.
    monkeypatch.setattr(SiteData, "with_restyle", lambda self, restyle: self)
    unstyled = run(method, found)[0].weights
    again = federation(inner, found)
    again.progress.exchange = 2
    same = inner.start(again, start_of(inner, found))
    for _ in range(2):
        same = step_on(inner, again, same)
    assert unstyled == same.weights


def test_styles_before_a_method_of_one_target_has_one_target() -> None:
    options = {
        "data": {"name": "rotated_digits", "angles": [0, 30, 60]},
        "model": "mnist_cnn",
        "protocol": {"kind": "source_target", "pairs": [["D0", ["D30", "D60"]]]},
        "methods": [{"name": "styles", "method": "kd3a"}],
    }
    with pytest.raises(UserError, match="styles adapts to one target"):
        parse(options)


def test_ccst_is_styles_around_fedavg() -> None:
    found = [images(site, number) for site, number in SIZES.items()]
    first = run(CCST(local_epochs=2), found)[0]
    second = run(styled(FedAvg(local_epochs=2, weighting="uniform")), found)[0]
    assert first.weights == second.weights
    pulled = run(CCST(local_epochs=2, proximal_weight=0.5), found)[0]
    inner = FedProx(local_epochs=2, weighting="uniform", proximal_weight=0.5)
    assert pulled.weights == run(styled(inner), found)[0].weights != first.weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "deepall", "prepare": "styles"}, "deepall does not train at source sites"),
        ({"name": "oracle", "prepare": "styles"}, "oracle does not train at source sites"),
        ({"name": "ccst", "prepare": "styles"}, "ccst prepares its samples already"),
        ({"name": "fedavg", "prepare": "style"}, "did you mean 'styles'"),
        ({"name": "fedavg", "prepare": {"name": "styles", "levels": 1}}, "did you mean 'level'"),
        ({"name": "styles", "method": "deepall"}, "deepall does not train at source sites"),
        ({"name": "styles", "method": {"name": "ccst"}}, "ccst prepares its samples already"),
        ({"name": "styles", "method": {"name": "fedavg", "local_epochs": 0}}, "local_epochs: input should be greater"),
        ({"name": "styles", "method": 3}, "name of a method, or a mapping"),
    ],
)
def test_what_cannot_be_prepared(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse({"data": "rotated_digits", "model": "linear", "methods": [options]})


def test_a_private_run_takes_no_preparation() -> None:
    """What a site sends for it is computed from samples, without noise."""
    network = setting(FedAvg(), domains(MLP), MLP).build_network()
    with pytest.raises(UserError, match="cannot train privately"):
        check_private(styled(FedAvg()), network, (5,))


def test_styles_around_a_method_is_the_method_prepared() -> None:
    """Before ``prepare`` there was, ``styles`` was a method around another; results of that time still belong."""
    inner = {"name": "fedprox", "proximal_weight": 0.5}
    options = {"name": "styles", "setting": "vgg", "level": 2, "average": "swa", "method": inner}
    made = registry.parse(options)
    prepare = {"name": "styles", "style_space": "vgg", "level": 2}
    assert made == registry.parse({**inner, "prepare": prepare, "average": "swa", "label": "styles-vgg+swa"})
    earlier = {
        **options,
        "method": {**inner, "average": None, "label": None},
        "label": None,
        "average": {"kind": "swa"},
    }
    now = {"name": "fedprox", **made.model_dump(mode="json")}
    assert first_difference(comparable({"method": earlier}), comparable({"method": now})) is None
    other = {**earlier, "level": 3}
    assert first_difference(comparable({"method": other}), comparable({"method": now})) is not None


def test_a_finished_run_predicts_and_a_file_brings_no_code(tmp_path: Path) -> None:
    options = {
        "name": "styled",
        "data": {"name": "rotated_digits", "per_class": 8, "size": 8},
        "protocol": {"targets": ["D30"], "seeds": [0], "test_fraction": 0.25},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"rounds": 2, "batch_size": 20},
        "methods": [{"name": "styles", "label": "styles+fedsr", "method": {"name": "fedsr", "samples": 3}}],
        "engine": {"threads": 1},
        "device": "cpu",
    }
    results = fedshift.run(options, tmp_path)
    folder = results.folder / "styles+fedsr" / "D30" / "seed-0"
    model = load_model(folder)
    assert isinstance(model.method, FedSR)
    assert model.method.prepare == StylesOption()
    assert fedshift.run(options, tmp_path).runs[0].rounds == 2  # recognised as its own folder
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = json.loads(opened.metadata()["fedshift"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    metadata["method"]["name"] = f"{tmp_path}/evil.py:Evil"
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    save_file(tensors, file, {"fedshift": json.dumps(metadata)})
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="does not come with fedshift"):
        load_model(folder)


def test_grey_and_colour_cannot_mix() -> None:
    found = [images("a", 9), coloured("b", 9)]
    method = CCST()
    where = LocalFederation(
        [*plans(method, found[:1]), *plans(method, found[1:])],
        Setting(method, setting(method, found[:1]).training, models.parse(CNN), IMAGE, (1, 12, 12), 3, 2, 0, "cpu"),
        budget={"a": 9, "b": 9},
        rounds=1,
    )
    with pytest.raises(ReplyRefused, match=r"site 'b' .*'styles/mean' is \(1, 3\)"):
        start_run(method, where, start_of(method, found[:1]))
    with pytest.raises(UserError, match=r"site 'a': styles: style_space: lab needs colour images, these have 1"):
        begun(CCST(style_space="lab"), found[:1])


def test_a_style_of_one_pixel_does_not_leave() -> None:
    """Its mean is the network's feature of a single sample."""
    network = {"name": "digit_cnn", "variant": "paper"}
    method = CCST(style_space="feature", style_mode="single", stage="conv3")
    found = [images(site, number, size=4) for site, number in SIZES.items()]
    with pytest.raises(UserError, match=r"conv3.*one pixel"):
        run(method, found, network)


def test_options_that_do_not_fit() -> None:
    for options in ({"style_mode": "single"}, {"style_space": "feature"}):
        with pytest.raises(UserError, match=r"site 'large': styles: style_space: .* needs images"):
            begun(CCST(**options), domains(MLP), MLP)
    with pytest.raises(UserError, match=r"styles: level: 4 of 3 source domains"):
        begun(CCST(level=4), domains())
    with pytest.raises(UserError, match=r"styles: stage: the network has no stage 'conv9'; did you mean"):
        StylesOption(style_space="feature", stage="conv9").check(
            setting(CCST(), domains()).build_network(), (1, 12, 12), 3
        )


def test_one_source_has_nobody_to_take_a_style_from() -> None:
    found = [images("alone", 9)]
    method = CCST()
    where, _ = begun(method, found)
    assert all(len(versions) == 1 for versions in seen(method, where, "alone", repeats=5).values())


def test_a_site_that_shared_nothing_still_has_its_own_style() -> None:
    option = StylesOption()
    where = federation(registry.parse({"name": "fedavg", "prepare": "styles"}), domains(CNN), CNN)
    assert isinstance(where, LocalFederation)
    sites = [runner.site for runner in where._runners.values()]
    own, other = (option.share_styles(site).styles for site in sites[:2])
    option.receive_styles(sites[0], {sites[1].name: other})
    bank = sites[0].memory["styles"]
    assert set(bank) == {sites[0].name, sites[1].name}
    assert torch.equal(bank[sites[0].name]["mean"], own["mean"])
