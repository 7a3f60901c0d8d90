"""Amazon reviews: sentiment towards four kinds of products, from counts of 5,000 words and word pairs.

Source: Blitzer, Dredze, Pereira, ACL 2007; prepared by Chen, Xu, Weinberger, Sha, ICML 2012.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing, SparseRows
from fedshift.data.locate import load_npz, require
from fedshift.errors import UserError
from fedshift.extras import import_extra

DOMAINS = ("books", "dvd", "electronics", "kitchen")
WIDTH = 5000
_CANDIDATES = ("amazon_reviews_5000.npz", "amazon_reviews", "amazon")
_HOW = (
    "Put amazon_reviews_5000.npz below FEDSHIFT_DATA, or a folder amazon_reviews with <domain>_train.svmlight and "
    "<domain>_test.svmlight"
)


class AmazonReviews(DataSource):
    """Positive and negative reviews. Each of the four domains has 2,000 training rows; the rest is for testing."""

    name: Literal["amazon_reviews"] = "amazon_reviews"
    scaling: Literal["raw", "log", "tfidf"] = Field(
        "raw", description="plain counts, log(1 + count), or tf-idf with rows of length 1"
    )

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Amazon Reviews (books, dvd, electronics, kitchen), 5,000 uni- and bigram counts",
            source="Blitzer, Dredze, Pereira, ACL 2007; Chen et al., ICML 2012; as used by Ganin et al., JMLR 2016",
            licence="reviews: research use",
            how_to_get=_HOW,
            layout=", ".join(_CANDIDATES),
            sha256={"amazon_reviews_5000.npz": "846b85092771bbfb2e12b44b6b52255f5a4b4ebd547193e3461250e8f0bff8a5"},
            counts={"books": 6465, "dvd": 5586, "electronics": 7681, "kitchen": 7945},
            notes="tf-idf: document counts of the training rows of all four domains are added up (sums, no rows, no "
            "labels; the target's unlabelled training part is among them). The svmlight files are in folder data of "
            "github.com/GRAAL-Research/domain_adversarial_neural_network.",
        )

    def build(self) -> DataSet:
        """Domains of `SparseRows`, with the data set's own training and test rows."""
        path = require("Amazon Reviews", _CANDIDATES, _HOW)
        domains = _from_npz(path) if path.is_file() else _from_svmlight(path)
        if self.scaling != "raw":
            domains = _scale_counts(domains, self.scaling)
        preprocessing = Preprocessing(kind="features")
        return check_dataset(DataSet(self.name, domains, ("negative", "positive"), preprocessing, self.manifest()))


def _from_npz(path: Path) -> dict[str, Domain]:
    parts = ("data", "indices", "indptr", "y")
    arrays = load_npz(
        path, [f"{name}_{split}_{part}" for name in DOMAINS for split in ("train", "test") for part in parts]
    )
    domains = {}
    for name in DOMAINS:
        train, test = ([arrays[f"{name}_{split}_{part}"] for part in parts] for split in ("train", "test"))
        indptr = np.concatenate([train[2].astype(np.int64), test[2][1:].astype(np.int64) + int(train[2][-1])])
        rows = SparseRows(
            np.concatenate([train[0], test[0]]).astype(np.float32),
            np.concatenate([train[1], test[1]]).astype(np.int64),
            indptr,
            WIDTH,
        )
        domains[name] = _domain(path, name, rows, np.concatenate([train[3], test[3]]).astype(np.int64), len(train[3]))
    return domains


def _from_svmlight(folder: Path) -> dict[str, Domain]:
    data_sets = import_extra("sklearn.datasets", extra="report", what="reading files of svmlight")
    domains = {}
    for name in DOMAINS:
        files = [folder / f"{name}_{split}.svmlight" for split in ("train", "test")]
        try:
            train, train_y, test, test_y = data_sets.load_svmlight_files(
                [str(file) for file in files], n_features=WIDTH
            )
        except (OSError, ValueError) as error:
            raise UserError(f"{files[0]} or {files[1].name} is missing or not in svmlight format. {_HOW}") from error
        indptr = np.concatenate(
            [train.indptr.astype(np.int64), test.indptr[1:].astype(np.int64) + int(train.indptr[-1])]
        )
        rows = SparseRows(
            np.concatenate([train.data, test.data]).astype(np.float32),
            np.concatenate([train.indices, test.indices]).astype(np.int64),
            indptr,
            WIDTH,
        )
        labels = (np.concatenate([train_y, test_y]) > 0).astype(np.int64)
        domains[name] = _domain(folder, name, rows, labels, len(train_y))
    return domains


def _domain(path: Path, name: str, rows: SparseRows, labels: npt.NDArray[np.int64], train_samples: int) -> Domain:
    whole = len(rows.data) == len(rows.indices) == rows.indptr[-1] and (np.diff(rows.indptr) >= 0).all()
    if not whole or (len(rows.indices) and not 0 <= rows.indices.min() <= rows.indices.max() < WIDTH):
        raise UserError(f"data file {path}: the sparse rows of '{name}' do not fit together: get it again")
    samples = len(labels)
    return Domain(name, rows, labels, None, np.arange(train_samples), np.arange(train_samples, samples))


def _scale_counts(domains: dict[str, Domain], scaling: Literal["log", "tfidf"]) -> dict[str, Domain]:
    """The domains with scaled counts: log(1 + count) or tf-idf.

    tf-idf is count·(ln((1 + n)/(1 + documents with the word)) + 1), with rows divided by their Euclidean length.
    """
    weight = np.ones(WIDTH)
    if scaling == "tfidf":
        documents = np.zeros(WIDTH)
        total = 0
        for domain in domains.values():
            rows = _sparse(domain)
            assert domain.train_rows is not None
            total += len(domain.train_rows)
            documents += np.bincount(rows.indices[: rows.indptr[len(domain.train_rows)]], minlength=WIDTH)
        weight = np.log((1 + total) / (1 + documents)) + 1
    out = {}
    for name, domain in domains.items():
        rows = _sparse(domain)
        if scaling == "log":
            values = np.log1p(rows.data)
        else:
            values = rows.data * weight[rows.indices]
            owner = np.repeat(np.arange(len(rows)), np.diff(rows.indptr))
            length = np.sqrt(np.bincount(owner, weights=values**2, minlength=len(rows)))
            values = values / length[owner]
        scaled = SparseRows(values.astype(np.float32), rows.indices, rows.indptr, rows.width)
        out[name] = Domain(name, scaled, domain.labels, None, domain.train_rows, domain.test_rows)
    return out


def _sparse(domain: Domain) -> SparseRows:
    assert isinstance(domain.inputs, SparseRows)
    return domain.inputs
