"""Rows of text to predict: their names, and files that are written otherwise than those of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.data import registry
from fedshift.data.inference import rows_to_predict, table_to_predict
from fedshift.data.table_files import SiteFormat, TableFormat
from fedshift.data.text_columns import TextEncoding


def test_rows_are_named_and_read_as_those_that_trained(tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "good": 1, "bad": 2}, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    rows = "".join(f"p{row};{('bad', 'good')[row % 2]};{row % 2}\n" for row in range(8))
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text(f"nr;said;y\n{rows}")
    sites = {site: str(tmp_path / f"{site}.csv") for site in "ab"}
    section = {"name": "table", "label": "y", "text": "said", "tokenizer": str(tmp_path / "t.json"), "length": 3}
    preprocessing = registry.parse({**section, "id": "nr", "separator": ";", "sites": sites}).build().preprocessing
    (tmp_path / "alike.csv").write_text("nr;said\nx1;good\nx2;good bad\n")
    (tmp_path / "other.csv").write_text("number,words\nx1,good\nx2,good bad\n")
    own = SiteFormat.model_validate({"separator": ",", "rename": {"number": "nr", "words": "said"}})
    for name, written in (("alike", None), ("other", own)):
        table = table_to_predict(tmp_path / f"{name}.csv", preprocessing, written)
        assert table is not None
        names, tokens = rows_to_predict(preprocessing, table)
        assert names == ["x1", "x2"]
        assert np.array_equal(tokens, [[1, -1, -1], [1, 2, -1]])
    encoding = TextEncoding(column="note", length=4, tokenizer="")
    path = tmp_path / "new.csv"
    path.write_text('7,"hello, you"\n8,bye\n')
    table = table_to_predict(path, encoding.preprocessing(TableFormat(header="none", columns=("pid", "note")), "pid"))
    assert list(table.column("note")) == ["hello, you", "bye"]
