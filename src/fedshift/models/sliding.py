"""What a network says of whole samples, also where it reads parts of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedshift.extras import import_extra

OVERLAP = 0.25
"""Share of a part that the next one repeats: MONAI's default."""


def scores_of(network: Callable[[Tensor], Tensor], inputs: Tensor, patch: tuple[int, int, int] | None) -> Tensor:
    """The scores of every pixel: of whole samples at once, or of parts side by side, by MONAI.

    Where parts overlap it is their mean, with the weights of a Gaussian around each part's centre.

    ``network``: says the scores of a batch, (n, structures, …). ``inputs``: the batch, (n, c, …). ``patch``: size of
    the parts; None: whole samples. Raises UserError: MONAI is needed and not installed.
    """
    if patch is None:
        return network(inputs)
    inferers = import_extra("monai.inferers", extra="volumes", what="data.patch")
    scores: Tensor = inferers.sliding_window_inference(
        inputs, patch, sw_batch_size=4, predictor=network, overlap=OVERLAP, mode="gaussian"
    )
    return scores
