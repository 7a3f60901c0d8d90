"""CCST and `styles`: what is shared, what samples look like then, and that the inner method stays what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import CNN, IMAGE, MLP, bytes_of, domains, federation, images, plans, run, setting, start_of, step_on
from torch import Tensor

import fedshift
from fedshift.data.domain import Domain
from fedshift.data.site_data import SiteData
from fedshift.errors import ReplyRefused, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import WorkerPool
from fedshift.federation.setting_json import setting_from, setting_recipe
from fedshift.federation.site import Site
from fedshift.federation.site_runner import Setting
from fedshift.methods import registry
from fedshift.methods.base import Method, Samples
from fedshift.methods.composition.options import Composed
from fedshift.methods.federated.alone import Alone
from fedshift.methods.federated.ccst import CCST, StyleTransfer
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.federated.fedsam import FedSAM
from fedshift.methods.federated.fedsr import FedSR
from fedshift.methods.federated.mdfnet import MDFNet
from fedshift.methods.federated.oracle import Oracle
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.methods.wrapper import Wrapper
from fedshift.models import registry as models

SIZES = {"b": 8, "a": 6, "c": 7}


def site_of(where: Federation, name: str) -> Site:
    assert isinstance(where, LocalFederation)
    return where._runners[name].site


def coloured(name: str, number: int) -> Domain:
    return images(name, number, channels=3)


def begun(method: Any, found: list[Domain], network: dict[str, object] = CNN) -> tuple[Federation, Any]:
    """The federation after the styles went round."""
    where = federation(method, found, network)
    state = method.start(where, start_of(method, found, network))
    where.settle()
    return where, state


def seen(method: Any, where: Federation, name: str, repeats: int = 40) -> dict[int, list[Tensor]]:
    """What training draws of every row of a site, inside a step, un-normalised."""
    site = site_of(where, name)
    site.begin(type(site.envelope)(9, 1, 0.0, 10_000))
    out: dict[int, list[Tensor]] = {row: [] for row in range(site.samples)}
    with method.inside(site):
        for batch in site.batches(repeats):
            for row, sample in zip(batch.rows.tolist(), batch.inputs * 0.25 + 0.5, strict=True):
                if not any(torch.allclose(sample, known, atol=1e-5) for known in out[row]):
                    out[row].append(sample)
    return out


# The inner method -----------------------------------------------------------------------------------------------------

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
    method = StyleTransfer(method=inner)
    state, where = run(method, found)
    plain, alone = run(inner, found)
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
    monkeypatch.setattr(SiteData, "restyled", lambda self, restyle: self)
    unstyled = run(method, found)[0].weights
    again = federation(inner, found)
    again.progress.exchange = 2
    same = inner.start(again, start_of(inner, found))
    for _ in range(2):
        same = step_on(inner, again, same)
    assert unstyled == same.weights


def test_nothing_of_the_inner_method_is_forgotten() -> None:
    """A new hook of methods has to be handed on, or named here as not the other's."""
    own = {"name", "setting", "label", "recipe", "display", "described_setting"}
    own |= {"composition", *Composed.model_fields}  # a wrapper has its own
    own |= {"traits", "plug_ins", "kept_at_sites", "reads", "own_training"}  # made of its own and of what is handed on
    own |= {"trains_in_parts", "in_parts"}  # refused
    own |= {"own_training"}  # the other's is refused
    both = (Method, Composed)
    hooks = {name for kind in both for name in (*vars(kind), *kind.__annotations__) if not name.startswith("_")}
    hooks -= {name for name in hooks if name.startswith("model_")}
    assert hooks - own <= set(vars(Wrapper))


def test_a_preset_may_be_the_inner_method() -> None:
    found = [images(site, number) for site, number in SIZES.items()]
    preset, written = StyleTransfer(method=FedSAM()), StyleTransfer(method=FedAvg(), local=({"name": "sharpness"},))
    assert run(preset, found)[0].weights == run(written, found)[0].weights
    assert run(preset, found)[0].weights != run(StyleTransfer(method=FedAvg()), found)[0].weights


@pytest.mark.parametrize("name", ["fedavg", "fedadg", "fedomg", "kd3a", "mdfnet"])
def test_it_says_of_itself_what_the_inner_method_says(name: str) -> None:
    inner = registry.parse({"name": name})
    for said in ("target", "needs_target", "uses_held_out", "averages"):
        assert getattr(StyleTransfer(method=inner).traits, said) == getattr(inner.traits, said), said


def test_warnings_of_the_inner_method_are_handed_on() -> None:
    inner, samples = MDFNet(), Samples((3, 8, 8), {"a": 2})
    (warning,) = inner.check_samples(samples)
    assert "a (2)" in warning
    assert StyleTransfer(method=inner).check_samples(samples) == (warning,)


def test_each_site_alone_in_its_own_styles_is_measured_with_its_own_model() -> None:
    found = [images(site, number) for site, number in SIZES.items()]
    method = StyleTransfer(method=Alone())
    network = method.evaluated_network(setting(method, found).build_network(), len(found))
    parts = [network.at(number) for number in range(len(found))]
    assert len({id(part) for part in parts}) == len(found)
    assert network not in parts


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
    second = run(StyleTransfer(method=FedAvg(local_epochs=2, weighting="uniform")), found)[0]
    assert first.weights == second.weights
    pulled = run(CCST(local_epochs=2, proximal_weight=0.5), found)[0]
    inner = FedProx(local_epochs=2, weighting="uniform", proximal_weight=0.5)
    assert pulled.weights == run(StyleTransfer(method=inner), found)[0].weights != first.weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "deepall"}, "deepall does not train at source sites"),
        ({"method": {"name": "ccst"}}, "ccst already changes styles"),
        ({"method": {"name": "fedavg", "local_epochs": 0}}, "local_epochs: Input should be greater than 0"),
        ({"method": 3}, "name of a method, or a mapping"),
    ],
)
def test_what_cannot_be_wrapped(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StyleTransfer(**options)
    with pytest.raises(UserError, match=message):
        parse({"data": "rotated_digits", "model": "linear", "methods": [{"name": "styles", **options}]})


def test_an_unknown_inner_method_comes_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'fedavg'"):
        parse({"data": "rotated_digits", "model": "linear", "methods": [{"name": "styles", "method": "fedagv"}]})


@pytest.mark.slow
def test_another_process_makes_its_equal_and_the_same_bits(pool: WorkerPool) -> None:
    method = StyleTransfer(method=CSAC(acquisition_epochs=1, calibration_epochs=1), style_mode="single", bank_size=3)
    whole = setting(method, domains())
    assert setting_from(json.loads(json.dumps(setting_recipe(whole)))) == whole
    here, _ = run(method)
    there, _ = run(method, pool=pool)
    assert here.weights == there.weights


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
    assert isinstance(model.method, StyleTransfer)
    assert isinstance(model.method.inner, FedSR)
    assert fedshift.run(options, tmp_path).runs[0].rounds == 2  # recognised as its own folder
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = json.loads(opened.metadata()["fedshift"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    metadata["method"]["method"]["name"] = f"{tmp_path}/evil.py:Evil"
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    save_file(tensors, file, {"fedshift": json.dumps(metadata)})
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="does not come with fedshift"):
        load_model(folder)


class _Plain(Wrapper):
    """Does nothing to the inner method."""

    traits = Wrapper.traits.derive(name="plain")

    method: Any

    @property
    def inner(self) -> Method:
        found: Method = self.method
        return found

    def inside(self, site: Site) -> AbstractContextManager[None]:
        return nullcontext()


def test_two_wrappers_are_as_careful_as_one() -> None:
    assert _Plain(method=StyleTransfer()).shares == StyleTransfer().shares
    with pytest.raises(ValueError, match="ccst already changes styles"):
        StyleTransfer(method=_Plain(method=CCST()))
    for method in (Oracle(), DeepAll()):
        with pytest.raises(ValueError, match=f"{method.name} does not train at source sites"):
            _Plain(method=method)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [CCST(), StyleTransfer(method={"name": "csac"})], ids=["ccst", "styles"])  # type: ignore[arg-type]
def test_a_site_that_refuses_styles_ends_the_run_at_once(method: Any) -> None:
    with pytest.raises(UserError, match="site 'large' refuses to send styles"):
        federation(method, refuse=["styles"])
    options = {
        "data": {"name": "rotated_digits", "per_class": 5},
        "model": "linear",
        "methods": [{"name": method.name}],
        "engine": {"refuse": ["styles"]},
    }
    with pytest.raises(UserError, match=f"sites refuse styles, which {method.name} shares"):
        fedshift.run(options)
    assert "styles" in method.shares
    assert "styles" not in FedAvg().shares


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
        method.start(where, start_of(method, found[:1]))
    with pytest.raises(UserError, match=r"site 'a': ccst\.style_space: lab needs colour images, these have 1"):
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
        with pytest.raises(UserError, match=r"site 'large': ccst\.style_space: .* needs images"):
            begun(CCST(**options), domains(MLP), MLP)
    with pytest.raises(UserError, match=r"ccst\.level: 4 of 3 source domains"):
        begun(CCST(level=4), domains())
    with pytest.raises(UserError, match=r"ccst\.stage: the network has no stage 'conv9'; did you mean"):
        CCST(style_space="feature", stage="conv9").check(setting(CCST(), domains()).build_network())


def test_options_change_the_result() -> None:
    found = [images(site, number) for site, number in SIZES.items()]
    plain = run(CCST(), found)[0].weights
    changes: list[dict[str, Any]] = [
        {"style_space": "feature"},
        {"style_mode": "single"},
        {"level": 1},
        {"unbiased_content": True},
        {"local_epochs": 2},
        {"steps_per_round": 3},
        {"weighting": "samples"},
    ]
    for change in changes:
        assert run(CCST(**change), found)[0].weights != plain, change
    twice, pulled = (run(CCST(local_epochs=2, proximal_weight=weight), found)[0].weights for weight in (0, 0.5))
    assert twice != pulled
    single = run(CCST(style_mode="single"), found)[0].weights
    assert run(CCST(style_mode="single", bank_size=2), found)[0].weights != single
    assert run(CCST(style_mode="single", one_style_per_batch=True), found)[0].weights != single
    stages = [run(CCST(style_space="feature", stage=stage), found)[0].weights for stage in ("conv1", "conv2")]
    assert stages[0] != stages[1]


def test_one_source_has_nobody_to_take_a_style_from() -> None:
    found = [images("alone", 9)]
    method = CCST()
    where, _ = begun(method, found)
    assert all(len(versions) == 1 for versions in seen(method, where, "alone", repeats=5).values())
