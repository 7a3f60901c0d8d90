"""What a site with a budget of privacy says of its table, so that all sites can encode theirs alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedshift.data import agreement
from fedshift.data.table_files import canonical
from fedshift.data.tables import TableStatistics
from fedshift.deploy.remote.policy import PrivacyBudget
from fedshift.deploy.site_file import Holding
from fedshift.functional.differential_privacy import gaussian
from fedshift.functional.noisy_moments import change_of_one_row, possible, unscale
from fedshift.functional.secret_noise import SecretStream


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

    Args:
        holding: the site's data, for which nothing is `lacking`.
        stream: the noise. It has to be the same each time that the same data are looked at.
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
