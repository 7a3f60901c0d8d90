"""Several graphics cards."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.experiment.fits.about import About
from fedshift.federation.local.cards import cards_of


def fits(about: About) -> Iterator[str]:
    """Say where cards stay idle, and where bits may differ between runs."""
    cards, processes = cards_of(about.experiment.device), about.engine.processes
    if len(cards) > processes:
        yield (
            f"device: {processes} of {len(cards)} cards train: raise engine.parallel_runs, or for one long run "
            "engine.workers"
        )
    kinds = sorted({card.kind for card in cards})
    if len(kinds) > 1:
        yield f"device: the cards are of several kinds ({', '.join(kinds)}): a run's last bits depend on which it gets"
