"""How often sites exchange models (KD3A's r-strategy, Feng et al., ICML 2021; section 7.4.13)."""

from __future__ import annotations

from fedshift.errors import UserError


def communication_plan(samples: int, batch_size: int, epochs: int, rounds_per_epoch: float) -> tuple[int, int]:
    """Mini-batches of one pass between exchanges, and the number of exchanges.

    With r ≥ 1 exchanges per epoch a pass is the r-th part of the epoch. With r = 1/m a pass is the whole epoch, and the
    sources make m of them before each exchange, the target one. Rounded as Python rounds.

    samples: in one epoch of a site. rounds_per_epoch: r.
    Raises UserError when a number is not positive, r is neither 1 or more nor one over a whole number, or nothing is
    left of a pass or of the exchanges.
    """
    if min(samples, batch_size, epochs) < 1:
        raise UserError(
            f"samples, batch size and epochs must be at least 1, found {samples}, {batch_size} and {epochs}"
        )
    r = rounds_per_epoch
    # The negation also catches NaN.
    if not 0 < r < float("inf") or (r < 1 and abs(1 / r - round(1 / r)) > 1e-9):
        raise UserError(f"exchanges per epoch must be 1 or more, or 1 over a whole number like 0.2 and 0.5, found {r}")
    batches = round(round(samples / max(r, 1)) / batch_size)
    exchanges = round(epochs * r)
    if not batches:
        raise UserError(
            f"{r} exchanges per epoch of {samples} samples leave no batch of {batch_size} between them: lower one"
        )
    if not exchanges:
        raise UserError(f"{r} exchanges per epoch are less than one in {epochs} epochs: raise one")
    return batches, exchanges
