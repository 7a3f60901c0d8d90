"""The sites of the sums that a site took part in, for the life of its project.

Two sums of like models whose sites differ by a few show the models of these (So et al., Securing Secure Aggregation,
AAAI 2023). That any two sets differ by at least m sites is not enough: of four such sets an integer combination can be
of fewer. Here each site has one set, so the sets of the honest sites are a partition of them, and a linear combination
of sums has the same factor for all honest sites of a set: it is of all of these or of none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from pydantic import ValidationError

from fedshift.deploy.chained_log import append_line, checked_lines
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.errors import FedshiftError, Refused
from fedshift.federation.plain_values import Frozen
from fedshift.files import flush_folder, hold_lock

ROSTERS, LOCK = "rosters.jsonl", "rosters.lock"
_LEFT = (
    "where one has left for good, a person at each site writes the new set into its SITE.yaml (policy.roster: [...]), "
    "and the next experiment begins from another start"
)


class _Line(Frozen):
    """A line of the record. What chains it to the others is read by `checked_lines`."""

    roster: tuple[str, ...]


class Rosters:
    """The record of one site: a line for each set of sites that differs from the one before it.

    Args:
        log: the site's audit log, whose lines say how long the record was when they were written; None: not compared.
    """

    def __init__(self, memory: Path, site: str, policy: Policy, log: AuditLog | None = None) -> None:
        self._file, self._lock = memory / ROSTERS, memory / LOCK
        self._site, self._rule, self._log = site, policy.roster, log
        memory.mkdir(parents=True, exist_ok=True)

    @property
    def one_set(self) -> bool:
        """Whether the site takes part in sums of one set of sites only."""
        return self._rule != "any"

    def recorded_sets(self) -> list[list[str]]:
        """The sets, oldest first; Refused if the record was changed, or is shorter than the audit log says."""
        try:
            known = [list(_Line.model_validate_json(line).roster) for line in checked_lines(self._file)]
        except (FedshiftError, ValidationError) as error:
            raise Refused(f"site '{self._site}': {error}") from None
        counted = self._log.rosters if self._log is not None else 0
        if len(known) < counted:
            raise Refused(
                f"site '{self._site}': {self._file} has {len(known)} of the {counted} sets of sites that the "
                "audit log counts: put the file back; without it the site masks nothing"
            )
        return known

    def sets(self) -> list[list[str]]:
        """The sets of sites of all sums, oldest first, with that of an earlier version if no other is known."""
        older = self._log.older_roster if self._log is not None else []
        return self.recorded_sets() or ([older] if older else [])

    def check(self, roster: Sequence[str]) -> int:
        """How many sets are recorded; Refused if the site may not mask for these sites."""
        known = self.recorded_sets()
        allowed = self._allowed_set(known) or list(roster)
        if self.one_set and allowed != list(roster):
            other = sorted({*allowed} ^ {*roster})
            raise Refused(
                f"site '{self._site}' takes part in sums of {', '.join(allowed)}, and not of a set that differs by "
                f"{', '.join(other)}: the difference of two sums shows the models of these (rule policy.roster); let "
                f"all of them take part, or write training.privacy; {_LEFT}"
            )
        return len(known)

    def check_present(self, sites: Collection[str]) -> None:
        """Raise Refused if a site of the one set is absent from an experiment of these sites."""
        allowed = self._allowed_set(self.recorded_sets()) if self.one_set else []
        absent = [site for site in allowed if site not in sites]
        if absent:
            raise Refused(
                f"site '{self._site}' takes part in sums of {', '.join(allowed)} only (rule policy.roster), and "
                f"{', '.join(absent)} takes no part: let all of them take part, or write training.privacy; {_LEFT}"
            )

    def _allowed_set(self, known: Sequence[list[str]]) -> list[str]:
        """The one set of sites that the rule allows; empty if the first sum decides.

        An earlier version's sums count: it wrote their sites in the audit log alone.
        """
        if isinstance(self._rule, tuple):
            return list(self._rule)
        older = self._log.older_roster if self._log is not None else []
        return known[-1] if known else older

    def note(self, roster: Sequence[str], run: str) -> int:
        """As `check`, and write the set down before anything masked leaves. Again it changes nothing."""
        with hold_lock(self._lock):
            number = self.check(roster)
            if number and self.recorded_sets()[-1] == list(roster):
                return number
            try:
                append_line(self._file, {"roster": list(roster), "run": run}, flush=True)
                flush_folder(self._file.parent)
            except OSError as error:
                raise Refused(
                    f"site '{self._site}' cannot write {self._file}: {error.strerror}; nothing was sent"
                ) from None
            return number + 1
