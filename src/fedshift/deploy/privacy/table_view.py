"""What a site tells of its table: no part of a column that is in few rows; with a budget of privacy sums with noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedshift.data import agreement
from fedshift.data.agreement import encoding_without_few, few_rows, without_few
from fedshift.data.domain import Domain
from fedshift.data.table_files import canonical
from fedshift.data.tables import TableEncoding, TableStatistics
from fedshift.deploy.remote.policy import Policy, PrivacyBudget
from fedshift.deploy.site_file import Holding
from fedshift.errors import Refused, UserError
from fedshift.functional.differential_privacy import gaussian
from fedshift.functional.noisy_moments import change_of_one_row, possible, unscale
from fedshift.functional.secret_noise import SecretStream

_USUAL = (0.2, 0.3)
"""The shares that protocols hold out unless they say otherwise."""


def of_many_rows(holding: Holding, policy: Policy) -> Holding:
    """A table's site as its card may show it: statistics and encoding without categories and missing cells of few rows.
    UserError if the data set does not count the rows of its categories."""
    if holding.given is None or holding.given["kind"] != agreement.TABLE or policy.smallest_group == 1:
        return holding
    statistics, samples, least = holding.source.statistics(), len(holding.domain.described), policy.smallest_group
    if statistics is None or len(statistics.rows) != len(holding.given["categorical"]):
        raise UserError(
            f"data set {holding.data.name} gives categories and does not count their rows, which policy.smallest_group "
            "needs: define its method statistics()"
        )
    few = few_rows(statistics, holding.given, samples, least)
    if not few:
        return holding
    told = {**without_few(holding.given, statistics, few, least, samples)}
    shown = replace(holding, given=told, few=few)
    encoding = encoding_without_few(TableEncoding.model_validate(holding.data.preprocessing.table), told)
    if not encoding.width:
        return shown  # `check_few` refuses
    before = holding.data.preprocessing
    update = {"shape": (encoding.width,), "objective": before.objective, "standardise": before.standardise}
    agreed = encoding.with_choices({}, {}, None, None).preprocessing().model_copy(update=update)
    domain = shown.encode(agreed, agreed.shape or ())
    # The card's encoding keeps the name of the column that names rows.
    preprocessing = agreed.model_copy(update={"table": encoding.preprocessing().table})
    return replace(
        shown, domain=domain, data=replace(holding.data, domains={domain.name: domain}, preprocessing=preprocessing)
    )


def check_few(site: str, holding: Holding, policy: Policy) -> None:
    """Raise Refused if the encoding would tell of parts of columns that are in few rows; it names all of them.

    The message has the numbers, which are for the site; its public text has none.
    """
    result = list(_refusals(holding, policy))
    if result:
        text, public = ("; ".join(texts) for texts in zip(*result, strict=True))
        raise Refused(f"site '{site}' refuses to send {text}", public=f"site '{site}' refuses to send {public}")


def refusals(holding: Holding, policy: Policy) -> list[str]:
    """What `check_few` would refuse, for the site itself."""
    return [text for text, _ in _refusals(holding, policy)]


def _refusals(holding: Holding, policy: Policy) -> Iterator[tuple[str, str]]:
    """What is refused: with numbers, and without."""
    rule = f"(rule policy.smallest_group: {policy.smallest_group})"
    given = holding.given or {}
    for item in holding.few:
        if item.part == "values":
            remedy = "leave it out of data.numeric at all sites, or empty these cells here"
            what = f"statistics of so few samples of column '{item.column}'"
            yield f"{what}: {item.rows[0]} rows have a value {rule}: {remedy}", f"{what} {rule}: {remedy}"
        elif policy.rare_categories == "refuse":
            remedy = "join or empty them, leave the column out at all sites, or set policy.rare_categories: other"
            what = f"{item.part} of column '{item.column}' that are in few rows"
            counts = ", ".join(map(str, item.rows[:10])) + (" …" if len(item.rows) > 10 else "")
            yield f"{what}: {counts} {rule}: {remedy}", f"{what} {rule}: {remedy}"
    if holding.few and not given["numeric"] and not any(given["categories"]):
        what = f"an encoding: no category is in enough rows {rule}: name other columns"
        yield what, what


def check_classes(site: str, holding: Holding, policy: Policy) -> None:
    """Raise Refused if the card would name classes of few rows that nobody listed: a patient's name may be one.

    Classes that are called 0, 1, 2, … tell nothing by their names.
    """
    if count := len(_rare_classes(holding, policy)):
        text = f"site '{site}' refuses to send {_classes_refused(policy)}"
        raise Refused(f"{text} ({count} of {len(holding.data.classes)})", public=text)


def _rare_classes(holding: Holding, policy: Policy) -> list[int]:
    """How many rows each class has that is told of and is in few rows."""
    data, labels = holding.data, holding.domain.labels
    if holding.listed or data.task != "classification" or data.classes == tuple(map(str, range(len(data.classes)))):
        return []
    rows: list[int] = np.bincount(labels[labels >= 0], minlength=len(data.classes)).tolist()
    return [number for number in rows if 0 < number < policy.smallest_group]


def _classes_refused(policy: Policy) -> str:
    return (
        f"the names of classes that are in few rows (rule policy.smallest_group: {policy.smallest_group}): list all "
        "classes of the federation in SITE.yaml (classes: [...]) if these are some, else correct their rows"
    )


def leaving(holding: Holding, policy: Policy) -> Iterator[str]:
    """Lines that say what of the data a card tells the coordinator before any training, and what stays here.
    ``holding``: as `of_many_rows` gives it."""
    given = holding.given
    if rare := _rare_classes(holding, policy):
        yield f"warning: it refuses to send {_classes_refused(policy)}; rows: {', '.join(map(str, rare[:10]))}"
    if given is not None and not policy.lets_out("statistics"):
        what = "a table" if given["kind"] == agreement.TABLE else "data.standardise"
        yield f"warning: it takes part in no experiment: {what} needs statistics under policy.send"
    if given is None or given["kind"] != agreement.TABLE:
        return
    if given["numeric"]:
        yield f"leaves before training: mean, deviation and number of values of {', '.join(given['numeric'])}"
    for name, categories in zip(given["categorical"], given["categories"], strict=True):
        yield f"leaves before training: categories of {name}: {', '.join(categories) or 'none'}"
    least = policy.smallest_group
    for item in holding.few:
        if item.part == "categories" and policy.rare_categories == "other":
            yield (
                f"stays here: {len(item.rows)} categories of {item.column} in fewer than {least} rows "
                f"({sum(item.rows)} rows), read as unknown unless another site tells them"
            )
        elif item.part == "missing cells" and policy.rare_categories == "other":
            yield f"stays here: that {item.column} is missing in {item.rows[0]} rows, fewer than {least}"
    for text in refusals(holding, policy):
        yield f"warning: it refuses to send {text}"


def few_samples(domain: Domain, policy: Policy) -> str | None:
    """In which experiments a site of so few samples takes part, in words; None if that needs no word."""
    samples, least, rule = len(domain), policy.smallest_group, f"(rule policy.smallest_group: {policy.smallest_group})"
    if domain.unlabelled:
        known = len(domain.known)
        if min(samples - known, known or least) >= least:
            return None
        return f"it takes part in no experiment: it has {known} samples with a label, {samples - known} without {rule}"
    if domain.fixed_split:
        train = len(domain.described)
        if min(train, samples - train) >= least:
            return None
        return f"it takes part in no experiment: data.split has {train} rows of train, {samples - train} of test {rule}"
    if samples < least:
        return f"it takes part in no experiment: it has {samples} samples {rule}"
    if samples < 2 * least:
        return f"it takes part only with protocol.test_fraction: 0: it has {samples} samples {rule}"
    low, high = least / samples, 1 - least / samples
    if low <= _USUAL[0] and high >= _USUAL[1]:
        return None
    return (
        f"it takes part only with a protocol.test_fraction of about {low:.2f} to {high:.2f}, or 0: it has {samples} "
        f"samples {rule}"
    )


def lacking(given: Mapping[str, Any], budget: PrivacyBudget) -> str | None:
    """What SITE.yaml lacks for statistics with noise, in the words of its options; None if it has everything."""
    if given["kind"] != agreement.TABLE or given.get("label") is not None:
        return "noise can be put on the columns of a table of classes only: give the site data that are encoded already"
    if budget.statistics_noise is None:
        return "set privacy.statistics_noise, with privacy.ranges and privacy.categories of its columns"
    for name in given["numeric"]:
        if name not in budget.ranges:
            return f"set privacy.ranges of column '{name}': the least and the largest value that it may have"
    for name in given["categorical"]:
        if not budget.categories.get(name):
            return f"set privacy.categories of column '{name}': all that it may hold"
    return None


def with_noise(holding: Holding, budget: PrivacyBudget, stream: SecretStream) -> Holding:
    """A table encoded by statistics with noise, which are all that its site tells of it.

    ``holding``: the site's data, for which nothing is `lacking`. ``stream``: the noise. It has to be the same each time
    that the same data are looked at.
    """
    assert holding.given is not None  # a table
    numeric, categorical = holding.given["numeric"], holding.given["categorical"]
    exact: TableStatistics = holding.source.statistics({name: budget.ranges[name] for name in numeric})
    sums = np.stack([exact.count.astype(np.float64), exact.total, exact.squares], axis=1)
    deviation = float(budget.statistics_noise or 0) * change_of_one_row(len(numeric))
    noisy = possible(sums + deviation * gaussian(sums.shape, stream).double().numpy(), len(holding.domain))
    least, most = (np.array([budget.ranges[name][end] for name in numeric], dtype=np.float64) for end in (0, 1))
    count, total, squares = unscale(noisy, least, most).T
    told = TableStatistics(
        count=count.astype(np.int64),
        total=total,
        squares=squares,
        any_missing=np.ones(len(numeric), dtype=np.bool_),  # whether a value is missing would tell of single rows
        categories=tuple(
            frozenset(canonical(str(category)) for category in budget.categories[name]) for name in categorical
        ),
    )
    given = agreement.table_given(told, numeric, categorical)
    preprocessing = agreement.common_encoding({holding.domain.name: given}, holding.data.preprocessing)
    shown = replace(holding, given=given)
    domain = shown.encode(preprocessing, preprocessing.shape or ())
    data = replace(holding.data, domains={domain.name: domain}, preprocessing=preprocessing)
    return replace(shown, domain=domain, data=data)
