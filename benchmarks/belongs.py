"""Whether every committed result belongs to its experiment file: ``python benchmarks/belongs.py``.

``commands.sh`` says with which command each folder of results was made. A result belongs to that command if
the experiment that the command describes today has a method of the result's name with the result's options, and the
same data, protocol, network and training. It is compared as `fedshift run` compares a folder before it resumes it.
What does not belong is printed, one line each, and the command then ends with 1, as it does where there was
nothing to compare.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedshift.evaluation.records import RunResult
from fedshift.experiment.config.experiment import Experiment, parse
from fedshift.experiment.config.experiment_file import override_field
from fedshift.experiment.plan import common_settings
from fedshift.experiment.runs.run_identity import comparable, first_difference
from fedshift.report.collect import collect

HERE = Path(__file__).parent
RESULTS = HERE / "results"
_SECTIONS = ("method", "protocol", "model", "training", "data")
_OF_A_RUN = {"training": "mini_batches", "data": "fingerprint"}
"""What a result says beyond the experiment file: it follows from the data."""
_RUN = re.compile(r"^fedshift run (?:'[^']*'|[^'\n])*", re.MULTILINE)


def commands() -> Iterator[tuple[str, Experiment]]:
    """The commands of ``commands.sh``, each with the experiment that it describes."""
    script = (HERE / "commands.sh").read_text(encoding="utf-8")
    for command in _RUN.findall(script.replace("\\\n", " ")):
        words = shlex.split(command, comments=True)[2:]
        options = yaml.safe_load((HERE.parent / words[0]).read_text(encoding="utf-8"))
        for override in words[1 : words.index("--runs")]:
            override_field(options, override)
        yield shlex.join(words[: words.index("--runs")]), parse(options, HERE.parent)


def difference(result: RunResult, experiment: Experiment) -> str | None:
    """Why ``result`` is not one of the experiment's, None if it is."""
    described = next((method for method in experiment.methods if method.display == result.method), None)
    if described is None:
        return "the file has no method of this name"
    there = comparable(result.options)
    here = comparable(common_settings(experiment, described))
    for section in _SECTIONS:
        difference = first_difference(_section(there, section), _section(here, section), section)
        if difference is not None:
            path, old, new = difference
            return f"{path} is {old!r} in the result and {new!r} in the file"
    return None


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings[name].items() if key != _OF_A_RUN.get(name)}


def main() -> int:
    strangers: list[str] = []
    checked = 0
    # A folder can come from several commands, each with some of its methods.
    described: dict[str, list[tuple[str, Experiment]]] = {}
    for command, experiment in commands():
        described.setdefault(experiment.name, []).append((command, experiment))
    for name, experiments in sorted(described.items()):
        for result in collect(RESULTS / name).results:
            checked += 1
            reasons = [difference(result, experiment) for _, experiment in experiments]
            if None not in reasons:
                where = f"{name}/{result.method}/{result.target}/seed-{result.seed}"
                strangers.append(f"{where}: {reasons[0]} ({experiments[0][0]})")
    print("\n".join(strangers))
    print(f"{checked} results of {len(described)} folders compared, {len(strangers)} do not belong to their file")
    return 0 if checked and not strangers else 1


if __name__ == "__main__":
    sys.exit(main())
