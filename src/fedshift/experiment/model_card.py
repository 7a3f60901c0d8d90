"""A model card in Hugging Face's format: the head that its hub reads, by its own classes, then Markdown for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from fedshift.data import registry as datasets
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import RunResult, format_metric
from fedshift.evaluation.selection import RULES
from fedshift.experiment.predict import TrainedModel
from fedshift.experiment.protocols.base import EVERY_SITE
from fedshift.extras import import_extra
from fedshift.text import escape_markdown as text
from fedshift.text import in_unit, pipes, size_in_words

_TASKS = {
    "table": "tabular-classification",
    "features": "tabular-classification",
    "image": "image-classification",
    "tokens": "text-classification",
}
_ORDER = ["library_name", "pipeline_tag", "tags", "metrics", "model-index"]
_ROWS = {
    "training_samples": "trained with labels",
    "unlabelled_samples": "trained without labels",
    "held_out_samples": "held out",
    "measured_samples": "measured",
}


def model_card(trained: TrainedModel, result: RunResult | None) -> str:
    """The card of a trained model.

    ``result``: the result of its run; None if it is not known, which leaves out measures and traffic. UserError if
    huggingface_hub is not installed.
    """
    hub = import_extra("huggingface_hub", extra="export", what="a model card")
    head = hub.ModelCardData(**_head(trained, result, hub)).to_yaml(original_order=_ORDER)
    sections = [_intro(trained, result), _use(trained), _data(trained, result), _method(trained, result)]
    if result is not None:
        sections += [_measures(trained, result), _traffic(result)]
    sections.append(_limits(trained, result))
    text = "\n\n".join("\n".join(section) for section in sections)
    return str(hub.ModelCard(f"---\n{head}\n---\n\n{text}\n"))


def _target(trained: TrainedModel) -> tuple[str, str]:
    """The target's name, "" where there is none, and its part in training."""
    if trained.metadata.get("adapted_to"):
        return trained.metadata["adapted_to"], "trained without labels"
    target = trained.metadata.get("unseen") or ""
    if target == EVERY_SITE and target not in trained.metadata["sources"]:
        return "the sites that trained", "on samples that they held out"
    return target, "unseen in training"


def _task(trained: TrainedModel) -> str:
    if trained.segments:
        return "image-segmentation"
    task = _TASKS[trained.stored.kind]
    return task if trained.objective.has_probabilities else task.replace("classification", "regression")


def _name(trained: TrainedModel) -> str:
    notes = trained.metadata
    target = notes.get("adapted_to") or notes.get("unseen")
    return "-".join([notes["experiment"], notes["method"]["name"], *filter(None, [target]), str(notes["seed"])])


def _head(trained: TrainedModel, result: RunResult | None, hub: Any) -> dict[str, Any]:
    task, (target, role) = _task(trained), _target(trained)
    head: dict[str, Any] = {
        "library_name": "fedshift",
        "pipeline_tag": task,
        "tags": ["fedshift", "federated-learning", "domain-generalization", trained.metadata["method"]["name"]],
    }
    accuracy = None if result is None else result.accuracy()
    if result is None or accuracy is None:  # targets without labels are not measured
        return head
    data = str(result.data.get("name", "unknown"))
    measured = hub.EvalResult(
        task_type=task,
        dataset_type=data,
        dataset_name=_title(data),
        dataset_split=target,
        metric_type=result.metric,
        metric_value=round(accuracy / 100 if ENTRIES[result.metric].unit == "%" else accuracy, 6),
        metric_name=f"{result.metric} at {target}, {role}, last round",
    )
    return head | {"metrics": [result.metric], "model_name": _name(trained), "eval_results": [measured]}


def _is_measured(result: RunResult | None) -> bool:
    return result is None or result.accuracy() is not None


def _title(data: str) -> str:
    return datasets.source_class(data).manifest().title if data in datasets.names() else data


def _intro(trained: TrainedModel, result: RunResult | None) -> Iterator[str]:
    notes, (target, role) = trained.metadata, _target(trained)
    what = "structures" if trained.segments else "classes"
    yield f"# {text(_name(trained))}"
    yield ""
    yield (
        f"A model that was trained with fedshift {notes['versions']['fedshift']} across {len(notes['sources'])} sites "
        f"({', '.join(map(text, notes['sources']))}), whose samples were not pooled"
        if "raw_data" not in trained.method.calls.shares
        else f"A model that was trained with fedshift {notes['versions']['fedshift']} on the **pooled samples** of "
        f"{len(notes['sources'])} sites ({', '.join(map(text, notes['sources']))})"
    ) + (f", and {'measured at' if _is_measured(result) else 'for'} {text(target)}, {role}." if target else ".")
    yield ""
    yield f"* Network: {text(notes['model']['name'])}, {_numbers(trained):,} parameters."
    yield f"* Input: {_input(trained)}."
    if trained.objective.has_probabilities:
        yield f"* Output: probabilities of the {what} {', '.join(map(text, trained.classes))}."
    else:
        yield f"* Output: {trained.objective.describe([text(name) for name in trained.classes])}."


def _numbers(trained: TrainedModel) -> int:
    return sum(parameter.numel() for parameter in trained.network.parameters())


def _input(trained: TrainedModel) -> str:
    stored = trained.stored
    table: Any = stored.table
    if table is not None:
        columns = [*table["numeric"], *table["categorical"]]
        return f"a table with the columns {', '.join(text(str(column['name'])) for column in columns)}"
    size = " × ".join(map(str, trained.stored_shape))
    if stored.kind == "tokens":
        return f"{size} tokens" + (f" of the text in column {text(str(stored.text['column']))}" if stored.text else "")
    return f"images of {size} (channels, height, width), 0 to 255" if stored.kind == "image" else f"{size} numbers"


def _use(trained: TrainedModel) -> Iterator[str]:
    yield "## Use"
    yield ""
    yield "```python"
    yield "import fedshift"
    yield ""
    yield 'model = fedshift.Model.load("model.safetensors")'
    proba = ", model.predict_proba(X)" if trained.objective.has_probabilities else ""
    yield f"model.predict(X){proba}  # X: an array, a data frame, or the path of data"
    yield "```"


def _data(trained: TrainedModel, result: RunResult | None) -> Iterator[str]:
    yield "## Data and sites"
    yield ""
    if result is None:
        yield f"Sites that trained: {', '.join(map(text, trained.metadata['sources']))}."
        return
    data = str(result.data.get("name", "unknown"))
    if data in datasets.names():
        manifest = datasets.source_class(data).manifest()
        yield f"{manifest.title} (`{data}`). Source: {manifest.source}. Licence: {manifest.licence}."
    else:
        yield f"{text(data)}."
    yield f"Checksum of the data: `{result.data.get('fingerprint', 'unknown')}`."
    yield ""
    known = {name: result.data.get(name, {}) for name in _ROWS}
    sites = dict.fromkeys(site for counts in known.values() for site in counts)
    yield pipes(
        ["site", *_ROWS.values()],
        [[text(site), *(str(known[name].get(site, 0)) for name in _ROWS)] for site in sites],
        "---",
    )


def _method(trained: TrainedModel, result: RunResult | None) -> Iterator[str]:
    notes = trained.metadata
    options = {name: value for name, value in notes["method"].items() if name != "name" and value is not None}
    yield "## Method"
    yield ""
    yield f"`{notes['method']['name']}`, seed {notes['seed']}. Options:"
    yield ""
    yield "```yaml"
    yield yaml.safe_dump(options, sort_keys=False, allow_unicode=True).rstrip()
    yield "```"
    if result is not None:
        yield ""
        work = f"{result.rounds} rounds, {result.mini_batches} mini-batches per site, {result.seconds:.0f} seconds"
        yield f"{work}. Training:"
        yield ""
        yield "```yaml"
        yield yaml.safe_dump(result.options.get("training", {}), sort_keys=False, allow_unicode=True).rstrip()
        yield "```"


def _measures(trained: TrainedModel, result: RunResult) -> Iterator[str]:
    yield "## Measures"
    yield ""
    if not _is_measured(result):
        yield f"{text(result.target)} has no labels, so nothing was measured: fedshift estimate says what to expect."
        return
    metric = ENTRIES[result.metric]
    yield f"{metric.in_words}, of one run with one seed."
    yield ""
    yield pipes(
        ["round", "number", "target", "held-out samples of the sources"],
        [
            [
                rule.description.replace("accuracy", metric.title),
                str(chosen.round),
                format_metric(result.metric, chosen.accuracy),
                _number(result.metric, chosen.source_accuracy),
            ]
            for select, rule in RULES.items()
            if (chosen := result.selected.get(select)) is not None
        ],
        "---",
    )
    last = result.selected["last"]
    if last is not None and last.per_class:
        yield ""
        yield f"At the target, last round, by {'structure' if trained.segments else 'class'}:"
        yield ""
        yield pipes(
            ["name", "percent"],
            [[text(n), _number("accuracy", v)] for n, v in zip(result.classes, last.per_class, strict=True)],
            "---",
        )
    for site in result.sites:
        if site.part == "target" and site.values:
            majority = (
                "" if site.majority is None else f", of whom {site.majority:.1f} % are of the most frequent class"
            )
            if result.metric == "rmse" and site.baseline is not None:
                majority = f" (always saying the mean of the sources: RMSE {in_unit(site.baseline)})"
            unit = "in the label's unit, R² in percent," if result.metric == "rmse" else "percent"
            yield ""
            yield f"At {text(site.site)}, {site.samples} samples{majority}, {unit} with 95 % intervals over samples:"
            yield ""
            yield pipes(
                ["metric", "value", "from", "to"],
                [
                    [
                        text(name),
                        format_metric(name, value),
                        *(_number(name, limit) for limit in site.intervals.get(name, (None, None))),
                    ]
                    for name, value in site.values.items()
                ],
                "---",
            )


def _number(metric: str, value: float | None) -> str:
    return "–" if value is None else format_metric(metric, value)


def _traffic(result: RunResult) -> Iterator[str]:
    yield "## What left the sites"
    yield ""
    yield pipes(
        ["kind", "left the sites", "reached the sites"],
        [
            [kind, *(size_in_words(sent.get(kind, 0), "bytes") for sent in (result.bytes_up, result.bytes_down))]
            for kind in dict.fromkeys([*result.bytes_up, *result.bytes_down])
        ],
        "---",
    )
    yield ""
    yield "All sites and rounds together."
    yield ""
    if result.guarantee is None:
        yield "No differential privacy was used, so there is no ε that bounds what this model tells about a sample."
        return
    units = sorted({f"{spent.unit}s" for spent in result.privacy.values()})
    yield f"Differential privacy of each site's training {' or '.join(units)}: {result.guarantee}, for the site that"
    yield "paid most. It bounds what the models of this run tell about one of them; neither other runs of the"
    yield "experiment nor the measures above are counted."


def _limits(trained: TrainedModel, result: RunResult | None) -> Iterator[str]:
    target, role = _target(trained)
    yield "## Limits"
    yield ""
    if target and result is not None:
        yield f"* It was measured at {text(target)} ({role}) alone. At another site it may do better or worse."
    else:
        yield "* It was not measured at any site outside of its training."
    yield "* One run with one seed: the experiment's table has the means and standard errors over seeds."
    if result is None or result.guarantee is None:
        yield "* A model is not anonymous: something about single samples may be learned from its weights."
    yield "* fedshift compares its input with the training data; other programs that run an exported file do not."
    yield "* It was not examined as a medical device or for any other regulated use."
    for warning in result.warnings if result is not None else ():
        yield f"* Warning of the run: {text(warning)}."
