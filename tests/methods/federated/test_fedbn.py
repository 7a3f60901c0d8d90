"""FedBN, SiloBN and gPerXAN: what stays at a site, what leaves it, and what answers at a new one."""

from __future__ import annotations

import pytest
import torch
from lost import kept, site_of
from tiny import CNN, NORMED, NORMED_CNN, domains, evaluated, federation, run, setting, start_of

from fedshift.errors import UserError
from fedshift.functional.averaging import is_buffer
from fedshift.methods import registry
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedbn import FedBN, SiloBN, normalisation_of, with_batch_statistics
from fedshift.methods.federated.gperxan import GPerXAN
from fedshift.models.network import Network
from fedshift.models.normalisation import AssembledNorm2d
from fedshift.weights import Weights

NETWORKS: dict[str, dict[str, object]] = {"fedbn": NORMED, "silobn": NORMED, "gperxan": NORMED_CNN}


def normed(network: Network) -> list[str]:
    """The names of BatchNorm's tensors, by the modules' classes."""
    return [
        f"{place}.{name}"
        for place, module in network.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        for name in module.state_dict()
    ]


@pytest.mark.parametrize("network", [NORMED, NORMED_CNN], ids=["vectors", "images"])
def test_batch_norm_is_found_whatever_its_name(network: dict[str, object]) -> None:
    built = setting(FedBN(), domains(network), network).build_network()
    assert normalisation_of(built.state_dict(), lambda name: True) == set(normed(built))
    assert normalisation_of(built.state_dict(), is_buffer) == {name for name in normed(built) if is_buffer(name)}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("unseen", ["mean", "target"])
def test_what_leaves_a_site_and_what_comes_back(name: str, unseen: str) -> None:
    """Two exchanges: the second model begins with the site's own normalisation and the common rest."""
    method = registry.parse({"name": name, "unseen": unseen})
    found = domains(NETWORKS[name], {"a": 16, "b": 9})
    where, start = federation(method, found, NETWORKS[name]), start_of(method, found, NETWORKS[name])
    names = normed(site_of(where, "a").network)
    own = {key for key in names if name != "silobn" or is_buffer(key)}
    own |= {key for key in start if key.endswith("score_batchnorm")}
    replies = dict(where.ask(method.fit, to=where.sources, weights=start).items())  # type: ignore[attr-defined]
    for site, reply in replies.items():
        remembered = kept(where, site, "normalisation")
        assert set(remembered) == own
        assert any(not torch.equal(remembered[key], start[key]) for key in own), "it was trained"
        for key, tensor in reply.weights.items():
            if key not in own:
                assert not torch.equal(tensor, start[key]) or tensor.dim() < 2, key
            elif unseen == "target":
                assert torch.equal(tensor, start[key]), f"{key} has left the site"
            else:
                assert torch.equal(tensor, remembered[key])
    begun: dict[str, Weights] = {}
    for site in replies:
        here = site_of(where, site)
        build = here.model
        here.model = lambda weights=None, site=site, build=build: (  # type: ignore[method-assign, misc]
            begun.setdefault(site, weights), build(weights))[1]  # fmt: skip
    remembered_before = {site: kept(where, site, "normalisation").clone() for site in replies}
    list(where.ask(method.fit, to=where.sources, weights=replies["a"].weights))  # type: ignore[attr-defined]
    for site, weights in begun.items():
        for key, tensor in weights.items():
            expected = remembered_before[site] if key in own else replies["a"].weights
            assert torch.equal(tensor, expected[key]), key


def test_silobn_trains_as_fedavg() -> None:
    """Statistics do not matter in training, so its parameters are FedAvg's bit for bit."""
    silo, plain = (run(method, network=NORMED, rounds=3)[0] for method in (SiloBN(), FedAvg()))
    assert silo.weights.without(is_buffer) == plain.weights.without(is_buffer)
    assert silo.report == plain.report
    bn = run(FedBN(), network=NORMED, rounds=3)[0]
    assert bn.weights.without(is_buffer) != plain.weights.without(is_buffer)
    first = [run(method, network=NORMED, rounds=1)[0].weights for method in (FedBN(), FedAvg())]
    assert first[0] == first[1], "in the first round nothing is a site's own yet"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_site_s_batches_are_normalised_by_themselves(name: str) -> None:
    method = registry.parse({"name": name, "unseen": "target"})
    network = NETWORKS[name]
    found = domains(network, {"a": 16, "b": 9})
    state, where = run(method, found, network, rounds=1)
    answering = evaluated(method, state.weights, found, network)
    inputs = next(site_of(where, "a").all_batches()).inputs
    training = site_of(where, "a").model(state.weights)
    with torch.no_grad():
        torch.testing.assert_close(answering(inputs), training(inputs))
        alone = answering(inputs[:1])
    assert bool(alone.isfinite().all())
    kept_state = Weights(answering.state_dict())
    assert kept_state == state.weights, "answering changes no statistics"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_site_has_statistics_of_all_its_samples_and_not_of_each_batch(name: str) -> None:
    method, network = registry.parse({"name": name, "unseen": "target"}), NETWORKS[name]
    found = domains(network, {"a": 16, "b": 9})
    state, where = run(method, found, network, rounds=1)
    answering = evaluated(method, state.weights, found, network)
    inputs = next(site_of(where, "a").all_batches()).inputs
    new_site = method.at_sites(tuple(inputs.shape[1:])).new_site
    adapted = new_site.adapt(answering, lambda: [inputs])
    with torch.no_grad():
        torch.testing.assert_close(adapted(inputs[:1]), adapted(inputs)[:1])
        assert not torch.allclose(adapted(inputs[:3]), answering(inputs[:3])), "it answers by the batch as before"
        assert sorted(new_site.order(9).tolist()) == list(range(9)) != new_site.order(9).tolist()


def test_a_single_vector_has_no_statistics_of_its_own() -> None:
    network = setting(FedBN(), domains(NORMED), NORMED).build_network()
    answering = with_batch_statistics(network).eval()
    layers = [module for module in network.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    assert all(layer.track_running_stats for layer in layers), "the network itself stays as it was"
    inputs = torch.randn(1, 5)
    with torch.no_grad():
        torch.testing.assert_close(answering(inputs), network.eval()(inputs))
        answering(torch.randn(8, 5))
        torch.testing.assert_close(answering(inputs), network(inputs))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_without_batch_norm_is_refused(name: str) -> None:
    method = registry.parse({"name": name})
    with pytest.raises(UserError, match=f"{name} needs a network with BatchNorm"):
        method.check(setting(method, domains(CNN), CNN).build_network())


def test_every_batch_norm_becomes_an_assembly_of_two_normalisations() -> None:
    plain = setting(FedBN(), domains(NORMED_CNN), NORMED_CNN).build_network()
    made = GPerXAN().adapt_network(plain, 3)
    layers = [module for module in made.modules() if isinstance(module, AssembledNorm2d)]
    assert len(layers) == sum(isinstance(module, torch.nn.BatchNorm2d) for module in plain.modules()) > 0
    inputs = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(made.train()(inputs), plain.train()(inputs), atol=1e-3)
