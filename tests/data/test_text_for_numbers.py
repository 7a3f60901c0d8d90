"""Arrays of text where numbers belong are one line of ours, which shows no value; missing columns are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.data.builders.own import data_section
from fedshift.data.registry import parse
from fedshift.errors import UserError
from fedshift.estimator import FederatedClassifier, FederatedRegressor
from tried import case

pandas = pytest.importorskip("pandas")
X, Y = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), np.arange(12) % 2
TEXT = X.astype(str)


def built(a: Any, **options: Any) -> Any:
    return parse(data_section({"a": a, "b": (X, Y)}, **options)).build()


def saved(folder: Path, **arrays: Any) -> Any:
    files = {name: folder / f"{name}.npz" for name in "ab"}
    np.savez(files["a"], **arrays)
    np.savez(files["b"], x=X, y=Y)
    return parse({"name": "arrays", "sites": files}).build()


WRONG = [
    case("text for numbers", "inputs in memory", lambda _: built((TEXT, Y))),
    case("text for numbers", "lists of text", lambda _: built((TEXT.tolist(), Y))),
    case("text for numbers", "inputs as bytes", lambda _: built((TEXT.astype("S"), Y))),
    case("text for numbers", "images of text", lambda _: built((np.full((12, 1, 4, 4), "1"), Y))),
    case("text for numbers", "quantities", lambda _: built((X, Y.astype(str)), task="regression")),
    case("text for numbers", "labels at one of two sites", lambda _: built((X, Y.astype(str)))),
    case("text for numbers", "inputs in a .npz", lambda to: saved(to, x=TEXT, y=Y)),
    case("text for numbers", "groups in a .npz", lambda to: saved(to, x=X, y=Y, groups=Y.astype(str))),
]


@pytest.mark.parametrize("build", WRONG)
def test_text_is_called_text(tmp_path: Path, build: Any) -> None:
    with pytest.raises(UserError, match=r"(is|are) text") as caught:
        build(tmp_path)
    assert "\n" not in str(caught.value)
    assert "'a'" in str(caught.value)
    assert not any(cell in str(caught.value) for cell in TEXT.ravel())


@pytest.mark.parametrize(
    ("x", "y"),
    [
        case("text for numbers", "estimator, an array", TEXT, Y),
        case("text for numbers", "estimator, lists", TEXT.tolist(), Y),
        case("text for numbers", "estimator, bytes", TEXT.astype("S"), Y),
        case("text for numbers", "estimator, words for quantities", X, np.array(["Doe"] * 12)),
    ],
)
def test_an_estimator_says_so_in_its_own_words(x: Any, y: Any) -> None:
    with pytest.raises(ValueError, match=r"(X|y) holds text.*takes numbers") as caught:
        FederatedRegressor(rounds=1).fit(x, y)
    assert "Doe" not in str(caught.value)
    if x is not X:
        trained = FederatedClassifier(rounds=1).fit(X, Y)
        with pytest.raises(ValueError, match="X holds text"):
            trained.predict(x)


def test_what_is_numbers_column_by_column_is_taken() -> None:
    frame = pandas.DataFrame(TEXT).astype(object)
    assert FederatedClassifier(rounds=1).fit(frame, Y).predict(frame).shape == (12,)


@pytest.mark.case("missing columns", "CSV, other capitals at one site: site, column and near name")
def test_a_missing_column_is_named_with_its_site(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"age": X[:, 0], "chol": X[:, 1], "ill": Y})
    other = frame.rename(columns={"chol": "Chol"})
    files = {"north": tmp_path / "1.csv", "south": tmp_path / "2.csv"}
    frame.to_csv(files["north"], index=False)
    other.to_csv(files["south"], index=False)
    fields = {"name": "table", "sites": files, "label": "ill", "numeric": ["age", "chol"]}
    with pytest.raises(UserError, match=r"site 'south'.*2\.csv.*'chol'; did you mean 'Chol'") as caught:
        parse(fields).build()
    assert "Chol" not in caught.value.public
    with pytest.raises(UserError, match=r"site 'south' has no column 'chol'.*did you mean 'Chol'"):
        data_section({"north": frame, "south": other}, label="ill")
