"""What a site has agreed to in its project: networks that it trains, splits of its data, certificates of other sites.

The site agrees by itself to the first network whose update may leave, and to the splits that the coordinator asks for
first. Others are refused and noted, until a person at the site agrees to them with ``fedshift site agree``. The
file is read at every request, so an agreement holds at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedshift.errors import Refused, UserError
from fedshift.federation.remote.policy import Policy
from fedshift.files import locked, write_bytes
from fedshift.models.options import NetworkOptions

TERMS = "agreed.json"
_MOST_ASKED = 20
"""How many refused terms of a kind are remembered, for a person to agree to."""
What = Literal["models", "splits", "peers"]
_ALL: tuple[What, ...] = ("models", "splits", "peers")


class AgreedTerms:
    """The terms of a site, in a file of its memory."""

    def __init__(self, memory: Path, site: str, policy: Policy) -> None:
        self._file, self._site, self._policy = memory / TERMS, site, policy
        self._lock = memory / "agreed.lock"

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

    def check_peers(self, found: Mapping[str, str]) -> None:
        """Raise Refused unless each site signs with the certificate that this site has on record for it.

        Args:
            found: site → SHA-256 of the certificate that it signs with.
        """
        with locked(self._lock):
            self._check_peers(found)

    def _check_peers(self, found: Mapping[str, str]) -> None:
        terms = self._read()
        known = {**{term["site"]: term["certificate"] for term in terms["peers"]["agreed"]}, **self._policy.peers}
        first = {} if self._policy.secure == "required" else {site: found[site] for site in found if site not in known}
        wrong = [site for site in found if {**first, **known}.get(site) != found[site]]
        listed = [{"site": site, "certificate": found[site]} for site in wrong or first]
        if first and not wrong:
            terms["peers"]["agreed"] += listed
            self._write(terms)
        if not wrong:
            return
        if any(site in self._policy.peers for site in wrong):
            site = next(site for site in wrong if site in self._policy.peers)
            raise Refused(
                f"site '{self._site}': the certificate of '{site}' is not the one that rule policy.peers lists: it was "
                "issued anew, or somebody else uses its name"
            )
        self._note(terms, "peers", listed)
        raise Refused(
            f"site '{self._site}' has not agreed to the certificate of '{wrong[0]}' (rule policy.peers); a person "
            "there may, with fedshift site agree, after comparing it with what fedshift site check shows at that site"
        )

    def _note(self, terms: dict[What, dict[str, list[Any]]], what: What, missing: Sequence[Any]) -> None:
        """Write down what was asked for and is not agreed to."""
        asked = terms[what]["asked"]
        asked += [term for term in missing if term not in asked][: max(0, _MOST_ASKED - len(asked))]
        self._write(terms)

    def _check(self, what: What, wanted: Sequence[Any], most: int, rule: str, agree: bool) -> None:
        with locked(self._lock):
            self._check_alone(what, wanted, most, rule, agree)

    def _check_alone(self, what: What, wanted: Sequence[Any], most: int, rule: str, agree: bool) -> None:
        terms = self._read()
        agreed = terms[what]["agreed"]
        missing = [term for term in wanted if term not in agreed]
        if not missing:
            return
        if agreed or len(missing) > most:
            self._note(terms, what, missing)
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

    def agree(self, shown: Mapping[What, Sequence[Any]]) -> None:
        """Agree to what was ``asked`` and shown to a person. What was asked since waits for the next time."""
        with locked(self._lock):
            terms = self._read()
            anew = {term["site"] for term in shown.get("peers", ())}  # a site has one certificate at a time
            terms["peers"]["agreed"] = [term for term in terms["peers"]["agreed"] if term["site"] not in anew]
            for what, term in terms.items():
                seen = shown.get(what, ())
                term["agreed"] += [one for one in seen if one not in term["agreed"]]
                term["asked"] = [one for one in term["asked"] if one not in seen]
            self._write(terms)

    def _read(self) -> dict[What, dict[str, list[Any]]]:
        if not self._file.exists():
            return {what: {"agreed": [], "asked": []} for what in _ALL}
        try:
            found: dict[What, dict[str, list[Any]]] = json.loads(self._file.read_text(encoding="utf-8"))
            found.setdefault("peers", {"agreed": [], "asked": []})  # an earlier fedshift did not write them
            return {what: {key: list(found[what][key]) for key in ("agreed", "asked")} for what in _ALL}
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{self._file}: cannot be read; remove it to agree anew to what is asked first") from None

    def _write(self, terms: Mapping[What, Any]) -> None:
        write_bytes(self._file, (json.dumps(terms, indent=1) + "\n").encode(), private=True)
