"""The picture of a leakage audit: originals above their reconstructions."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedshift.deploy.audit.cases import Case
from fedshift.deploy.audit.leakage import EXCHANGES
from fedshift.report.plots import INK, PAPER

_MOST = 8
_TITLES = {"batch": "gradient of one mini-batch", "epoch": "model after one epoch"}


def picture(cases: Sequence[Case]) -> bytes:
    """A PNG with a row for each size and attack, a column for each exchange and number of sites in the sum.

    Each place shows 8 originals above their reconstructions.
    """
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys((case.batch, case.attack) for case in cases))
    columns = list(dict.fromkeys((exchange, case.sites) for exchange in EXCHANGES for case in cases))
    places = {(case.batch, case.attack, case.exchange, case.sites): case for case in cases}
    figure = Figure(figsize=(5.5 * len(columns), 0.6 + 1.6 * len(rows)), layout="constrained", facecolor=PAPER)
    every = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes, (size, attack, exchange, sites) in zip(
        every.flat, [(*row, *column) for row in rows for column in columns], strict=True
    ):
        axes.set_axis_off()
        case = places.get((size, attack, exchange, sites))
        if case is None:
            continue
        axes.imshow(_mosaic(case), vmin=0, vmax=1, cmap="gray", interpolation="nearest")
        assert case.ssim is not None
        score = sum(case.ssim) / len(case.ssim)
        of = f", sum of {sites} sites" if sites > 1 else ""
        title = f"{_TITLES[exchange]}{of}, size {size}, {attack}: SSIM {score:.2f}"
        axes.set_title(title, fontsize=8, color=INK, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def _mosaic(case: Case) -> npt.NDArray[np.float32]:
    """Two rows of up to 8 images with white lines between them: (h, w) grey, or (h, w, 3)."""
    lines = []
    for images in (case.originals, case.reconstructions):
        shown = images[:_MOST].transpose(0, 2, 3, 1)
        if shown.shape[3] != 3:  # grey, or channels that are not colours
            shown = shown.mean(axis=3, keepdims=True)
        # Every picture is as wide as eight images, so that all have the same scale.
        blank = np.ones((_MOST - len(shown), *shown.shape[1:]), dtype=np.float32)
        framed = np.pad(np.concatenate([shown, blank]), ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1)
        lines.append(np.concatenate(list(framed), axis=1))
    whole = np.concatenate(lines, axis=0)
    return whole if whole.shape[2] == 3 else whole[:, :, 0]
