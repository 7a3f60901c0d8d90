"""The ledger of what a site has spent of its budget of privacy.

Three files of the site's memory know of each other, so that none can be lost, cut or taken from a backup by itself. The
ledger begins with a line that only the holder of the secret could write. Each of its lines says how long the audit log
was. The audit log says for each answer with noise what it cost, and how many lines the ledger had.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from fedshift.deploy.chained_log import append_line, checked_lines, is_undamaged, lines_of, objects_in
from fedshift.deploy.remote.policy import RECOVER, RECOVERED, AuditLog, PrivacyBudget, whole_number
from fedshift.deploy.site_file import SiteConfig
from fedshift.digests import Damaged
from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.files import hold_lock, set_aside
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon, together
from fedshift.functional.secret_noise import SECRET_BYTES

LEDGER, SECRET, LOCK = "privacy.jsonl", "privacy.secret", "privacy.lock"
_DEAR = NoisySteps(0.05, 1.0, 1)
"""What an exchange counts of which nothing is known: more than any budget that protects anybody."""


class LedgerLine(BaseModel):
    """A line of the ledger, as far as it is counted."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    mark: str  # of the exchange; of a line without steps, the secret's
    noise_multiplier: PositiveFloat  # as in `NoisySteps`, like ``sample_rate`` and ``steps``
    sample_rate: Annotated[float, Field(gt=0, le=1)]
    steps: Annotated[int, Field(ge=0)]
    audit: Annotated[int, Field(ge=0)] = 0  # bytes of the audit log when the line was written
    lines: Annotated[int, Field(ge=0)] = 0  # of the ledger, where the audit log repeats the line

    @property
    def noisy(self) -> NoisySteps:
        return NoisySteps(self.noise_multiplier, self.sample_rate, self.steps)


class PrivacyLedger:
    """What a site spent, in a file of its memory: a line for each exchange, written before its answer leaves.

    An exchange has a *mark*, computed with the site's secret from all that decides its answer. An exchange that is
    repeated has the same mark, the same noise and the same answer, and is not counted again; if it was interrupted, the
    steps that it had not done before are. Any other exchange has different noise. ``budget``: None counts without a
    limit. ``log``: the site's audit log, with which the ledger is compared; None: it is not.
    """

    def __init__(self, memory: Path, site: str, budget: PrivacyBudget | None, log: AuditLog | None = None) -> None:
        self.site, self.budget = site, budget
        self._memory, self._file, self._log = memory, memory / LEDGER, log
        self._known = 0
        """Lines that the ledger had when this process last read it."""
        self._cached: tuple[tuple[int, ...], list[LedgerLine]] | None = None
        """The file's number, size and time, and its lines."""

    def secret(self) -> bytes:
        """The site's secret, which the operating system draws when it is first asked for. UserError if its file cannot
        be read; Refused if it is not the one that the ledger was begun with, or is missing."""
        with self._alone():
            return self._secret(self._lines())

    def mark(self, **of: Any) -> str:
        """A name that nobody without the secret can compute: of an exchange, or of the site's data."""
        return _mark(self.secret(), **of)

    def lines(self) -> int:
        """How many lines the ledger has; Refused if it is not whole."""
        return len(self._lines())

    def noisy_steps(self) -> list[NoisySteps]:
        """All steps that were ever answered for; Refused if the ledger is not whole."""
        return together(line.noisy for line in self._lines() if line.steps)

    def check(self, mark: str, steps: NoisySteps) -> None:
        """Raise Refused unless these steps could be paid for, or were."""
        lines = self._lines()
        if (further := _unpaid(lines, mark, steps)) is not None:
            self._check_all([line.noisy for line in lines if line.steps], further)

    def pay(self, mark: str, steps: NoisySteps, **what: Any) -> dict[str, Any]:
        """Write down what an exchange cost, as far as it does not stand there already.

        Returns what the audit log has to say of it, under ``ledger``. Refused if the budget is too small. Then nothing
        is written, and nothing may leave the site. ``what``: for people who read the file.
        """
        with self._alone():
            lines = self._lines()
            further = _unpaid(lines, mark, steps)
            if further is not None:
                self._check_all([line.noisy for line in lines if line.steps], further)
                self._write(mark, further, what)
            return {"lines": self._known, "mark": mark, **vars(steps)}

    def epsilon(self, *further: NoisySteps) -> float:
        """ε of all steps so far and of ``further`` ones. Without a budget, the accountant assumes one of ε = 8."""
        budget = self.budget or PrivacyBudget(epsilon=8)
        return adaptive_epsilon([*self.noisy_steps(), *further], budget.epsilon, budget.delta)

    def fault(self) -> str | None:
        """Why the site may not answer with noise: what of ledger, secret and audit log does not fit; None if all do."""
        try:
            with self._alone():
                lines = self._lines()
                if (self._memory / SECRET).exists():
                    self._secret(lines)
                elif any(line.steps for line in lines):
                    raise self._without_secret()
        except UserError as error:
            return str(error)
        return None

    def recover(self, answers: Sequence[Mapping[str, Any]], counted: int = 0) -> list[str]:
        """Begin the ledger anew with all costs that the old one or the audit log has, if it does not fit.

        Exchanges of which no cost is known count as much as the dearest one; if none is known, more than any budget.
        Returns what was done, in words; nothing if all fits. ``counted``: lines that the ledger had by other evidence.
        """
        if self.fault() is None:
            return []
        with self._alone():
            costs, lost = self._costs(answers, counted)
            done = [f"kept as {aside.name}" for file in (self._file,) if (aside := set_aside(file)) is not None]
            secret = self._memory / SECRET
            if not _is_secret(secret):
                set_aside(secret)
                done.append("drew another secret: requests that come again have other noise, and count again")
            self._cached, self._known = None, 0
            self._begin()
            dearest = max(costs.values(), key=lambda steps: adaptive_epsilon([steps], 8.0, 1e-5), default=_DEAR)
            for mark, steps in costs.items():
                self._write(mark[0], steps, {"call": "recovered"})
            for number in range(lost):
                self._write(f"lost-{number}", dearest, {"call": "lost"})
        known = f"counted {len(costs)} exchanges of which the cost is known"
        return [*done, f"{known}, and {lost} of which it is not, as much as the dearest one"]

    def count_since(self, answers: Sequence[Mapping[str, Any]], *, everything: bool) -> None:
        """Count what may have been answered since a backup, of which the ledger in its place does not know.

        Refused if the ledger was changed. ``everything``: whether nobody knows more: then more than any budget counts;
        else one exchange more, as dear as the dearest one, which may have left without its line.
        """
        with self._alone():
            lines, (costs, _) = self._lines(), self._costs(answers, 0)
            for (mark, *_), steps in costs.items():
                if (further := _unpaid(lines, mark, steps)) is not None:
                    self._write(mark, further, {"call": "restored"})
            known = [_DEAR] if everything else list(costs.values())
            dearest = max(known, key=lambda steps: adaptive_epsilon([steps], 8.0, 1e-5), default=_DEAR)
            self._write(f"restored-{len(lines)}", dearest, {"call": "restored"})

    def _costs(
        self, answers: Sequence[Mapping[str, Any]], counted: int
    ) -> tuple[dict[tuple[str, float, float], NoisySteps], int]:
        """All costs that are known, by mark and kind, and how many exchanges there were beside them."""
        stored = lines_of(self._file)
        readable = [line for text in stored if is_undamaged(text) and (line := _line_of(text)) is not None]
        reported = [line for answer in answers if (line := _line_of(json.dumps(answer.get("ledger")))) is not None]
        costs: dict[tuple[str, float, float], NoisySteps] = {}
        for line in readable:
            if line.steps:
                key = line.mark, line.noise_multiplier, line.sample_rate
                costs[key] = replace(line.noisy, steps=line.steps + (costs[key].steps if key in costs else 0))
        known = len(readable) or 1  # without a file its first line, which counts nothing, is missing as well
        for line in reported:
            key = line.mark, line.noise_multiplier, line.sample_rate
            known += key not in costs
            if key not in costs or costs[key].steps < line.steps:
                costs[key] = line.noisy
        counted = max([counted, len(stored), *(line.lines for line in reported)])
        if not readable and not reported and (self._memory / SECRET).exists():
            counted = known + 1  # it was begun, and nothing says what for
        unsaid = set() if readable else {_exchange_of(answer) for answer in answers if _may_have_cost(answer)}
        return costs, max(0, counted - known, len(unsaid))

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

    def _lines(self) -> list[LedgerLine]:
        """All lines, once they were compared with what else knows of them."""
        lines = self._read()
        counted = max(self._known, self._log.ledger if self._log is not None else 0)
        if len(lines) < counted:
            raise self._refusal(f"{self._file} has {len(lines)} of {counted} lines")
        if not lines and (self._memory / SECRET).exists():
            raise self._refusal(f"{self._file} is missing, and {SECRET} is not new")
        if lines and self._log is not None and self._log.size < lines[-1].audit:
            raise self._refusal(f"{self._log.path} is shorter than it was when {LEDGER} was written")
        self._known = len(lines)
        return lines

    def _read(self) -> list[LedgerLine]:
        """The lines in the file, which is read again only if it was written since."""
        result = self._file.stat() if self._file.exists() else None
        stamp = (result.st_ino, result.st_size, result.st_mtime_ns) if result is not None else ()
        if self._cached is None or self._cached[0] != stamp:
            try:
                lines = [LedgerLine.model_validate_json(text) for text in checked_lines(self._file, RECOVER)]
            except ValidationError:
                raise self._refusal(f"{self._file} has a line that cannot be read") from None
            except FedshiftError as error:
                raise Refused(f"site '{self.site}': {error}") from None
            self._cached = stamp, lines
        return self._cached[1]

    def _refusal(self, what: str) -> Refused:
        return Refused(f"site '{self.site}' cannot tell what it has spent of its budget: {what}; {RECOVER}")

    def _without_secret(self) -> Refused:
        return Refused(f"site '{self.site}': {self._memory / SECRET} is missing, with which it has answered; {RECOVER}")

    def _secret(self, lines: Sequence[LedgerLine]) -> bytes:
        file = self._memory / SECRET
        if not file.exists():
            if any(line.steps for line in lines):
                raise self._without_secret()
            return self._begin()
        try:
            secret = read_private(file, RECOVER, older=SECRET_BYTES)
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None
        if len(secret) != SECRET_BYTES:
            raise Refused(f"{file}: holds {len(secret)} bytes, not {SECRET_BYTES}; {RECOVER}")
        begun = next((line for line in reversed(lines) if not line.steps), None)
        if begun is not None and begun.mark != _mark(secret, ledger=self.site):
            raise Refused(f"site '{self.site}': {file} is not the secret with which {LEDGER} was begun; {RECOVER}")
        return secret

    def _begin(self) -> bytes:
        """Begin the ledger with a line of the secret, which is drawn if there is none."""
        file = self._memory / SECRET
        secret = read_private(file, RECOVER, older=SECRET_BYTES) if file.exists() else os.urandom(SECRET_BYTES)
        self._write(_mark(secret, ledger=self.site), NoisySteps(1.0, 1.0, 0), {"call": "begin"})
        if not file.exists():  # a kill before this leaves a ledger that counts nothing: the next secret begins it again
            write_private(file, secret)
        return secret

    def _write(self, mark: str, steps: NoisySteps, what: Mapping[str, Any]) -> None:
        size = self._log.size if self._log is not None else 0
        try:
            append_line(self._file, {"mark": mark, **vars(steps), "audit": size, **what}, flush=True)
        except OSError as error:
            raise UserError(f"cannot write {self._file}: {error.strerror}; nothing was sent") from None
        self._known += 1

    def _alone(self) -> AbstractContextManager[None]:
        """Wait until no other process of this site writes its ledger or draws its secret."""
        return hold_lock(self._memory / LOCK)


def _mark(secret: bytes, **of: Any) -> str:
    return hmac.digest(secret, f"mark\x1f{json.dumps(of, sort_keys=True)}".encode(), hashlib.sha256).hex()


def _is_secret(file: Path) -> bool:
    """Whether a file holds a secret that can be gone on with."""
    try:
        return len(read_private(file, older=SECRET_BYTES)) == SECRET_BYTES
    except (FileNotFoundError, Damaged):
        return False


def _line_of(text: str) -> LedgerLine | None:
    """A line of a file that may be damaged; None if it is none."""
    try:
        return LedgerLine.model_validate_json(text)
    except ValidationError:
        return None


def _may_have_cost(answer: Mapping[str, Any]) -> bool:
    """Whether a line of an earlier fedshift's audit log may be of an answer with noise: those without have a score."""
    counted = answer.get("do") in ("call", "step", "measure") and not answer.get("refused") and not answer.get("again")
    return counted and "ledger" not in answer and "exposure" not in answer


def _exchange_of(answer: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(answer.get(name)) for name in ("run", "do", "call", "round", "exchange"))


def _unpaid(lines: Sequence[LedgerLine], mark: str, steps: NoisySteps) -> NoisySteps | None:
    """The steps of an exchange that no line with its mark counts; None if there are none."""
    kind = steps.noise_multiplier, steps.sample_rate
    paid = sum(line.steps for line in lines if line.mark == mark and (line.noise_multiplier, line.sample_rate) == kind)
    return replace(steps, steps=steps.steps - paid) if steps.steps > paid else None


def lost_records(config: SiteConfig) -> list[str]:
    """What does not fit of a site's audit log, its ledger of privacy and its secret: a line each."""
    try:
        log = AuditLog(config.audit_log)
    except FedshiftError as error:
        return [str(error)]
    fault = PrivacyLedger(config.memory, config.file.site, config.file.privacy, log).fault()
    return [] if fault is None else [fault]


def recover_records(config: SiteConfig) -> list[str]:
    """Begin anew what does not fit, with all that can be read; the files of before keep another name. Returns what was
    done, a line for each file; nothing if all fits."""
    done: list[str] = []
    answers, counted = list(objects_in(lines_of(config.audit_log))), 0
    try:
        log = AuditLog(config.audit_log)
    except FedshiftError:
        aside, counted = AuditLog.set_aside(config.audit_log)
        log = AuditLog(config.audit_log)
        done.append(f"audit log: {f'kept as {aside.name}, and ' if aside else ''}begun anew")
    ledger = PrivacyLedger(config.memory, config.file.site, config.file.privacy, log)
    if paid := ledger.recover(answers, counted):
        done.append(f"ledger of privacy: {'; '.join(paid)}; ε = {ledger.epsilon():.3g} in all")
    if done:
        rosters = max([log.rosters, *(whole_number(answer.get("rosters")) for answer in answers)])
        log.append(do=RECOVERED, done=done, rosters=rosters, ledger={"lines": ledger.lines()})
    return done
