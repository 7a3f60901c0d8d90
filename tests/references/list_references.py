"""Lists with whom each method agrees: ``make references`` compares every entry anew and writes README.md beside this.

The page has a row for each method and repository. ``python tests/references/list_references.py METHOD`` prints every
entry of a method: what is compared, with whose function, how near, and what differs and why. `make references` shows
how far apart the numbers were just now, too, which depends on the processor.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from authors_numbers import COMPARED, FILES, Reference, references  # noqa: E402

PAGE = HERE / "README.md"
COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
BY_OTHERS = re.compile(r" \(by others; [^)]*\)")
"""What a source says where the authors' own code was looked for in vain."""
HEAD = """# Agreement with the authors' functions

A method is right when it agrees with numbers that somebody else's function gave. A row counts the comparisons with one
repository: inputs by formula, what the authors' functions of that commit gave on them, and the same through fedshift.
*Within* is the largest gap that a test allows. Where a number differs, the reason is named, and the test fails if it
agrees after all.

`python tests/references/list_references.py METHOD` prints every comparison: what, which file and function, how near,
what differs and why. `make references` compares all of them again and writes this page. Some repositories
are somebody else's, as the printed lines say.
"""


FURTHER = """Derivations from a paper use no automatic differentiation and nothing of the library. They were written
before the method was looked at. A test holds that every method is here or above.
"""

NAMED = {
    "alone": "ERM",
    "deepall": "ERM",
    "domain_mixup": "Mixup",
    "erm_plus_plus": "ERM++",
    "fedcmi": "FedSR",
    "fedl2r": "FedSR",
    "linear_probe": "FedAvg",
    "oracle": "ERM",
    "source_only": "ERM",
    "styles": "CCST",
}
"""A method of the index → the name of its entries, where they differ by more than capitals and marks."""

OTHERWISE = {
    "cmss": ("no public code: weights, losses and step, derived from the paper", "references/cmss_by_hand.py"),
    "fada": ("no public code: losses, gains, shares, aggregate, derived from the paper", "references/fada_by_hand.py"),
    "mdfnet": ("no public code: both kinds of epochs, clusters, mean, derived", "references/mdfnet_by_hand.py"),
    "metareg": ("no public code: the gradient of φ, derived from the paper", "methods/pooled/test_pooled_episodes.py"),
    "recipe": ("of this project; its parts are compared one by one", "methods/federated/test_recipe.py"),
    "recipe_unlabelled": ("of this project, as recipe", "methods/federated/test_recipe_unlabelled.py"),
    "silobn": ("no public code: rounds, statistics, a new centre, derived", "references/silobn_by_hand.py"),
    "zero_shot": ("the logits of transformers' CLIPModel", "methods/federated/test_clip_rows.py"),
}
"""A method without an entry → what it is compared with, and where in ``tests/``."""


def key(name: str) -> str:
    """A name without capitals and marks."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def without_evidence(methods: Iterable[str]) -> list[str]:
    """The methods that neither an entry nor a derivation holds."""
    compared = {key(reference.method) for _, reference in every()}
    return [name for name in methods if name not in OTHERWISE and key(NAMED.get(name, name)) not in compared]


def every() -> Iterator[tuple[str, Reference]]:
    """All entries with their file, by method."""
    for file in FILES:
        if (HERE / f"{file}.json").is_file():
            for reference in sorted(references(file).values(), key=lambda entry: entry.method.lower()):
                yield file, reference


def load_comparisons() -> None:
    """Import the tests, which say what they compare."""
    for path in sorted(HERE.glob("test_*.py")):
        importlib.import_module(path.stem)


def agreement(file: str, reference: Reference) -> str:
    """How near, of those outputs that are compared."""
    if reference.outputs.keys() <= reference.differences.keys():
        return "differs"
    if (file, reference.id) not in COMPARED:
        return "not compared yet"
    near = f"{reference.tolerance:g}"
    return f"{near}, in part" if reference.differences else near


def differences(reference: Reference) -> str:
    """What differs and why; outputs of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reference.differences.items():
        by_reason.setdefault(reason, []).append(name)
    found = [f"{', '.join(name.replace('_', ' ') for name in names)}: {why}" for why, names in by_reason.items()]
    return " ".join([*found, reference.tolerance_reason]).strip()


def page() -> str:
    """The page as it should be."""
    load_comparisons()
    groups: dict[tuple[str, str], list[str]] = {}
    for file, reference in every():
        repository = reference.source.partition(",")[0]
        commit = COMMIT.search(reference.source)
        others = BY_OTHERS.search(reference.source)
        source = (f"{repository}@{commit[0][:8]}" if commit else repository) + (others[0] if others else "")
        groups.setdefault((reference.method, source), []).append(agreement(file, reference))
    lines = [HEAD, "| method | whose functions | compared | within | differ |", "|---|---|---:|---:|---:|"]
    for (method, source), found in groups.items():
        near = [float(text.partition(",")[0]) for text in found if text[0].isdigit()]
        differ = sum("differs" in text or "in part" in text for text in found)
        within = f"{max(near):g}" if near else "–"
        lines.append(f"| {method} | {source} | {len(found)} | {within} | {differ or '–'} |")
    lines += ["", FURTHER, "| method | compared with | in `tests/` |", "|---|---|---|"]
    lines += [f"| `{name}` | {what} | `{where}` |" for name, (what, where) in OTHERWISE.items()]
    as_others = ", ".join(f"`{name}` as {entries}" for name, entries in NAMED.items())
    return "\n".join(lines) + f"\n\nCompared as others are: {as_others}.\n"


def entries(method: str) -> list[str]:
    """Every comparison of a method, in words.

    Raises:
        LookupError: no comparison is of this method.
    """
    load_comparisons()
    found = [(file, one) for file, one in every() if key(one.method) == key(NAMED.get(method, method))]
    if not found:
        known = sorted({one.method for _, one in every()}, key=str.lower)
        raise LookupError(f"nothing is compared for {method}; known: {', '.join(known)}")
    texts = []
    for file, one in found:
        why = differences(one)
        texts.append(f"{one.what}\n    {one.source}\n    {agreement(file, one)}" + (f"\n    {why}" if why else ""))
    return texts


def summary() -> Sequence[str]:
    """A line for each entry: the largest gap of this run."""
    lines = []
    for file, reference in every():
        gaps = [gap for name, gap in reference.gaps.items() if name not in reference.differences]
        found = f"{max(gaps):8.1e}" if gaps else f"{agreement(file, reference):>8}"
        lines.append(f"{found}  {reference.id:28} {reference.what}")
    return lines


def main() -> int:
    """Write the page, compare everything, print the gaps; or print the entries of the methods that are named."""
    importlib.import_module("conftest")  # it shows the way to the helpers of these tests
    if sys.argv[1:]:
        try:
            print("\n\n".join(text for method in sys.argv[1:] for text in entries(method)))
        except LookupError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    failed = pytest.main([str(HERE), "--quiet", "-p", "no:cacheprovider"])
    print("\n".join(summary()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
