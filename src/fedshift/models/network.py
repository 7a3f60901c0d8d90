"""The one shape every network has: features, then a classifier, with named stages a method can ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedshift.errors import UserError, nearest


class Network(nn.Module):
    """A feature extractor followed by a classifier.

    features: maps a batch of inputs to (n, embedding_size).
    classifier: maps (n, embedding_size) to (n, classes).
    stages: stage name → path of the module whose output is that stage, from shallow to deep.
    alignment_stages: the stages that methods align by default (CSAC's set R).
    """

    def __init__(
        self,
        features: nn.Module,
        classifier: nn.Module,
        *,
        embedding_size: int,
        classes: int,
        stages: Mapping[str, str],
        alignment_stages: Sequence[str],
    ) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self.embedding_size = embedding_size
        self.classes = classes
        self.stages = dict(stages)
        self.alignment_stages = tuple(alignment_stages)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(inputs))
        return logits

    def at(self, source: int) -> Network:
        """What answers at the source of this number, counted in the order of the sources' names: all of it."""
        return self

    def with_stages(self, inputs: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and the outputs of the named stages, in the order asked for. Raises UserError for an unknown stage."""
        seen: dict[str, Tensor] = {}
        handles: list[RemovableHandle] = []
        for name in names:
            if name not in self.stages:
                raise UserError(f"the network has no stage '{name}'; {nearest(name, self.stages)}")

            def keep(_module: nn.Module, _inputs: object, output: Tensor, name: str = name) -> None:
                seen[name] = output

            handles.append(self.get_submodule(self.stages[name]).register_forward_hook(keep))
        try:
            logits = self(inputs)
        finally:
            for handle in handles:
                handle.remove()
        return logits, {name: seen[name] for name in names}
