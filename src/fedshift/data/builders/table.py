"""Your own tables: one CSV file per site, with one encoding that sites agree on without pooling rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from fedshift.data.agreement import table_given
from fedshift.data.builders.arrays import sites_for_statistics
from fedshift.data.checks import agreed_classes, checked
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing
from fedshift.data.tables import (
    Columns,
    TableEncoding,
    agreed_encoding,
    canonical,
    encode,
    is_missing,
    read_csv,
    site_statistics,
)
from fedshift.errors import UserError


class Table(DataSource):
    """One CSV file per site, with a label column, numeric columns and categorical columns."""

    name: Literal["table"] = "table"
    sites: dict[str, Path] = Field(min_length=1, description="site name: its CSV file")
    label: str = Field(description="the column that holds the class")
    numeric: tuple[str, ...] = Field((), description="columns of numbers, standardised over the sites")
    categorical: tuple[str, ...] = Field((), description="columns of categories, one 0/1 column per category")
    missing_classes: Literal["check", "allow"] = Field(
        "check", description="check: refuse when two sites each have a label that the other lacks; allow: warn only"
    )
    statistics_from: tuple[str, ...] | None = Field(
        None, description="the sites whose sums and category sets define the encoding; unset: all"
    )

    @model_validator(mode="after")
    def _columns_once(self) -> Self:
        columns = [self.label, *self.numeric, *self.categorical]
        twice = next((name for name in columns if columns.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"column '{twice}' is listed more than once among label, numeric and categorical")
        if len(columns) == 1:
            raise ValueError("name at least one column under numeric or categorical")
        return self

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Your own tables",
            source="yours",
            licence="yours",
            how_to_get="save one CSV file per site, with the same column names, and give data.sites",
            layout="one CSV file per site (comma, semicolon or tab; first line: column names)",
            notes="Each site gives counts, sums and sums of squares of its numeric columns and the sets of its "
            "categories and labels, never rows. Missing cells (empty, ?, NA, NaN): the mean, and a 0/1 column for "
            "each number that is missing anywhere; categories: all zeros. A site that is unseen gives no statistics.",
        )

    @property
    def shares(self) -> tuple[str, ...]:
        return ("statistics",)

    def without(self, unseen: str) -> DataSource:
        chosen = self.statistics_from or tuple(self.sites)
        return self.model_copy(update={"statistics_from": tuple(site for site in chosen if site != unseen)})

    def build(self) -> DataSet:
        """Domains of float32 features (n, d).

        Raises:
            UserError: a file cannot be used; names file, line and column.
        """
        tables = {site: read_csv(path) for site, path in self.sites.items()}
        labels = {site: self._labels(table) for site, table in tables.items()}
        allow = self.missing_classes == "allow"
        classes = agreed_classes(
            {site: set(found) for site, found in labels.items()},
            what=f"labels in column '{self.label}'",
            allow_missing=allow,
        )
        for table in tables.values():  # all files, also those that give no statistics
            for column in (*self.numeric, *self.categorical):
                table.column(column)
        chosen = sites_for_statistics(self.statistics_from, self.sites)
        statistics = [site_statistics(tables[site], self.numeric, self.categorical) for site in chosen]
        encoding = agreed_encoding(statistics, self.numeric, self.categorical)
        number_of = {name: number for number, name in enumerate(classes)}
        domains = {
            site: Domain(
                site, encode(table, encoding), np.array([number_of[name] for name in labels[site]], dtype=np.int64)
            )
            for site, table in tables.items()
        }
        return checked(DataSet(self.name, domains, classes, encoding.preprocessing(), self.manifest()))

    def gives(self) -> dict[str, Any] | None:
        (table,) = (read_csv(path) for path in self.sites.values())
        return table_given(site_statistics(table, self.numeric, self.categorical), self.numeric, self.categorical)

    def encoded(self, preprocessing: Preprocessing, classes: tuple[str, ...]) -> DataSet:
        """The tables in the agreed encoding. The coordinator can choose the encoding, and it sees the error messages.

        Raises:
            UserError: the encoding has other columns than are listed here, or does not fit the files. The message shows
                no cell and no name of a column that is not listed here.
        """
        encoding = self._own_encoding(preprocessing)
        try:
            return self._encoded(encoding, preprocessing, classes)
        except UserError as error:
            raise UserError(error.public) from None

    def _own_encoding(self, preprocessing: Preprocessing) -> TableEncoding:
        """The encoding, checked to have exactly the columns that are listed here."""
        try:
            encoding = TableEncoding.model_validate(preprocessing.table)
        except ValidationError:
            raise UserError(
                "the encoding of the table is damaged: each numeric column needs a finite mean and a std above 0"
            ) from None
        for what, wanted, listed in (
            ("numeric", tuple(column.name for column in encoding.numeric), self.numeric),
            ("categorical", tuple(column.name for column in encoding.categorical), self.categorical),
        ):
            if wanted != listed:
                raise UserError(
                    f"the encoding of the table has other {what} columns than data.{what} lists: all sites must list "
                    "the same names in the same order"
                )
        # No agreed encoding has missing_values; they would single out the rows with one value.
        if preprocessing.kind != "table" or any(column.missing_values for column in encoding.numeric):
            raise UserError("the encoding of the table is not one that sites can agree on")
        return encoding

    def _encoded(self, encoding: TableEncoding, preprocessing: Preprocessing, classes: tuple[str, ...]) -> DataSet:
        domains: dict[str, Domain] = {}
        for site, path in self.sites.items():
            table = read_csv(path)
            labels = self._labels(table)
            unknown = sorted(set(labels) - set(classes))
            if unknown:
                raise UserError(
                    f"{path}: label '{unknown[0]}' is none of the federation's classes ({', '.join(classes)})",
                    public=f"{path}: a label is none of the federation's classes ({', '.join(classes)})",
                )
            numbers = np.array([classes.index(name) for name in labels], dtype=np.int64)
            with np.errstate(over="ignore", invalid="ignore"):
                features = encode(table, encoding)
            # `checked` would name row and column: with chosen means, that reveals a cell.
            if not np.isfinite(features).all():
                raise UserError(f"{path}: the encoding makes numbers that are too large")
            domains[site] = Domain(site, features, numbers)
        return checked(DataSet(self.name, domains, classes, preprocessing, self.manifest()))

    def _labels(self, table: Columns) -> list[str]:
        cells = table.column(self.label)
        for row, cell in enumerate(cells):
            if is_missing(cell):
                where = f"{table.path}, line {table.lines[row]}"
                raise UserError(
                    f"{where}, column '{self.label}': the label is missing: fill or drop the row",
                    public=f"{where}: the label is missing: fill or drop the row",
                )
        return [canonical(cell) for cell in cells]
