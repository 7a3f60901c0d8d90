"""The ledger of what a site has spent of its budget of privacy."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshift.chained_log import append_line, checked_lines
from fedshift.encryption import read_private, write_private
from fedshift.errors import Refused, UserError
from fedshift.federation.remote.policy import PrivacyBudget
from fedshift.files import locked
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon, together
from fedshift.functional.secret_noise import SECRET_BYTES

LEDGER, SECRET, LOCK = "privacy.jsonl", "privacy.secret", "privacy.lock"


class PrivacyLedger:
    """What a site spent, in a file of its memory: a line for each exchange, written before its answer leaves.

    An exchange has a *mark*, computed with the site's secret from all that decides its answer. An exchange that is
    repeated has the same mark, the same noise and the same answer, and is not counted again; if it was interrupted, the
    steps that it had not done before are. Any other exchange has different noise.
    """

    def __init__(self, memory: Path, site: str, budget: PrivacyBudget | None) -> None:
        """``budget``: None counts without a limit."""
        self.site, self.budget = site, budget
        self._memory, self._file = memory, memory / LEDGER

    def secret(self) -> bytes:
        """The site's secret, which the operating system draws when it is first asked for.

        Raises:
            UserError: its file cannot be read.
        """
        file = self._memory / SECRET
        with self._alone():
            if not file.exists():
                write_private(file, os.urandom(SECRET_BYTES))
        try:
            secret = read_private(file)
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None
        if len(secret) != SECRET_BYTES:
            raise UserError(f"{file}: holds {len(secret)} bytes, not {SECRET_BYTES}: put the file back as it was")
        return secret

    def mark(self, **of: Any) -> str:
        """A name that nobody without the secret can compute: of an exchange, or of the site's data."""
        text = json.dumps(of, sort_keys=True)
        return hmac.digest(self.secret(), f"mark\x1f{text}".encode(), hashlib.sha256).hex()

    def spent(self) -> list[NoisySteps]:
        """All steps that were ever answered for.

        Raises:
            FedshiftError: the ledger was changed.
        """
        return together(steps for _, steps in self._lines())

    def check(self, mark: str, steps: NoisySteps) -> None:
        """Raise Refused unless these steps could be paid for, or were."""
        lines = list(self._lines())
        if (further := _unpaid(lines, mark, steps)) is not None:
            self._check_all([one for _, one in lines], further)

    def pay(self, mark: str, steps: NoisySteps, **what: Any) -> None:
        """Write down what an exchange cost, as far as it does not stand there already.

        Args:
            mark: of the exchange.
            steps: its noisy steps.
            what: for people who read the file.

        Raises:
            Refused: the budget is too small. Then nothing is written, and nothing may leave the site.
        """
        with self._alone():
            lines = list(self._lines())
            further = _unpaid(lines, mark, steps)
            if further is None:
                return
            self._check_all([one for _, one in lines], further)
            try:
                append_line(self._file, {"mark": mark, **vars(further), **what}, flush=True)
            except OSError as error:
                raise UserError(f"cannot write {self._file}: {error.strerror}; nothing was sent") from None

    def epsilon(self, *further: NoisySteps) -> float:
        """ε of all steps so far and of ``further`` ones. Without a budget, the accountant assumes one of ε = 8."""
        budget = self.budget or PrivacyBudget(epsilon=8)
        return adaptive_epsilon([*self.spent(), *further], budget.epsilon, budget.delta)

    def _check_all(self, spent: list[NoisySteps], steps: NoisySteps) -> None:
        if self.budget is None:
            return
        epsilon, delta = self.budget.epsilon, self.budget.delta
        if adaptive_epsilon([*spent, steps], epsilon, delta) > epsilon:
            before = adaptive_epsilon(spent, epsilon, delta)
            raise Refused(
                f"site '{self.site}' has spent ε = {before:.3g} of {epsilon:g} at δ = {delta:g}, and what is asked "
                "costs more than is left (rule privacy.epsilon)"
            )

    def _lines(self) -> Iterator[tuple[str, NoisySteps]]:
        for line in map(json.loads, checked_lines(self._file)):
            yield line["mark"], NoisySteps(line["noise_multiplier"], line["sample_rate"], line["steps"])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process of this site writes its ledger or draws its secret."""
        with locked(self._memory / LOCK):
            yield


def _unpaid(lines: list[tuple[str, NoisySteps]], mark: str, steps: NoisySteps) -> NoisySteps | None:
    """The steps of an exchange that no line with its mark counts; None if there are none."""
    kind = steps.noise_multiplier, steps.sample_rate
    paid = sum(one.steps for known, one in lines if known == mark and (one.noise_multiplier, one.sample_rate) == kind)
    return replace(steps, steps=steps.steps - paid) if steps.steps > paid else None
