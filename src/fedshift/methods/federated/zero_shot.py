"""Zero-shot: CLIP's own classifier, made of the texts of the classes. Nobody trains, nothing is sent.

Radford et al.: Learning Transferable Visual Models From Natural Language Supervision. ICML 2021, section 3.1.

Setting: unseen target; the row that every other one on CLIP has to beat.
Wire: nothing.

    s · x̂ · t̂_c        x̂, t̂_c: features of an image and of the text of class c, of length 1; s: CLIP's scale

Where paper and code differ, and what was chosen
 1. The paper averages many templates for ImageNet; here it is the one of the model's ``template``.
 2. Images come from the cache of features, which has 16 bits.

Should reproduce: the logits of transformers' CLIPModel of the same folder (to 1e-6 without the cache).
"""

from __future__ import annotations

from fedshift.federation.federation import Federation
from fedshift.methods.base import State
from fedshift.methods.on_clip import OnClip
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.models.networks.clip import TextClassifier


class ZeroShot(OnClip):
    """CLIP's classifier as it is."""

    traits = Traits(
        name="zero_shot",
        citation="Radford et al., ICML 2021",
        group="unseen",
        advice="On CLIP's features (model clip_text): the first row of every table there, at no cost.",
        sends="nothing",
        needs_classes="its classifier is made of texts of classes",
        memory_names=(),
        takes_plug_ins=False,
        thaws=False,
    )

    def trained_part(self, network: Network, texts: TextClassifier) -> Network:
        return network

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return 0

    def round(self, federation: Federation, state: State) -> State:
        return state.advance(state.weights, report={"losses": {}})
