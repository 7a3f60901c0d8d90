"""fedshift from Python: what the command line does, as functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

import numpy.typing as npt

from fedshift.errors import UserError, nearest
from fedshift.evaluation.estimate.combination import Estimate
from fedshift.evaluation.predictions import PREDICTIONS
from fedshift.evaluation.records import RunResult, Selection, SiteMetric, SiteMetrics
from fedshift.evaluation.stored import ROUNDS, check_sum, read_rounds
from fedshift.experiment import check as checks
from fedshift.experiment.config.experiment import Experiment, parse
from fedshift.experiment.config.experiment import load as load_file
from fedshift.experiment.runs.context import Callback, Reporter
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.experiment.runs.lines import notebook_reporter
from fedshift.extras import import_extra
from fedshift.import_paths import CHILD
from fedshift.model import Model, Samples
from fedshift.report.advice.words import VerdictValues
from fedshift.report.check_words import check_text
from fedshift.report.choice import Choice, choice_at
from fedshift.report.collect import Collected, FinishedRun, collect
from fedshift.report.estimates import estimates_of
from fedshift.report.mistakes import ShownSamples
from fedshift.report.page import table_html, write_page
from fedshift.report.report import report_of, verdict_of, whole_report
from fedshift.report.table_formats import markdown
from fedshift.report.trackers import tracker
from fedshift.trust import asks, own_words

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Results:
    """The finished runs of an experiment. As a string, the Markdown table of the last rounds; in a notebook that table.

    Attributes:
        folder: holds the runs.
        collected: what was read from it.
        experiment: what was run, where it is known. Networks and methods of your own that it names are trusted.
    """

    folder: Path
    collected: Collected
    experiment: Experiment | None = None

    @property
    def runs(self) -> list[RunResult]:
        """One result per (method, target, seed), but for targets without labels: see `estimates`."""
        return [run.result for run in self.collected.runs]

    @property
    def estimates(self) -> dict[str, dict[str, list[Estimate]]]:
        """Site without labels → method → the accuracy to expect there, one for each seed.

        Raises:
            UserError: predictions are damaged.
        """
        return estimates_of(self.collected)

    def choice(self, target: str) -> Choice:
        """Whose model should answer at a target, decided without its labels: the best adapted one if adapting gained at
        the other targets and did harm at hardly any, else the common one.

        Raises:
            UserError: there is no such target, or no federated method left its samples alone.
        """
        return choice_at(self.collected, target)

    def predictions(
        self, site: str, method: str | None = None, target: str | None = None, seed: int | None = None
    ) -> pandas.DataFrame:
        """What one run's model said of each sample of a site: id, label (None without one), predicted class, and
        ``score_<class>``.

        Args:
            site: the site; also one without labels.
            method, target, seed: as in `model`. By default the target is the site itself, where it is one.

        Raises:
            UserError: pandas is not installed, the choice is not of one run, or the run noted nothing of the site.
        """
        frames = import_extra("pandas", extra="tables", what="predictions")
        targets = {run.result.target for run in self.collected.all_runs}
        run = self._run(method, site if target is None and site in targets else target, seed)
        path = run.folder / PREDICTIONS
        if not path.is_file():
            raise UserError(f"{run.folder} has no predictions: run the experiment with evaluation.predictions: true")
        check_sum(path)
        table = frames.read_parquet(path)
        known = list(dict.fromkeys(table["site"]))
        if site not in known:
            raise UserError(f"this run noted nothing of site '{site}'; {nearest(site, known)}")
        return table[table["site"] == site].drop(columns="site").reset_index(drop=True)

    def rows(self, select: Selection = "last", metric: str = "") -> list[dict[str, Any]]:
        """Rows ``{method, target, select, n, mean, standard_error, seeds}`` in percent, with a row for each average.

        ``metric`` is what they report, such as auroc; by default the experiment's headline.
        """
        return report_of(self.collected, select, metric).table.plain_rows()

    def markdown(self, select: Selection = "last", metric: str = "") -> str:
        """The table in Markdown."""
        return markdown(report_of(self.collected, select, metric).table)

    def verdict(self) -> VerdictValues:
        """Which method to take, what to expect at the next site, what is not known: by name; printed, in words."""
        return VerdictValues(verdict_of(self.collected))

    def to_frame(self, select: Selection = "last") -> pandas.DataFrame:
        """One row per run: what ran, the scores of the selected round in percent, and what the run cost.

        All measures of docs/measures.md have a column, and with one target ``<measure>_low`` and ``<measure>_high``
        are their intervals over samples. ``majority`` is what always saying a target's most frequent class would reach.
        Only the last round is measured so: with another ``select`` they are missing.

        Raises:
            UserError: pandas is not installed.
        """
        frames = import_extra("pandas", extra="tables", what="to_frame")
        return frames.DataFrame([_run_row(run, select) for run in self.runs])

    def sites_to_frame(self) -> pandas.DataFrame:
        """One row per run and measured site: samples, base rate, and all measures of the last round in percent.

        Raises:
            UserError: pandas is not installed.
        """
        frames = import_extra("pandas", extra="tables", what="sites_to_frame")
        return frames.DataFrame(
            [
                {
                    **_names(run),
                    "site": site.site,
                    "part": site.part,
                    "samples": site.samples,
                    **{f"samples_{name}": count for name, count in zip(run.classes, site.support, strict=False)},
                    "majority": site.majority,
                    "threshold": site.threshold,
                    **_metric_columns(site),
                }
                for run in self.runs
                for site in run.sites
            ]
        )

    def rounds_to_frame(self) -> pandas.DataFrame:
        """One row per round of each run, with a column for every number of its line in ``rounds.jsonl``.

        Raises:
            UserError: pandas is not installed, or a `rounds.jsonl` is corrupt.
        """
        frames = import_extra("pandas", extra="tables", what="rounds_to_frame")
        return frames.DataFrame(
            [
                {**_names(run.result), **record.numbers()}
                for run in self.collected.runs
                for record in read_rounds(run.folder / ROUNDS)
            ]
        )

    def model(self, method: str | None = None, target: str | None = None, seed: int | None = None) -> Model:
        """The trained model of one run.

        Args:
            method: the method's label. It may be left out if there is one method.
            target: the target. It may be left out if there is one target.
            seed: by default the lowest.

        Raises:
            UserError: no run has these names, a name is needed, or the run is of a network or method of your own and
                the experiment is not known: see `results`.
        """
        run = self._run(method, target, seed)
        if self.experiment is None:
            return Model.load(run.folder)
        methods = {method.display: method for method in self.experiment.methods}
        return Model.load(run.folder, methods.get(run.result.method), self.experiment.model.code)

    def _run(self, method: str | None, target: str | None, seed: int | None) -> FinishedRun:
        """The run of a choice, as `model` has it."""
        runs = self.collected.all_runs
        for what, name in (("method", method), ("target", target)):
            known = list(dict.fromkeys(getattr(run.result, what) for run in runs))
            if name is None and len(known) > 1:
                raise UserError(f"there are runs of several {what}s: choose one with {what}=…; {nearest('', known)}")
            if name is not None and name not in known:
                raise UserError(f"there is no finished run with {what} '{name}'; {nearest(name, known)}")
            runs = tuple(run for run in runs if name is None or getattr(run.result, what) == name)
        seeds = [run.result.seed for run in runs]
        if seed is not None and seed not in seeds:
            raise UserError(f"there is no finished run with seed {seed}; known: {', '.join(map(str, seeds))}")
        return runs[seeds.index(min(seeds) if seed is None else seed)]

    def predict(
        self,
        X: Samples,
        method: str | None = None,
        target: str | None = None,
        seed: int | None = None,
        accept_shift: bool = False,
    ) -> npt.NDArray[Any]:
        """The class of each sample by the model of one run: see `model` for the choice, `Model.predict` for the rest.

        Raises:
            UserError: the choice is not of one run, or the samples are not what the model reads.
        """
        return self.model(method, target, seed).predict(X, accept_shift)

    def estimate(
        self, X: Samples, method: str | None = None, target: str | None = None, seed: int | None = None
    ) -> Estimate:
        """The accuracy of one run's model to expect on samples without labels: see `model` for the choice,
        `Model.estimate` for the rest.

        Raises:
            UserError: the choice is not of one run, or the samples are not what the model reads.
        """
        source = None if self.experiment is None else self.experiment.data
        return self.model(method, target, seed).estimate(X, source=source)

    def page(self, samples: Given | None = None) -> Path:
        """Write the page, ``report.html`` in the experiment's folder: tables, figures, warnings and settings.

        Args:
            samples: the experiment, if the page should show samples too: the worst mistakes and features of each model.

        Raises:
            UserError: it cannot be written, or the data cannot be read.
        """
        shown = None if samples is None else ShownSamples(_parse_given(samples))
        return write_page(self.folder, whole_report(self.collected, shown))

    def __str__(self) -> str:
        return self.markdown()

    def __repr__(self) -> str:
        order = self.collected.order
        names = f"methods {', '.join(order.methods)}; targets {', '.join(order.targets)}"
        return (
            f"Results({str(self.folder)!r}: {len(self.runs)} runs; {names}; seeds {', '.join(map(str, order.seeds))})"
        )

    def _repr_html_(self) -> str:
        return table_html(report_of(self.collected).table)


Given = Experiment | Mapping[str, Any] | str | Path
"""An experiment: an `Experiment`, a mapping with its fields, or its YAML file."""


def run(
    experiment: Given,
    runs: str | Path = "runs",
    reporter: Reporter | None = None,
    callbacks: Sequence[Callback | str] = (),
    trust: bool = False,
) -> Results:
    """Run an experiment and return its results. Finished runs are not repeated.

    Args:
        experiment: an `Experiment`, a mapping with the same fields, or its YAML file.
        runs: the folder in which the experiment's folder is made.
        reporter: receives the progress. By default nothing is reported, but in a notebook a line shows it.
        callbacks: objects of subclasses of `Callback`, which are called after each round and each run; or names of
            trackers: ``tensorboard``, ``mlflow``, ``wandb``.
        trust: as in `load`.

    Raises:
        UserError: there is a mistake in the experiment.
        FedshiftError: training failed.

    Example:
        >>> import tempfile
        >>> experiment = {
        ...     "data": {"name": "rotated_digits", "per_class": 5, "size": 8},
        ...     "protocol": {"targets": ["D0"], "seeds": [0]},
        ...     "model": {"name": "linear"},
        ...     "training": {"rounds": 1},
        ...     "methods": [{"name": "fedavg"}],
        ...     "engine": {"threads": 1},
        ...     "device": "cpu",
        ... }
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = run(experiment, folder)
        >>> [(row["method"], row["target"], row["n"]) for row in found.rows()]
        [('fedavg', 'D0', 1), ('fedavg', 'average', 1)]
    """
    if os.environ.get(CHILD):
        raise UserError(
            "fedshift.run was called while a worker process imported this file to find its method: put the call "
            "under if __name__ == '__main__', or move the method to a file of its own"
        )
    heard = [tracker(callback) if isinstance(callback, str) else callback for callback in callbacks]
    resolved = _parse_given(experiment, trust)
    folder = run_experiment(resolved, Path(runs), reporter or notebook_reporter(), callbacks=heard)
    return results(folder, resolved)


def results(folder: str | Path, experiment: Given | None = None) -> Results:
    """The finished runs in or below an experiment's folder.

    Args:
        folder: the folder.
        experiment: what was run there, if its network or its methods are your own and `Results.model` is to find them.
            Their code is run.

    Raises:
        UserError: there are none, or there is a mistake in the experiment.

    Example:
        >>> results("no-such-folder")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        fedshift.errors.UserError: there is no such folder
    """
    return Results(Path(folder), collect(Path(folder)), None if experiment is None else _parse_given(experiment))


def load(path: str | Path, *overrides: str, trust: bool = False) -> Experiment:
    """The experiment in a YAML file.

    Args:
        path: the file.
        overrides: fields to set, as ``key.path=value``.
        trust: import your own networks, methods and data sets that the file names, and remember that you trust them.
            Of a mapping they are trusted in any case: its author wrote their names in Python.

    Raises:
        UserError: the file or an override has a mistake, or names code that nobody has trusted.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "digits.yaml"
        ...     _ = file.write_text("{data: {name: rotated_digits}, model: {name: linear}, methods: [{name: fedavg}]}")
        ...     load(file, "training.rounds=7").training.rounds
        7
    """
    with asks(lambda code: True) if trust else nullcontext():
        return load_file(Path(path), overrides)


def check(experiment: Given, trust: bool = False) -> checks.Check:
    """Check an experiment without keeping any training: data, network, methods, time and traffic.

    Args:
        experiment: as in `run`.
        trust: as in `load`.

    Raises:
        UserError: something would stop the experiment.

    Example:
        >>> found = check(
        ...     {
        ...         "data": {"name": "rotated_digits", "per_class": 5, "size": 8},
        ...         "protocol": {"targets": ["D0"], "seeds": [0]},
        ...         "model": {"name": "linear"},
        ...         "methods": [{"name": "fedavg"}],
        ...         "engine": {"threads": 1},
        ...         "device": "cpu",
        ...     }
        ... )
        >>> found.parameters, found.payload  # 8 × 8 pixels to 10 classes; bytes of one model
        (650, 2600)
    """
    resolved = _parse_given(experiment, trust)
    checked = checks.check(resolved)
    return replace(checked, words=check_text(resolved, checked, Path("runs")))


def _parse_given(experiment: Given, trust: bool = False) -> Experiment:
    if isinstance(experiment, str | Path):
        return load(experiment, trust=trust)
    if isinstance(experiment, Experiment):
        return experiment
    with own_words():
        return parse(experiment)


def _names(result: RunResult) -> dict[str, Any]:
    return {"method": result.method, "target": result.target, "seed": result.seed}


def _distances(result: RunResult, select: Selection) -> dict[str, float | None]:
    return {"hd95": result.hd95(select), "hausdorff": result.hausdorff(select)}


def _run_row(result: RunResult, select: Selection) -> dict[str, Any]:
    """A run as one row of a data frame."""
    return {
        **_names(result),
        "setting": result.setting,
        "metric": result.metric,
        "score": result.score(select),
        result.metric: result.accuracy(select),
        **_at_targets(result, select),
        "source": result.source_accuracy(select),
        **{name: value for name, value in _distances(result, select).items() if value is not None},
        "rounds": result.rounds,
        "mini_batches": result.mini_batches,
        "bytes_up": sum(result.bytes_up.values()),
        "bytes_down": sum(result.bytes_down.values()),
        "seconds": result.seconds,
    }


def _at_targets(result: RunResult, select: Selection) -> dict[str, float | None]:
    """The majority's share and all measures of the last round's scores, means over the targets of a run."""
    targets = result.targets if select == "last" else []
    shares = [site.majority for site in targets]
    known = [share for share in shares if share is not None]
    columns: dict[str, float | None] = {"majority": fmean(known) if known and len(known) == len(shares) else None}
    for metric in get_args(SiteMetric):
        if metric != result.metric:
            columns[metric] = result.site_metric(metric, select)
        if len(targets) == 1:
            columns |= _interval(targets[0], metric)
    return columns


def _metric_columns(site: SiteMetrics) -> dict[str, float | None]:
    return {
        name: value
        for metric in get_args(SiteMetric)
        for name, value in {metric: site.values.get(metric), **_interval(site, metric)}.items()
    }


def _interval(site: SiteMetrics, metric: SiteMetric) -> dict[str, float]:
    """The two ends of an interval over samples; empty if there is none."""
    ends = site.intervals.get(metric, ())
    return {f"{metric}_{end}": value for end, value in zip(("low", "high"), ends, strict=False)}
