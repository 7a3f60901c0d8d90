"""A column of text as tokens, by a tokenizer that lies in a local folder. Nothing is downloaded.

The tokenizer is one of the library `tokenizers`. Its whole description is part of the preprocessing, so a model file
reads text by itself, and sites of a federation that have another tokenizer are told so before training.
"""

from __future__ import annotations

import base64
import binascii
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, ValidationError

from fedshift.data.domain import NO_TOKEN, Preprocessing
from fedshift.data.table_files import Columns, TableFormat, is_missing
from fedshift.data.tables import CategoricalColumn, TableEncoding
from fedshift.errors import UserError
from fedshift.extras import import_extra
from fedshift.section import Section

LONGEST = 1 << 16
"""Most tokens of a text."""
_LARGEST = 64 << 20
"""Bytes of a tokenizer's description."""


class TextEncoding(Section):
    """How the texts of a column become tokens."""

    column: Annotated[str, StringConstraints(min_length=1, max_length=500)]  # the column
    length: int = Field(ge=1, le=LONGEST)  # tokens of a text; longer ones are cut, shorter ones end with `NO_TOKEN`
    # the description of the tokenizer: base64 of the compressed JSON of the library `tokenizers`
    tokenizer: Annotated[str, StringConstraints(max_length=_LARGEST)]

    def preprocessing(self, form: TableFormat | None = None, id: str | None = None) -> Preprocessing:
        """The preprocessing of a table that is read so.

        ``form``: how the files are written; None: with a header and decimal points; ``id``: the column that names each
        row; None: there is none.
        """
        table = None if form is None and id is None else self.columns(form, id).model_dump(mode="json")
        return Preprocessing(kind="tokens", text=self.model_dump(mode="json"), table=table)

    def columns(self, form: TableFormat | None = None, id: str | None = None) -> TableEncoding:
        """What a file to predict has: the text, which is no category of any list."""
        text = CategoricalColumn(name=self.column, categories=())
        return TableEncoding(numeric=(), categorical=(text,), form=form, id=id)

    def tokens(self, table: Columns, *, shared: bool = True) -> npt.NDArray[np.int64]:
        """The tokens of each row (n, length).

        Args:
            table: the rows. A missing cell is an empty text.
            shared: whether people at other sites know the column's name, as for `Columns.column`.

        Raises:
            UserError: the table has no such column, or the library `tokenizers` is not installed.
        """
        cells = ["" if is_missing(cell) else cell for cell in table.column(self.column, shared=shared)]
        return tokens_of(cells, self.tokenizer, self.length)


def text_encoding(column: str, length: int, path: Path) -> TextEncoding:
    """The encoding of a column by a tokenizer on this machine.

    ``path``: a ``tokenizer.json``, or a folder that holds one, or a tokenizer of transformers. UserError if there is no
    tokenizer, it cannot be read, or a library is not installed.
    """
    description = _tokenizer_json(path)
    packed = base64.b64encode(zlib.compress(description.encode(), 9)).decode()
    return TextEncoding(column=column, length=length, tokenizer=packed)


def text_encoding_of(preprocessing: Preprocessing) -> TextEncoding | None:
    """The encoding of a preprocessing; None if the tokens come from no text. UserError if it is damaged."""
    if preprocessing.text is None:
        return None
    try:
        return TextEncoding.model_validate(preprocessing.text)
    except ValidationError:
        raise UserError("the encoding of the text is damaged: it needs a column, a length and a tokenizer") from None


def tokens_of(texts: Sequence[str], tokenizer: str, length: int) -> npt.NDArray[np.int64]:
    """The tokens of texts (n, length), `NO_TOKEN` after the end of each.

    ``tokenizer``: as in `TextEncoding`; ``length``: most tokens of a text, special ones included.
    """
    made = _load_tokenizer(tokenizer)
    made.enable_truncation(length)
    out = np.full((len(texts), length), NO_TOKEN, dtype=np.int64)
    for row, encoded in enumerate(made.encode_batch(list(texts))):
        out[row, : len(encoded.ids)] = encoded.ids
    return out


@functools.lru_cache(maxsize=4)
def _load_tokenizer(tokenizer: str) -> Any:
    library = import_extra("tokenizers", extra="networks", what="a column of text")
    try:
        unpacking = zlib.decompressobj()
        description = unpacking.decompress(base64.b64decode(tokenizer, validate=True), _LARGEST)
        made = library.Tokenizer.from_str(description.decode())
    except (zlib.error, binascii.Error, UnicodeDecodeError):
        raise UserError("the tokenizer of the text is damaged") from None
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"the tokenizer cannot be read ({str(error).partition(chr(10))[0]})") from None
    made.no_padding()
    return made


def _tokenizer_json(path: Path) -> str:
    """The JSON of a tokenizer in a file or a folder, as the library writes it."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        library = import_extra("tokenizers", extra="networks", what="data.tokenizer")
        try:
            result: str = library.Tokenizer.from_file(str(file)).to_str()
        except Exception as error:  # the library raises no narrower class
            reason = str(error).partition("\n")[0]
            raise UserError(f"data.tokenizer: {file} cannot be read as a tokenizer ({reason})") from None
        return result
    if not path.is_dir():
        raise UserError(f"data.tokenizer: {path} does not exist: give a tokenizer.json, or a folder that holds one")
    transformers = import_extra("transformers", extra="networks", what="data.tokenizer")
    try:
        made = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        return str(made.backend_tokenizer.to_str())
    except Exception as error:  # of files of any kind
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise UserError(
            f"data.tokenizer: {path} holds no tokenizer.json, nor another fast tokenizer ({reason})"
        ) from None
