"""Your own tables: one file per site or one for all, with one encoding that sites agree on without pooling rows.

Their samples are numbers of several columns, or the tokens of one column of text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from fedshift.data.agreement import MOMENTS, table_given
from fedshift.data.builders.in_memory import Held, InMemory, SiteSamples
from fedshift.data.builders.table_labels import CLASSES, Condition, classes_of, labels_of, quantities_of
from fedshift.data.checks import agreed_classes, check_dataset
from fedshift.data.codings import count_columns
from fedshift.data.databases import Database, read_query
from fedshift.data.domain import DataSet, DataSource, Domain, Inputs, Labels, Manifest, Preprocessing
from fedshift.data.identifiers import check_categories
from fedshift.data.input_guard import InputShift, table_shift
from fedshift.data.site_labels import labelled_name, unknown_labels, unread
from fedshift.data.site_scale import check_scale
from fedshift.data.splits import fixed_split
from fedshift.data.table_files import (
    PLAIN,
    Codes,
    Columns,
    SiteFormat,
    Spellings,
    TableFormat,
    canonical,
    from_columns,
    is_missing,
    merge_formats,
    read_table,
    split_by_site,
)
from fedshift.data.tables import TableEncoding, TableStatistics, agreed_encoding, encode, encoding_of, site_statistics
from fedshift.data.tasks.task_fields import TaskFields, label_sums, sites_for_statistics
from fedshift.data.text_columns import LONGEST, TextEncoding, text_encoding
from fedshift.errors import UserError, nearest
from fedshift.functional.noisy_moments import Ranges


class Table(TableFormat, TaskFields):
    """CSV, Excel or Parquet files, or databases, with a column of labels, and of numbers, categories or one of text."""

    name: Literal["table"] = "table"
    sites: dict[str, SiteSamples] | None = Field(
        None,
        min_length=1,
        description="site name: its CSV, Excel or Parquet file, its folder of partitioned Parquet, or with query the "
        "address of its database, such as sqlite:///omop.db or postgresql://reader@host/omop",
    )
    file: Held | None = Field(None, description="one such file, folder or database of all sites, instead of sites")
    query: Path | None = Field(
        None, description="a text file with one SELECT statement: the rows that it gives are the table of a database"
    )
    site_column: str | None = Field(None, description="with file: the column that holds the name of each row's site")
    label: str | tuple[str, ...] | None = Field(
        None,
        description="the column that holds the class, or for regression the quantity; for multi_label the list of "
        "columns that hold 1 where a sample has the label, else 0",
    )
    time: str | None = Field(
        None, description="task time_to_event: the column of times until the event or the last look"
    )
    event: str | None = Field(
        None, description="task time_to_event: the column with 1 where the event happened, else 0"
    )
    positive: str | None = Field(
        None,
        description="instead of label: a condition on a column, such as num > 0, that makes the classes negative and "
        "positive (>, >=, <, <=, = or !=)",
    )
    labels: Spellings | None = Field(
        None, description="with label: value in the file: its class, such as {0: healthy, 1: ill, 2: ill}"
    )
    numeric: tuple[str, ...] = Field((), description="columns of numbers, standardised over the sites")
    standardise: Literal[True, "per_site"] = Field(
        True,
        description="true: numbers are scaled by mean and deviation over the sites; per_site: then by those of each "
        "site's own training rows, of a target's own unlabelled ones",
    )
    categorical: tuple[str, ...] = Field((), description="columns of categories, one 0/1 column per category")
    text: str | None = Field(None, description="instead of numeric and categorical: the column of text, read as tokens")
    tokenizer: Path | None = Field(
        None, description="with text: a tokenizer.json on this machine, or a folder with one or one of transformers"
    )
    length: int = Field(128, ge=1, le=LONGEST, description="with text: most tokens of a text; longer ones are cut")
    many_categories: tuple[str, ...] = Field(
        (),
        description="columns of categories or classes that may have a value for every few rows; their values leave "
        "the site and are written into the model file",
    )
    id: str | None = Field(None, description="the column that names each row; predictions give it back")
    split: str | None = Field(
        None,
        description="the column that says train or test in each row: a fixed test set, which takes the place of "
        "protocol.test_fraction",
    )
    missing_values: Codes = Field(
        default_factory=dict,
        description="numeric column: numbers that mean missing, such as {cholesterol: 0}, in the file's own unit",
    )
    per_site: dict[str, SiteFormat] = Field(
        default_factory=dict,
        description="site: how its file is written (any of header, columns, decimal, thousands, encoding, separator, "
        "sheet, rename, units, missing_values), where it differs from the others; mappings add to those of all",
    )
    impute: Literal["mean", "drop"] | dict[str, float | str] = Field(
        "mean",
        description="mean: a missing number is read as the mean of the sites that give statistics; {column: value}: as "
        "this number or category; drop: rows with a missing cell in a listed column are left out",
    )
    missing_classes: Literal["check", "allow"] = Field(
        "check", description="check: refuse when two sites each have a label that the other lacks; allow: warn only"
    )
    statistics_from: tuple[str, ...] | None = Field(
        None, description="the sites whose sums and category sets define the encoding; unset: all"
    )

    later: ClassVar[tuple[str, ...]] = (*TaskFields.later, "text", "tokenizer", "length", "standardise")
    _further: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.sites is None) == (self.file is None):
            raise ValueError("give either sites, a file for each, or file, one for all")
        if (self.file is None) != (self.site_column is None):
            raise ValueError("file and site_column go together: the file of all sites, and its column of their names")
        held = [self.file] if self.file is not None else [*(self.sites or {}).values()]
        if any(isinstance(item, Database) != (self.query is not None) for item in held):
            raise ValueError("query and the addresses of databases go together, at all sites")
        of_times = self.task == "time_to_event"
        if any((column is not None) != of_times for column in (self.time, self.event)):
            raise ValueError("time and event go together with task: time_to_event, which needs both columns")
        if of_times and self.label is not None:
            raise ValueError("label: task time_to_event has time and event in its place; leave it out")
        several = self.label is not None and not isinstance(self.label, str)
        if several != (self.task == "multi_label") or (several and len(self.label_columns) < 2):
            raise ValueError("label: task multi_label needs a list of two columns or more, other tasks one column")
        if not of_times and (self.label is None) == (self.positive is None):
            raise ValueError("give either label, the column of the class, or positive, such as num > 0")
        if self.task != "classification" and (self.positive is not None or self.labels is not None):
            raise ValueError(f"positive and labels make classes, and task is {self.task}: leave them out")
        if self.labels is not None and self.label is None:
            raise ValueError("labels needs label, the column whose values it maps to classes")
        return self

    @model_validator(mode="after")
    def _columns_once(self) -> Self:
        columns = [*self.label_columns, *self.numeric, *self.categorical]
        if self.site_column in columns:
            raise ValueError(f"column '{self.site_column}' names the site: it may be neither label nor feature")
        if self.split is not None and self.split in (*columns, self.site_column, self.id):
            raise ValueError(f"column '{self.split}' is the split: it may be neither label, feature, site nor id")
        twice = next((name for name, count in Counter(columns).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"column '{twice}' is listed more than once among label, numeric and categorical")
        if len(columns) == len(self.label_columns) and self.text is None:
            raise ValueError("name at least one column under numeric or categorical, or one under text")
        return self

    @model_validator(mode="after")
    def _text_alone(self) -> Self:
        if (self.text is None) != (self.tokenizer is None):
            raise ValueError("text and tokenizer go together: the column, and the tokenizer that reads it")
        if self.text is None and self.length != type(self).model_fields["length"].default:
            raise ValueError("length is for text: name its column, or leave it out")
        if self.text is not None and self.standardise == "per_site":
            raise ValueError("standardise: text becomes tokens, which are not scaled: leave it out")
        if self.text is not None and (self.numeric or self.categorical):
            raise ValueError("text: a network reads tokens or numbers, so leave out numeric and categorical")
        if self.text is not None and self.text in (*self.label_columns, self.site_column, self.id, self.split):
            raise ValueError(f"column '{self.text}' is the text: it may be neither label, site, id nor split")
        return self

    @model_validator(mode="after")
    def _columns_listed(self) -> Self:
        numeric, categorical = set(self.numeric), set(self.categorical)
        for name in self.many_categories:
            if name not in categorical and name not in self.label_columns:
                raise ValueError(f"many_categories: '{name}' is neither listed under categorical nor the label")
        for name, value in self._fills.items():
            if name not in numeric and name not in categorical:
                raise ValueError(f"impute: '{name}' is not listed under numeric or categorical")
            if name in numeric and not isinstance(value, float):
                raise ValueError(f"impute: '{name}' is numeric, and '{value}' is not a number")
        return self

    @model_validator(mode="after")
    def _formats_fit(self) -> Self:
        scalable = {*self.numeric, *(() if self.task in ("classification", "multi_label") else self.label_columns[:1])}
        numeric = set(self.numeric)
        for site in ("", *self.per_site):
            form = self._form_of(site)
            codes, factors = self._codes(site), form.units
            if (name := next((name for name in form.spellings if name in numeric), None)) is not None:
                raise ValueError(f"spellings: '{name}' is listed under numeric")
            if (name := next((name for name in codes if name not in numeric), None)) is not None:
                raise ValueError(f"missing_values: '{name}' is not listed under numeric")
            if (name := next((name for name in factors if name not in scalable), None)) is not None:
                raise ValueError(f"units: '{name}' is no column of numbers of this section")
        for site, form in self.per_site.items():
            if self.sites is not None and site not in self.sites:
                raise ValueError(f"per_site: there is no site '{site}'; {nearest(site, self.sites)}")
            if self.file is not None and (fields := form.model_fields_set - {"units", "missing_values"}):
                raise ValueError(f"per_site: one file of all sites is written in one way: set {min(fields)} for all")
        return self

    @property
    def label_column(self) -> str:
        """The column that holds the label."""
        return self.label_columns[0]

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns that labels are made of."""
        condition = self._condition
        if self.time is not None and self.event is not None:
            return self.time, self.event
        if condition is not None:
            return (condition.column,)
        return (self.label,) if isinstance(self.label, str) else tuple(self.label or ())

    @property
    def _condition(self) -> Condition | None:
        return None if self.positive is None else Condition.parse(self.positive)

    @property
    def _fills(self) -> Mapping[str, float | str]:
        if isinstance(self.impute, str):
            return {}
        return {
            name: canonical(str(value)) if name in self.categorical else value for name, value in self.impute.items()
        }

    @property
    def _form(self) -> TableFormat:
        return TableFormat(**{name: getattr(self, name) for name in TableFormat.model_fields})

    def _form_of(self, site: str) -> TableFormat:
        form = self.per_site.get(site)
        return self._form if form is None else merge_formats(self._form, form)

    def _codes(self, site: str) -> dict[str, tuple[float, ...]]:
        """Numeric column → the numbers that mean missing at a site, in the common unit."""
        missing_values = self.per_site[site].missing_values if site in self.per_site else {}
        factors = self._form_of(site).units
        return {
            name: tuple(number * factors.get(name, 1.0) for number in numbers)
            for name, numbers in {**self.missing_values, **missing_values}.items()
        }

    @property
    def _numbers(self) -> frozenset[str]:
        """The columns whose cells are read as numbers."""
        labels = () if self.has_classes and self._condition is None else self.label_columns
        return frozenset((*self.numeric, *labels))

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Your own tables",
            source="yours",
            licence="yours",
            how_to_get="save one CSV, Excel or Parquet file per site, and give data.sites; or one file with a column "
            "of the sites' names, and give data.file and data.site_column; or give a query of a database",
            layout="CSV (comma, semicolon or tab; first line: column names, unless header is none), .xlsx, Parquet, a "
            "folder of partitioned Parquet (column=value), or a SELECT statement on SQLite or PostgreSQL",
            notes="Each site gives counts, sums and sums of squares of its numeric columns and the sets of its "
            "categories and labels, never rows. Missing cells (empty, ?, NA, NaN): the mean unless impute says other, "
            "and a 0/1 column for each number that is missing anywhere; categories: all zeros. A site that is unseen "
            "gives no statistics.",
        )

    @property
    def shares(self) -> tuple[str, ...]:
        return ("statistics",) if self.text is None or self.scales_labels else ()

    def labelled_by(self) -> dict[str, Any] | None:
        if not self.has_classes:
            return None
        chosen = {"positive": self.positive, "labels": self.labels}
        return {"column": self.label_column, **{name: value for name, value in chosen.items() if value is not None}}

    def without(self, unseen: str) -> DataSource:
        if self.text is not None:
            return self.without_labels(unseen)
        chosen = tuple(site for site in self._giving(self.statistics_from) if site != unseen)
        fewer = self.model_copy(update={"statistics_from": chosen})
        fewer._further = self._further or fewer != self
        return fewer if self.label_statistics_from is None else fewer.without_labels(unseen)

    def without_labels(self, site: str) -> DataSource:
        if not self.scales_labels:
            return self
        chosen = self._giving(self.label_statistics_from or self.statistics_from)
        return self.model_copy(update={"label_statistics_from": tuple(name for name in chosen if name != site)})

    def _giving(self, chosen: tuple[str, ...] | None) -> tuple[str, ...]:
        return chosen or self.part_names(self.sites if self.sites is not None else self._tables())

    def build(self) -> DataSet:
        """Domains of float32 features (n, d), or int64 tokens (n, length).

        UserError if a file cannot be used; names file, line and column.
        """
        whole = self._whole_tables()
        warnings = tuple(self._unread_labels(whole))
        tables = self._complete(whole)
        self._check_identifiers(tables)
        named = (
            {} if not self.has_classes else {site: self._known_labels(site, table) for site, table in tables.items()}
        )
        classes = self._classes({site: names for site, names in named.items() if site not in self.site_labels})
        labels = {site: self._numbers_of(site, table, named.get(site, ()), classes) for site, table in tables.items()}
        read, encoding = self._inputs(tables)
        domains = {site: self._domain(site, table, read[site], labels[site]) for site, table in tables.items()}
        parts = dict.fromkeys(self.part_names(tables))
        scaling = sites_for_statistics(self.label_statistics_from or self.statistics_from, parts)
        known = [label_sums(labels[site][domains[site].described]) for site in scaling] if self.scales_labels else []
        objective = self.objective(known)
        preprocessing = encoding.model_copy(update={"objective": objective})
        compared = {} if self._further else whole  # none in a further encoding of the same tables
        columns = {site: count_columns(table, self.numeric, self.categorical) for site, table in compared.items()}
        domains = self.by_labels(domains)
        return check_dataset(DataSet(self.name, domains, classes, preprocessing, self.manifest(), warnings, columns))

    def _inputs(self, tables: Mapping[str, Columns]) -> tuple[dict[str, Inputs], Preprocessing]:
        """What networks read of each site's rows, and how it was made."""
        form = None if self._form == PLAIN else self._form
        if (text := self._text) is not None:
            return {site: text.tokens(table) for site, table in tables.items()}, text.preprocessing(form, self.id)
        encoding = self._encoding(tables)
        encoding = encoding.with_choices(self._codes(""), self._fills, form, self.id)
        scale = None if self.standardise is True else self.standardise
        preprocessing = encoding.preprocessing().model_copy(update={"standardise": scale})
        return {site: encode(table, encoding) for site, table in tables.items()}, preprocessing

    @cached_property
    def _text(self) -> TextEncoding | None:
        """How the column of text becomes tokens, if there is one."""
        if self.text is None or self.tokenizer is None:
            return None
        return text_encoding(self.text, self.length, self.tokenizer)

    def _unread_labels(self, tables: Mapping[str, Columns]) -> Iterator[str]:
        """A warning for each site that has labels and is said to have none."""
        for site in (site for site, label in self.site_labels.items() if label == "none"):
            cells = [cell for name in self.label_columns for cell in tables[site].cells.get(name, ())]
            known = sum(not is_missing(cell) for cell in cells)
            if known:
                yield unread(site, f"labels in {known} rows", "write few to measure there")

    def _check_identifiers(self, tables: Mapping[str, Columns]) -> None:
        """Raise UserError if a column of categories or classes names rows, unless ``many_categories`` lists it."""
        as_written = self.has_classes and self.positive is None and self.labels is None
        check_categories(tables, [name for name in self.categorical if name not in self.many_categories], [])
        labelled = {site: tables[site] for site in self.labelled_sites(tables)}
        labels = [name for name in self.label_columns if as_written and name not in self.many_categories]
        check_categories(labelled, [], labels)

    def _classes(self, labels: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """What networks have an output for: the classes of all sites together, or the column of a quantity."""
        if not self.has_classes:
            return self.label_columns if self.task == "multi_label" else self.label_columns[:1]
        if self._elsewhere:
            return self._elsewhere
        result = agreed_classes(
            {site: set(names) for site, names in labels.items()},
            what=f"labels in column '{self.label_column}'",
            allow_missing=self.missing_classes == "allow" or self.positive is not None,
        )
        return result if self.positive is None else CLASSES

    def _stored_labels(self, table: Columns, labels: Sequence[str], classes: Sequence[str]) -> Labels:
        """The labels of a table's rows as a domain holds them; ``labels``: their names, where they are classes."""
        if not self.has_classes:
            return labels_of(table, self.task, self.label_columns)
        number_of = {name: number for number, name in enumerate(classes)}
        return np.array([number_of[name] for name in labels], dtype=np.int64)

    def _known_labels(self, site: str, table: Columns) -> list[str]:
        """The classes of a site's rows; of one with few labels those of its labelled rows."""
        text = self.site_labels.get(site)
        if text == "none":
            return []
        known = table if text is None else table.rows(self._labelled_rows(table))
        return classes_of(known, self.label_column, self._condition, self.labels)

    def _labelled_rows(self, table: Columns) -> list[int]:
        return [row for row, cell in enumerate(table.cells[self.label_column]) if not is_missing(cell)]

    def _numbers_of(self, site: str, table: Columns, labels: Sequence[str], classes: Sequence[str]) -> Labels:
        """As `_stored_labels`, of a site that may lack labels."""
        if site not in self.site_labels:
            return self._stored_labels(table, labels, classes)
        if unknown := sorted(set(labels) - set(classes)):
            raise UserError(
                f"{table.path}: label '{unknown[0]}' of site '{site}' is none of the classes of the sites that train; "
                f"{nearest(unknown[0], classes)}"
            )
        numbers = unknown_labels(len(table))
        if labels:
            numbers[self._labelled_rows(table)] = self._stored_labels(table, labels, classes)
        return numbers

    def gives(self) -> dict[str, Any] | None:
        if self.text is not None:
            return self._label_given()
        if self._fills:
            raise UserError(
                "data: sites of a deployment cannot agree on values of impute: write the values into the file, or "
                "leave such cells empty"
            )
        given = table_given(self.statistics(), self.numeric, self.categorical)
        if self.scales_labels:
            (table,) = self._tables().values()
            given["label"] = label_sums(quantities_of(self._training_rows(table), self.label_column))
        return given

    def _label_given(self) -> dict[str, Any] | None:
        """What a site of text gives: the sums of a quantity, and of its texts nothing."""
        if not self.scales_labels:
            return None
        (table,) = self._tables().values()
        label = label_sums(quantities_of(self._training_rows(table), self.label_column))
        return {"kind": MOMENTS, "count": int(label["count"]), "total": [], "squares": [], "label": label}

    def statistics(self, ranges: Ranges | None = None) -> TableStatistics:
        (table,) = self._parts(self._tables()).values()
        return site_statistics(self._training_rows(table), self.numeric, self.categorical, ranges)

    def table_shift(self, site: str | None = None, preprocessing: Preprocessing | None = None) -> InputShift:
        if self.text is not None:
            return InputShift()
        tables = self._tables()
        encoding = self._encoding(tables) if preprocessing is None else encoding_of(preprocessing)
        parts = self._parts(tables)
        table = next(iter(parts.values())) if site is None else parts[site]
        return table_shift(table, encoding, own_scale=self.standardise == "per_site")

    def _parts(self, tables: Mapping[str, Columns]) -> dict[str, Columns]:
        """The tables that give statistics; of ``few_train`` the rows without a label and those with one apart."""
        parts: dict[str, Columns] = {}
        for site, table in tables.items():
            parts[site] = table
            if self.site_labels.get(site) == "few_train":
                known = self._labelled_rows(table)
                rest = sorted({*range(len(table))} - {*known})
                parts |= {site: table.rows(rest), labelled_name(site): table.rows(known)}
        return self.giving(parts)

    def _encoding(self, tables: Mapping[str, Columns]) -> TableEncoding:
        """The encoding of the sites that give statistics."""
        parts = {site: self._training_rows(table) for site, table in self._parts(tables).items()}
        chosen = sites_for_statistics(self.statistics_from, parts)
        statistics = [site_statistics(parts[site], self.numeric, self.categorical) for site in chosen]
        return agreed_encoding(statistics, self.numeric, self.categorical)

    def encode(self, preprocessing: Preprocessing, classes: tuple[str, ...]) -> DataSet:
        """The tables in the agreed encoding. The coordinator can choose the encoding, and it sees the error messages.

        Raises:
            UserError: the encoding has other columns than are listed here, or does not fit the files. The message shows
                no cell and no name of a column that is not listed here.
        """
        if (text := self._text) is not None:
            if preprocessing.text != text.preprocessing().text:
                raise UserError("the federation reads another column of text, or by another tokenizer or length")
            self.check_objective(preprocessing)
            return super().encode(preprocessing, classes)
        encoding = self._own_encoding(preprocessing)
        self.check_objective(preprocessing)
        check_scale(preprocessing, self.standardise)
        try:
            return self._encode_tables(encoding, preprocessing, classes)
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
        # No agreed encoding has missing_values, for example; they would single out the rows with one value.
        if preprocessing.kind != "table" or not encoding.is_agreed:
            raise UserError("the encoding of the table is not one that sites can agree on")
        return encoding

    def _encode_tables(
        self, encoding: TableEncoding, preprocessing: Preprocessing, classes: tuple[str, ...]
    ) -> DataSet:
        domains: dict[str, Domain] = {}
        for site, table in self._tables().items():
            labels, path = () if not self.has_classes else self._known_labels(site, table), table.path
            unknown = sorted(set(labels) - set(classes))
            if unknown:
                raise UserError(
                    f"{path}: label '{unknown[0]}' is none of the federation's classes ({', '.join(classes)})",
                    public=f"{path}: a label is none of the federation's classes ({', '.join(classes)})",
                )
            numbers = self._numbers_of(site, table, labels, classes)
            with np.errstate(over="ignore", invalid="ignore"):
                # The largest number in place of one that is too large: with a chosen mean and std, an error would tell
                # whether a cell is above a bound, at no cost to a budget of privacy.
                features = np.nan_to_num(encode(table, encoding), copy=False)
            domains[site] = self._domain(site, table, features, numbers)
        return check_dataset(DataSet(self.name, self.by_labels(domains), classes, preprocessing, self.manifest()))

    def _tables(self) -> dict[str, Columns]:
        """The table of each site, with its cells and rows as this section describes them."""
        return self._complete(self._whole_tables())

    def _complete(self, tables: Mapping[str, Columns]) -> dict[str, Columns]:
        """The tables without the rows that ``impute: drop`` leaves out."""
        if self.impute != "drop":
            return dict(tables)
        fewer = {site: table.complete((*self.numeric, *self.categorical)) for site, table in tables.items()}
        for site, table in fewer.items():
            if len(table) == 0:
                raise UserError(f"{table.path}: impute: drop leaves no row of site '{site}': choose another way")
        return fewer

    def _whole_tables(self) -> dict[str, Columns]:
        """The table of each site with all its rows, and with empty cells where a number means "missing"."""
        if self.file is not None:
            whole = self._read(self.file, "", self._form).rename_columns(self.rename)
            tables = dict(split_by_site(whole, str(self.site_column)))
            unknown = next((site for site in self.per_site if site not in tables), None)
            if unknown is not None:
                raise UserError(f"data.per_site: there is no site '{unknown}'; {nearest(unknown, tables)}")
        else:
            tables = {
                site: self._table(site, held).rename_columns(self._form_of(site).rename)
                for site, held in (self.sites or {}).items()
            }
        self.check_site_labels(tables, classes=self.has_classes)
        for site, table in tables.items():
            self._check_columns(site, table)
            form = self._form_of(site)
            table = table.respell(form.spellings).in_units(form.units)
            tables[site] = table.without_codes(self._codes(site))
        return tables

    def _check_columns(self, site: str, table: Columns) -> None:
        """Raise UserError for a column that a site's table lacks; people at other sites read inputs' names only."""
        read = (*self.numeric, *self.categorical, *([] if self.text is None else [self.text]))
        inputs = set(read)
        others = [name for name in (self.id, self.split) if name is not None]
        labels = () if self.site_labels.get(site) == "none" else self.label_columns
        for column in (*labels, *read, *others):
            try:
                table.column(column, shared=column in inputs)
            except UserError as error:
                where = "" if f"'{site}'" in str(table.path) else f"site '{site}': "
                more = f"; if it has no labels, write data.site_labels: {{{site}: none}}" if column in labels else ""
                raise UserError(f"{where}{error}{more}", public=error.public) from None

    def _table(self, site: str, held: Path | Database | InMemory) -> Columns:
        form = self._form_of(site)
        if not isinstance(held, InMemory):
            return self._read(held, f" at site '{site}'", form)
        where = f"the table of site '{site}'"
        return from_columns(where, held.columns(self.label_column), form, self._numbers)

    def _read(self, held: Path | Database, at: str, form: TableFormat) -> Columns:
        if isinstance(held, Path):
            return read_table(held, form, self._numbers)
        assert self.query is not None  # checked above
        return read_query(held, self.query, f"{self.query.name}{at}", form, self._numbers)

    def _domain(self, site: str, table: Columns, inputs: Inputs, labels: Labels) -> Domain:
        domain = Domain(site, inputs, labels, ids=None if self.id is None else tuple(table.cells[self.id]))
        if self.split is None:
            return domain
        train, test = fixed_split(table.cells[self.split], table.locate)
        return replace(domain, train_rows=train, test_rows=test, fixed_split=True)

    def _training_rows(self, table: Columns) -> Columns:
        """The rows that statistics are made of: none of a fixed test set."""
        if self.split is None:
            return table
        train, _ = fixed_split(table.cells[self.split], table.locate)
        return table.rows(train.tolist())
