"""Each domain in turn trains without labels, and is measured: how a model does at a site without labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from fedshift.data.domain import DataSet, Rows
from fedshift.errors import UserError
from fedshift.experiment.protocols.base import DeployedProtocol, Split, check_groups
from fedshift.experiment.protocols.one_target import OneTarget, check_known
from fedshift.functional.poisoning import wrong_labels


class AdaptToOne(OneTarget):
    """Each chosen domain in turn trains without labels and is measured on its held-out samples; all others are sources.

    This measures how a model does at a site without labels. The target's labels are used to measure it and to choose
    its held-out samples, a share of every class, as in the literature. No method and no call sees them.
    """

    question: ClassVar[str] = "Does it work at a site without labels? Each target in turn took part without its labels."
    next_target: ClassVar[str] = "site that takes part without labels"

    kind: Literal["adapt_to_one"] = Field("adapt_to_one", description="the protocol")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="share of every domain that is held out; the target is measured on its held-out samples"
    )
    wrong_labels: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict, description="source → share of its training labels that is replaced by wrong ones"
    )
    wrong_labels_rule: Literal["uniform", "shift"] = Field(
        "uniform",
        description="uniform: wrong labels are drawn from the other classes; shift: the next class (released code)",
    )

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = super()._as_before(plain)
        if self.sites_each == 1:  # runs from before sources could be cut here keep their settings
            for name in ("sites_each", "cut_by", "label_skew"):
                written.pop(name, None)
        return written

    def _check_named(self, data: DataSet) -> None:
        """Raise UserError where fields name no domain, or a source with wrong labels is also a target or is cut."""
        super()._check_named(data)
        check_known("wrong_labels", self.wrong_labels, data)
        targets = data.domains if self.targets == "all" else self.targets
        for name in self.wrong_labels:
            if name in targets and name not in self.drop:
                others = ", ".join(other for other in targets if other != name)
                raise UserError(
                    f"protocol.wrong_labels: '{name}' is a target too, and a run with it as the target has no wrong "
                    f"label in it: write protocol.targets: [{others}]"
                )
        if self.wrong_labels and self.cuts_sources:
            cuts = "sites_each" if self.pool is None else "pool"
            raise UserError(f"protocol.wrong_labels: names whole sources, which protocol.{cuts} cuts; leave one out")

    def _check_target_rows(self, data: DataSet, target: str, rows: tuple[Rows, Rows]) -> None:
        unlabelled, measured = rows
        if len(unlabelled) == 0 or len(measured) == 0:
            check_groups(data, target)
            raise UserError(
                f"protocol: '{target}' has {len(unlabelled)} samples to adapt to and {len(measured)} to be measured "
                "on; change protocol.test_fraction"
            )

    def with_wrong_labels(self, data: DataSet, split: Split, seed: int) -> DataSet:
        """The data with a share of wrong training labels at malicious sources."""
        if not self.wrong_labels:
            return data
        if data.task != "classification":
            raise UserError(
                "protocol.wrong_labels: masks, numbers and times have no other class to replace the true one; leave it "
                "out"
            )
        domains = dict(data.domains)
        for name, share in self.wrong_labels.items():
            if name not in split.train:  # not a source in this run
                continue
            labels = domains[name].labels.copy()
            rows = split.train[name]
            true = labels[rows].astype(np.int64)
            labels[rows] = wrong_labels(true, share, len(data.classes), seed, self.wrong_labels_rule)
            domains[name] = replace(domains[name], labels=labels)
        return replace(data, domains=domains)

    def for_deployment(self) -> DeployedProtocol:
        """The same protocol, unless labels are to be wrong, which only a simulation can do."""
        if self.wrong_labels:
            raise UserError("protocol.wrong_labels: only a simulation can make labels wrong; sites keep theirs")
        return super().for_deployment()
