"""PromptFL: FedAvg of the words in front of the classes' names, as vectors.

Guo, Guo, Wang, Tang, Xu: PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models. IEEE TMC
2023; the prompts are those of Zhou, Yang, Loy, Liu: Learning to Prompt for Vision-Language Models. IJCV 2022 (CoOp).

Setting: unseen target. CLIP's two towers are fixed at every site.
Wire: FedAvg's of the m vectors alone, 2·K·S(v): 4·m·w bytes for tokens of width w.

    s · x̂ · t̂_c(v),    t_c(v) = text tower of [v_1 … v_m, name of class c, "."]
    v ← Σ_k (N_k / ΣN) v_k              after E local epochs of cross-entropy at every site

Where papers and code differ, and what was chosen
 1. No code of PromptFL's authors is known to us. The prompt is that of CoOp (KaiyangZhou/CoOp @ ff61507c,
    trainers/coop.py): vectors from N(0, 0.02²), the name behind them. m = 16 is CoOp's.
 2. ``per_class`` is CoOp's class-specific context.
 3. The model's ``template`` plays no part.

Should reproduce: CoOp's logits and step (``promptfl_1``, ``promptfl_2`` of tests/references/README.md); zero_shot with
a template of m words, where the vectors are these words' embeddings.
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.on_clip import OnClip
from fedshift.models.network import Network
from fedshift.models.networks.clip import TextClassifier, TextEncoder


class PromptFL(OnClip, FedAvg):
    """FedAvg of the vectors in front of the classes' names."""

    traits = FedAvg.traits.derive(
        name="promptfl",
        citation="Guo et al., IEEE TMC 2023",
        group="unseen",
        advice="On CLIP's features (model clip_text): the fewest numbers that a site can send. A step runs the text "
        "tower once for all classes.",
        sends="vectors in front of the classes' names",
        tasks=("classification",),
        needs_classes="its classifier is made of texts of classes",
        relative_cost=3.0,
        tests=MethodTests(options={"context": tries(2)}),
    )

    context: PositiveInt = Field(16, description="m: vectors in front of a class's name")
    per_class: bool = Field(False, description="whether each class has vectors of its own (CoOp's CSC)")

    def trained_part(self, network: Network, texts: TextClassifier) -> Network:
        with drawn_from(derive_seed(network.seed, "promptfl")):
            return network.with_parts(network.features, Prompts(texts, self.context, self.per_class))


class Prompts(nn.Module):
    """The classifier whose texts begin with vectors that are trained."""

    tokens: Tensor

    def __init__(self, texts: TextClassifier, context: int, per_class: bool) -> None:
        super().__init__()
        self.encoder: TextEncoder = texts.encoder
        # Words that only hold the places of the vectors: a single letter is a token in every vocabulary.
        words = " ".join(["x"] * context)
        tokens = self.encoder.tokens(tuple(f"{words} {name}." for name in texts.names))
        self.register_buffer("tokens", tokens, persistent=False)
        shape = (len(texts.names), context) if per_class else (context,)
        self.context = nn.Parameter(torch.randn(*shape, self.encoder.token_width) * 0.02)

    def forward(self, features: Tensor) -> Tensor:
        texts = self.encoder.features(self.tokens, self.context)
        return self.encoder.scale * features @ texts.t()
