"""What sentences claim of methods, recomputed from the committed results: ``python benchmarks/claims.py`` prints it.

claims.yaml has a line for each difference that a sentence quotes. `recompute` computes its numbers again;
`p_values_without_claim` finds a p in a sentence that is not the p of the gain beside it.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fedshift.evaluation.records import Selection
from fedshift.evaluation.significance import Comparison, compare
from fedshift.files import plain_yaml
from fedshift.report.collect import Collected, collect
from fedshift.report.differences import p_value
from summarise import lines_of

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PROSE = (
    ROOT / "README.md",
    *sorted(HERE.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "src" / "fedshift" / "methods" / "index.json",
    *sorted((ROOT / "src" / "fedshift" / "methods").rglob("*.py")),
)
"""Where sentences may quote a p: pages, the advice of all methods in their index, and the docstrings of modules."""
_P = re.compile(r"\bp( here)?\s(=|<|≤|>)\s*(\d?\.\d+)")
_GENERATED = re.compile(r"<!-- (?:table|attacks) .*?<!-- end -->", re.DOTALL)
_LEVEL = "< 0.05"
"""A level is no result."""
_BEFORE, _AFTER = 400, 150
"""How far from a p its gain may stand, in letters; after it only where none stands before."""


class Claim(BaseModel):
    """A difference between two methods that a sentence quotes.

    Attributes:
        page: the file of the sentence, from the repository's root; several files may say the same.
        results: the folder below ``results/``; two folders where the methods ran in different ones.
        first, second: the methods; the gain is first − second.
        gain: in points, on average over the targets that both have.
        p: with targets as clusters, as printed, after Holm's correction over the lines of the table; "–" without test.
        here: over seeds or splits, of these targets only, likewise.
        select: the selection rule.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    page: Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
    results: Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
    first: str
    second: str
    gain: float
    p: str = Field(pattern=r"^(–|< 0\.001|[01]\.\d{3})$")
    here: str = Field(pattern=r"^(–|< 0\.001|[01]\.\d{3})$")
    select: Selection = "last"

    def __str__(self) -> str:
        folders = " and ".join(self.results)
        return f"{folders}: {self.first} − {self.second} {self.gain:+.2f}, p {self.p}, here {self.here}"


def claims() -> list[Claim]:
    """Every claim, in the order of the file."""
    pages = plain_yaml((HERE / "claims.yaml").read_bytes())
    assert isinstance(pages, list)
    return [Claim.model_validate(line) for line in pages]


def recompute(claim: Claim) -> Claim:
    """The same claim with its numbers from the committed results.

    Raises:
        LookupError: the results do not have the comparison, or its table does not.
    """
    comparison, p, here = _within(claim) if len(claim.results) == 1 else _between(claim)
    if comparison.seeds is None:
        raise LookupError(f"{claim}: no seed has every target of both")
    gain = round(comparison.seeds.mean, 2) + 0.0
    return claim.model_copy(update={"gain": gain, "p": p_value(p), "here": p_value(here)})


def _within(claim: Claim) -> tuple[Comparison, float | None, float | None]:
    """A line of a table, corrected with all of its lines."""
    name = f"{claim.first} − {claim.second}"
    lines = lines_of(claim.results[0], _results(claim.results[0]), claim.select)
    line = next((line for line in lines if line.name == name), None)
    if line is None:
        raise LookupError(f"{claim}: the table does not test this; add the pair to PAIRS in summarise.py")
    return line.comparison, line.corrected, line.here


def _between(claim: Claim) -> tuple[Comparison, float | None, float | None]:
    """Methods of two tables: a comparison of its own."""
    sides = zip(claim.results, (claim.first, claim.second), strict=True)
    first, second = ([result for result in _results(name).results if result.method == method] for name, method in sides)
    comparison = compare(first, second, claim.select)
    if comparison is None:
        raise LookupError(f"{claim}: they share no target and seed")
    p, here = (test.p if test is not None else None for test in (comparison.clustered, comparison.seeds))
    return comparison, p, here


@cache
def _results(name: str) -> Collected:
    return collect(RESULTS / name)


def sentences(page: Path) -> str:
    """The text of a page that no program wrote."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    return _GENERATED.sub("", text)


def p_values_without_claim(page: Path, known: list[Claim]) -> list[str]:
    """Every p in the sentences of ``page`` that the page's claims do not have for the nearest gain before it."""
    text = re.sub(r'"\s*\n\s*f?"', "", sentences(page))
    there = [claim for claim in known if page.relative_to(ROOT).as_posix() in claim.page]
    gains = sorted(
        ((match.end(), claim) for claim in there for match in _gain(claim).finditer(text)), key=lambda gain: gain[0]
    )
    wrong = []
    for match in _P.finditer(text):
        here, sign, number = match.groups()
        quoted = number if sign == "=" else f"{sign} {number}"
        if quoted == _LEVEL:
            continue
        before = [position for position, _ in gains if match.start() - _BEFORE < position <= match.start()]
        after = [position for position, _ in gains if match.start() < position < match.end() + _AFTER]
        nearest = max(before, default=min(after, default=None))
        claimed = [claim for position, claim in gains if position == nearest]
        if quoted not in [claim.here if here else claim.p for claim in claimed]:
            wrong.append(f"{match.group()} … {text[max(0, match.start() - 60) : match.end()]!r}")
    return wrong


def _gain(claim: Claim) -> re.Pattern[str]:
    """The gain in a sentence, with two digits or rounded to one, with its sign or in words."""
    digits = "|".join(re.escape(f"{abs(claim.gain):.{digits}f}") for digits in (2, 1))
    return re.compile(rf"(?<![\d.])(?:{digits})(?!\d)")


def main() -> int:
    """Print every claim that is not what the results give, and every p that is no claim."""
    known = claims()
    wrong = [f"{claim}\n    is {now}" for claim in known if (now := recompute(claim)) != claim]
    wrong += [f"{page.relative_to(ROOT)}: {p}" for page in PROSE for p in p_values_without_claim(page, known)]
    print("\n".join(wrong))
    print(f"{len(known)} claims, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
