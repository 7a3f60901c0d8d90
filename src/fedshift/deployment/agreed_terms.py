"""What a site has agreed to in its project: networks that it trains, splits of its data.

The first network whose update may leave, and the splits that the coordinator asks for first, are agreed to by
themselves. Others are refused and noted, until a person at the site agrees to them with ``fedshift site agree``. The
file is read at every request, so an agreement holds at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedshift.errors import Refused, UserError
from fedshift.federation.remote.policy import Policy
from fedshift.files import write_bytes
from fedshift.models.options import NetworkOptions

TERMS = "agreed.json"
_MOST_ASKED = 20
"""Refused terms of a kind that are noted."""
What = Literal["models", "splits"]


class AgreedTerms:
    """The terms of a site, in a file of its memory."""

    def __init__(self, memory: Path, site: str, policy: Policy) -> None:
        self._file, self._site, self._policy = memory / TERMS, site, policy

    def check_network(self, network: NetworkOptions, *, agree: bool) -> None:
        """Raise Refused unless the site trains this network; ``agree`` to it if it is the first."""
        rule, wanted = self._policy.models, network.model_dump(mode="json")
        if rule == "all" or (rule != "first" and wanted in rule):
            return
        if rule != "first":
            raise Refused(f"site '{self._site}' refuses this network (rule policy.models lists others)")
        self._check("models", [wanted], 1, f"policy.models: {rule}", agree)

    def check_splits(self, split: Mapping[str, Any], seeds: Sequence[int]) -> None:
        """Raise Refused unless the site splits its data so, with each of ``seeds``."""
        rule = self._policy.splits
        if rule != "all":
            shared = {"test_fraction": float(split["test_fraction"]), "split": str(split["split"])}
            wanted = [{**shared, "seed": int(seed)} for seed in seeds]
            self._check("splits", wanted, rule, f"policy.splits: {rule}", True)

    def _check(self, what: What, wanted: Sequence[Any], most: int, rule: str, agree: bool) -> None:
        terms = self._read()
        agreed, asked = terms[what]["agreed"], terms[what]["asked"]
        missing = [term for term in wanted if term not in agreed]
        if not missing:
            return
        if agreed or len(missing) > most:
            asked += [term for term in missing if term not in asked][: max(0, _MOST_ASKED - len(asked))]
            self._write(terms)
            raise Refused(
                f"site '{self._site}' has not agreed to these {what} (rule {rule}); a person there may, with fedshift "
                "site agree"
            )
        if agree:
            agreed += missing
            self._write(terms)

    def asked(self) -> dict[What, list[Any]]:
        """What was refused and may be agreed to."""
        return {what: term["asked"] for what, term in self._read().items()}

    def agreed(self) -> dict[What, list[Any]]:
        """What the site has agreed to."""
        return {what: term["agreed"] for what, term in self._read().items()}

    def agree(self) -> None:
        """Agree to all that was asked."""
        terms = self._read()
        for term in terms.values():
            term["agreed"] += term["asked"]
            term["asked"] = []
        self._write(terms)

    def _read(self) -> dict[What, dict[str, list[Any]]]:
        if not self._file.exists():
            return {"models": {"agreed": [], "asked": []}, "splits": {"agreed": [], "asked": []}}
        try:
            found: dict[What, dict[str, list[Any]]] = json.loads(self._file.read_text(encoding="utf-8"))
            return {what: {key: list(found[what][key]) for key in ("agreed", "asked")} for what in ("models", "splits")}
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{self._file}: cannot be read; remove it to agree anew to what is asked first") from None

    def _write(self, terms: Mapping[What, Any]) -> None:
        write_bytes(self._file, (json.dumps(terms, indent=1) + "\n").encode(), private=True)
