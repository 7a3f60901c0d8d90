"""How far the parameters of sites' own models are from each other, within a domain and across domains."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedshift.digests import check_filled
from fedshift.errors import UserError
from fedshift.evaluation.stored import run_folders
from fedshift.json_objects import read_object, write_object
from fedshift.methods.federated.shot import members_by_name
from fedshift.weights import Weights

DISTANCES = "distances.json"
WITHIN, ACROSS = "within a domain", "across domains"
Distances = dict[str, dict[str, list[float]]]
"""Within or across → layer → a distance for each seed."""


def distances(models: Mapping[str, Weights]) -> dict[str, dict[str, float]]:
    """Within or across → layer → mean L2 distance over pairs of sites, relative to the layers' mean norm.

    Layers are the weights with more than one dimension, such as those of convolutions. Sites of one domain are called
    "name.1", "name.2" and so on.

    Args:
        models: site → the model that it trained.
    """
    of_pairs: dict[str, dict[str, float]] = {WITHIN: {}, ACROSS: {}}
    names = [name for name, tensor in next(iter(models.values())).items() if tensor.ndim > 1]
    layers = sorted(names, key=lambda name: name.startswith("classifier"))  # files have them in alphabetical order
    for layer in layers:
        pairs: dict[str, list[Tensor]] = defaultdict(list)
        for (first, a), (second, b) in combinations(models.items(), 2):
            same = first.rpartition(".")[0] == second.rpartition(".")[0]
            pairs[WITHIN if same else ACROSS].append(torch.linalg.vector_norm(a[layer] - b[layer]))
        norm = torch.stack([torch.linalg.vector_norm(model[layer]) for model in models.values()]).mean()
        for pair, values in pairs.items():
            of_pairs[pair][layer.removesuffix(".weight")] = float(torch.stack(values).mean() / norm)
    return of_pairs


def measure(folder: Path) -> None:
    """Write the distances of an experiment's finished runs of ``alone``, whose models are in the runs' folders.

    Raises:
        UserError: a model is damaged.
    """
    whole: Distances = {WITHIN: defaultdict(list), ACROSS: defaultdict(list)}
    for run in run_folders(folder):
        file = run / "model.safetensors"
        if not file.exists():
            continue
        try:
            check_filled(file)
            with safe_open(file, "pt") as opened:
                sources = json.loads(opened.metadata()["fedshift"])["sources"]
                weights = Weights({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{file} is damaged: remove its folder and run it again") from error
        for layer_pair, layers in distances(members_by_name(weights, sources)).items():
            for layer, distance in layers.items():
                whole[layer_pair][layer].append(distance)
    if whole[WITHIN]:
        write_object(folder / DISTANCES, whole)


def read(folder: Path) -> Distances:
    """What `measure` wrote; empty if it wrote nothing.

    Raises:
        UserError: the file is damaged.
    """
    stored: Distances = read_object(
        folder / DISTANCES, "restore it, or remove it and the experiment's folder, and run again"
    )
    return stored
