"""What each row of a table used. Only rows that used the same are alike; a difference between others says what differs.

Derived from the options that a record keeps, so that it holds for finished runs as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import ValidationError

from fedshift.evaluation.records import RunResult
from fedshift.experiment.protocols.index import protocol_of
from fedshift.federation.training import SAME_BITS
from fedshift.methods.index import ENTRIES
from fedshift.report.measures import Note
from fedshift.report.pairs import ALONE
from fedshift.text import yaml_value

Role = Literal["federated", "alone", "pooled", "oracle", "majority"]
ROLES: Mapping[Role, str] = {
    "federated": "samples stay at their sites",
    "alone": "each site alone",
    "pooled": "pooled, not private",
    "oracle": "upper bound, uses the target's labels",
    "majority": "no model at all",
}
"""The roles in words."""


def role_of(result: RunResult) -> Role:
    """What a method is to its reader, by the name in its options and by what left the sites."""
    name = method_name(result)
    if name == "oracle":
        return "oracle"
    if name == ALONE:
        return "alone"
    shares = ENTRIES[name].shares if name in ENTRIES else ()
    return "pooled" if "raw_data" in {*shares, *result.bytes_up} else "federated"


def method_name(result: RunResult) -> str:
    """The method's name, which several rows may share."""
    options = result.options.get("method")
    return str(options.get("name", result.method)) if isinstance(options, Mapping) else result.method


_LEFT_OVER, _ROUNDED = 3, 0.02
"""Differences that come from mini-batches which are divided over sites and rounded up."""


def steps_of(runs: Sequence[RunResult]) -> float | None:
    """Steps of a row's optimiser in a run, mean over its runs; None if it is not pooled, or a record does not say it.

    It follows from the options, so that old records have it.
    """
    if role_of(runs[0]) != "pooled":
        return None
    steps_of_runs = [_steps_of_run(run.options, method_name(run)) for run in runs]
    known = [steps for steps in steps_of_runs if steps is not None]
    return fmean(known) if len(known) == len(steps_of_runs) else None


def _steps_of_run(options: Mapping[str, Any], name: str) -> float | None:
    training, method = options.get("training"), options.get("method")
    budget = training.get("mini_batches") if isinstance(training, Mapping) else None
    # Only known names: a record must not decide which code is imported.
    if name not in ENTRIES or not isinstance(method, Mapping) or not isinstance(budget, Mapping):
        return None
    from fedshift.methods.pooled.equal_steps import steps_of_run  # with torch, which other tables do not need
    from fedshift.methods.registry import method_class

    kind = method_class(name)
    try:
        made = kind.model_validate({field: value for field, value in method.items() if field in kind.model_fields})
    except ValidationError:  # options of another version
        return None
    return steps_of_run(made, budget)


def steps_in_words(steps: Mapping[str, float]) -> str | None:
    """What to say of the steps of a table's pooled rows, which train on equally many samples; None if it has one.

    Example:
        >>> steps_in_words({"deepall": 60.0, "split": 60.0})
        'Optimiser steps in a run: 60 in every pooled row.'
        >>> steps_in_words({"deepall": 60.0, "masf": 20.0, "dger": 20.0})[:55]
        'Optimiser steps in a run, on equally many samples: deep'
    """
    if len(steps) < 2:
        return None
    least, most = min(steps.values()), max(steps.values())
    if most - least <= max(_LEFT_OVER, _ROUNDED * most):
        shown = f"{most:,.0f}" if f"{least:,.0f}" == f"{most:,.0f}" else f"{least:,.0f} to {most:,.0f}"
        return f"Optimiser steps in a run: {shown} in every pooled row."
    rows: dict[str, list[str]] = {}
    for name, number in steps.items():
        rows.setdefault(f"{number:,.0f}", []).append(name)
    listing = "; ".join(f"{', '.join(names)} {number}" for number, names in rows.items())
    return (
        f"Optimiser steps in a run, on equally many samples: {listing}. Of these pooled rows only those of equal steps "
        "are alike; with domain_batches: split each draws as often as deepall."
    )


Use = Literal["augmented", "target"]
USES: Mapping[Use, str] = {"augmented": "augmented images", "target": "the target's unlabelled samples"}
"""What a row may use beyond the sources' samples as they are, in words."""
_BADGES: Mapping[Role | Use, str] = {
    "pooled": "pooled",
    "oracle": "oracle",
    "augmented": "augmented",
    "target": "reads target",
}
_VECTORS = ("mlp", "linear")
_ONE_CHANNEL = ("rotated_digits", "rotated_mnist", "rotated_mnist_ghifary")


@dataclass(frozen=True)
class Conditions:
    """What a row used."""

    name: str  # the method's name, which several rows may share
    role: Role  # whether samples stay at their sites
    uses: frozenset[Use]  # what it used beyond the sources' samples as they are
    images: frozenset[str]  # how training images were changed, each way as JSON; empty: as they are
    momentum: bool  # whether the server has momentum
    exchanges: float  # mean number of rounds
    sent: float  # mean bytes in a run, of all sites, both ways
    # of the optimiser of a pooled row, mean over its runs; None for others and where a record does not say it
    steps: float | None = None
    private: bool = False  # whether all runs spent a budget of differential privacy

    def unlike(self, other: Conditions) -> tuple[str, ...]:
        """What ``other`` did without that this row used, and the reverse; empty: of one role they are alike."""
        phrases = [f"without {words}" for use, words in USES.items() if use in self.uses - other.uses]
        phrases += [f"with {words}" for use, words in USES.items() if use in other.uses - self.uses]
        if self.images and other.images and self.images != other.images:
            phrases.append("with images augmented otherwise")
        return tuple(phrases)

    @property
    def words(self) -> tuple[str, ...]:
        """What it used, in words."""
        pooled = ("pooled samples",) if self.role == "pooled" else ()
        return (*pooled, *(words for use, words in USES.items() if use in self.uses))

    @property
    def badges(self) -> tuple[str, ...]:
        """What to know of it beside its name, in a word each."""
        has = {self.role, *self.uses}
        return (*(word for what, word in _BADGES.items() if what in has), *(("private",) if self.private else ()))


def conditions(results: Sequence[RunResult]) -> dict[str, Conditions]:
    """Method → what its row used, by its runs.

    Example:
        >>> made = RunResult.model_construct
        >>> training = {"augmentation": {"crop_ratio": [0.75, 1.33], "shear": 0.0}}
        >>> options = {"method": {"name": "fedavg", "classifier_at_new_site": 16}, "training": training}
        >>> options["protocol"] = {"kind": "leave_one_out"}
        >>> run = made(method="turned", options=options, bytes_up={"weights": 8}, bytes_down={"weights": 8}, rounds=5)
        >>> found = conditions([run])["turned"]
        >>> found.words, found.exchanges, found.sent
        (("the target's unlabelled samples",), 5.0, 16.0)
    """
    by_method: dict[str, list[RunResult]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    return {
        method: Conditions(
            name=method_name(runs[0]),
            role=role_of(runs[0]),
            uses=_uses(runs[0]),
            images=_images(runs[0]),
            momentum=_momentum(runs[0]),
            exchanges=fmean(run.rounds for run in runs),
            sent=fmean(sum(run.bytes_up.values()) + sum(run.bytes_down.values()) for run in runs),
            steps=steps_of(runs),
            private=all(run.privacy for run in runs),
        )
        for method, runs in by_method.items()
    }


def common_badges(used: Mapping[str, Conditions]) -> frozenset[str]:
    """The badges that all of several rows have."""
    return frozenset.intersection(*(frozenset(row.badges) for row in used.values())) if len(used) > 1 else frozenset()


def badges_of(used: Mapping[str, Conditions]) -> dict[str, tuple[str, ...]]:
    """Method → the badges of its row, without those that all rows have: "pooled", "augmented", "reads target", …"""
    rows, common = {method: row.badges for method, row in used.items()}, common_badges(used)
    return {method: tuple(badge for badge in badges if badge not in common) for method, badges in rows.items()}


def _uses(result: RunResult) -> frozenset[Use]:
    uses: set[Use] = set()
    if _images(result):
        uses.add("augmented")
    if _reads_target(result):
        uses.add("target")
    return frozenset(uses)


def _images(result: RunResult) -> frozenset[str]:
    """How training images were moved or recoloured: by the experiment, a plug-in, or the method itself."""
    method = _section(result, "method")
    plug_ins = [plug_in for plug_in in method.get("local") or () if isinstance(plug_in, Mapping)]
    given = [_section(result, "training").get("augmentation")]
    given += [plug_in.get("by") for plug_in in plug_ins if plug_in.get("name") == "augment"]
    if method_name(result) == "recipe" and not any(plug_in.get("name") == "augment" for plug_in in plug_ins):
        channels = _channels(result)
        given.append(method.get("augmentation" if channels == 1 else "colour_augmentation") if channels else None)
    return frozenset(json.dumps(augmentation, sort_keys=True) for augmentation in given if _changes(augmentation))


def _changes(augmentation: object) -> bool:
    """Whether any part of an augmentation is set; the ratio of a crop says nothing without a crop."""
    return isinstance(augmentation, Mapping) and any(
        value for name, value in augmentation.items() if name != "crop_ratio"
    )


def _reads_target(result: RunResult) -> bool:
    """Whether the model that is measured depends on the target's samples, without their labels."""
    method, name = _section(result, "method"), method_name(result)
    protocol = protocol_of(result.options.get("protocol"))
    if protocol is not None and not protocol.unseen:
        scenario = ENTRIES[name].scenario if name in ENTRIES else "without labels"
        return "without labels" in scenario or "unlabelled" in scenario
    if method.get("unseen") == "target":
        return True
    if _scaled_per_site(result) and not (protocol is not None and protocol.by_site):
        return True
    if method.get("batch_norm_at_new_site") is not None:
        return True
    if result.metric != "accuracy":  # only a classifier of one class among several is turned
        return False
    if method.get("classifier_at_new_site") is not None:
        return True
    return name == "recipe" and method.get("templates") is not None and _channels(result) != 1


def _scaled_per_site(result: RunResult) -> bool:
    return _section(result, "data").get("standardise") == "per_site"


def _channels(result: RunResult) -> int | None:
    """Channels of the images; None for vectors. Old records do not say it, so their network and data do."""
    shape = result.data.get("input_shape")
    if isinstance(shape, Sequence):
        return int(shape[0]) if len(shape) == 3 else None
    if _section(result, "model").get("name") in _VECTORS:
        return None
    return 1 if _section(result, "data").get("name") in _ONE_CHANNEL else 3


def _momentum(result: RunResult) -> bool:
    """Whether the server has momentum: by its optimiser, or as the recipe for images has it."""
    method = _section(result, "method")
    server = method.get("server")
    if server is not None:
        return isinstance(server, Mapping) and server.get("optimizer") == "momentum"
    channels = _channels(result)
    momentum = method.get("momentum" if channels == 1 else "colour_momentum")
    return method_name(result) == "recipe" and channels is not None and bool(momentum)


def _section(result: RunResult, name: str) -> Mapping[str, Any]:
    section = result.options.get(name)
    return section if isinstance(section, Mapping) else {}


def scale_note(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[Note]:
    """Where each site's samples are in its own scale, whose samples that scale is made of."""
    if any(_scaled_per_site(result) for result in results if result.method in methods):
        yield Note(
            "scale",
            "Each site's samples are scaled by its own training samples (data.standardise: per_site); where no one "
            "trains, by all of that site, without labels.",
        )


def used_notes(used: Mapping[str, Conditions], methods: Sequence[str]) -> Iterator[Note]:
    """Notes on what rows used, what they exchanged, and which rows explain the recipe's."""
    rows = {name: used[name] for name in methods if name in used}
    listed = {
        words: [name for name, row in rows.items() if words in row.words]
        for words in ("pooled samples", *USES.values())
    }
    if len(rows) > 1 and any(listed.values()):
        kinds = "; ".join(f"{words}: {', '.join(names)}" for words, names in listed.items() if names)
        unlike = len({row.images for row in rows.values() if row.images}) > 1
        kinds += "; not all of these images were augmented alike" if unlike else ""
        text = f"Used, beyond the sources' samples as they are: {kinds}. Only rows that used the same are alike."
        yield Note("used", text, ("Not all images were augmented alike.",) if unlike else ())
    steps = steps_in_words({name: row.steps for name, row in rows.items() if row.steps is not None})
    if steps is not None:
        yield Note("steps", steps)
    sent: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row.sent:
            sent.setdefault(f"{row.exchanges:,.0f} and {row.sent / 1e6:,.2f}", []).append(name)
    if sent:
        listing = "; ".join(f"{', '.join(names)} {numbers}" for numbers, names in sent.items())
        yield Note("sent", f"Exchanges, and MB that all sites sent and got in a run: {listing}.")
    recipe = next((name for name, row in used.items() if row.name == "recipe"), None)
    if recipe in rows and rows[recipe].uses:
        parts = [f"{what}: {names or 'not run'}" for what, names in _explaining(recipe, rows).items()]
        ran = [f"{what}: {names}" for what, names in _explaining(recipe, rows).items() if names]
        head = f"Rows that explain {recipe}"
        shorter = (f"{head}: {'; '.join(ran)}; no others.",) if ran else ()
        yield Note("explained", f"{head}: {'; '.join(parts)}.", shorter)


def _explaining(recipe: str, rows: Mapping[str, Conditions]) -> dict[str, str]:
    """The rows that say what the recipe is worth: of the same images and samples, and without the target's."""
    its = rows[recipe]

    def those(name: str, wanted: Callable[[Conditions], bool]) -> str:
        return ", ".join(row for row, used in rows.items() if row != recipe and used.name == name and wanted(used))

    def same(row: Conditions) -> bool:
        return (row.uses, row.images) == (its.uses, its.images)

    explaining = {"deepall with the same images and samples": those("deepall", same)}
    if "target" in its.uses:
        explaining["itself without the target's samples"] = those(
            "recipe", lambda row: row.images == its.images and row.uses == its.uses - {"target"}
        )
    if "augmented" in its.uses:
        what = f"fedavg with the same images{' and momentum' if its.momentum else ''}"
        explaining[what] = those("fedavg", lambda row: same(row) and row.momentum == its.momentum)
    return dict(reversed(explaining.items()))


_OF_THE_RUN = "mini_batches"
"""A record has the budget of every site in the place of this field."""
_NOT_WRITTEN: Mapping[str, Any] = {"steps": None, "accumulate": 1, "compile": False}
"""Fields that records have where they are not these."""


def otherwise(result: RunResult, other: RunResult) -> dict[str, Any]:
    """The fields of the training section in which a run differs from another, with its own values.

    Example:
        >>> made = RunResult.model_construct
        >>> fast, slow = (made(options={"training": {"lr": rate, "rounds": 3}}) for rate in (0.5, 0.1))
        >>> otherwise(fast, slow)
        {'lr': 0.5}
    """
    section, others = _training(result), _training(other)
    return {
        name: value
        for name, value in section.items()
        if name not in (_OF_THE_RUN, *SAME_BITS) and name in others and _differ(value, others[name])
    }


def _differ(value: object, other: object) -> bool:
    """Whether two values differ, but for parts that a record of an earlier version has not."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return any(value[part] != other[part] for part in value if part in other)
    return value != other


def trained_note(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[Note]:
    """Which rows were trained with which values, for the fields in which rows differ."""
    first = {result.method: result for result in reversed(results) if result.method in methods}
    rows = [first[name] for name in methods if name in first]
    parts = []
    for name in dict.fromkeys(name for row in rows for name in otherwise(row, rows[0])):
        values: dict[str, list[str]] = {}
        for row in rows:
            values.setdefault(yaml_value(_training(row).get(name)), []).append(row.method)
        parts.append(f"{name} " + ", ".join(f"{value} ({', '.join(those)})" for value, those in values.items()))
    if parts:
        yield Note("trained", f"Rows were trained with settings of their own: {'; '.join(parts)}.")


def _training(result: RunResult) -> Mapping[str, Any]:
    section = result.options.get("training")
    return {**_NOT_WRITTEN, **section} if isinstance(section, Mapping) else {}
