"""The rows of a query as a table, from a database that is opened for reading only, by SQLAlchemy.

Nothing of a query's rows is written anywhere. SQLite is opened with ``mode=ro`` and an authorizer that lets nothing but
reading be prepared, so neither ``ATTACH`` nor ``VACUUM INTO`` makes a file. PostgreSQL begins a transaction ``READ
ONLY``, and takes one statement, so that a query cannot end this transaction. Other databases are refused: nobody tried
how they are opened so.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from fedshift.data import sizes
from fedshift.data.table_files import PLAIN, Columns, TableFormat, from_columns
from fedshift.errors import UserError
from fedshift.extras import import_extra
from fedshift.files import read_text

PASSWORD_FILE, PASSWORD = "FEDSHIFT_DATABASE_PASSWORD_FILE", "FEDSHIFT_DATABASE_PASSWORD"
"""Environment variables: the file that holds the password of the database's user, or the password itself."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+]*://")
_SQLITE = "sqlite:///"
_AT_ONCE = 10_000
_MOST_WORDS = 300
_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


@dataclass(frozen=True)
class Database:
    """A database by its address, such as ``sqlite:///omop.db``. The address holds no password."""

    address: str

    def __str__(self) -> str:
        return self.address


def is_address(text: str) -> bool:
    """Whether a text is the address of a database, rather than a path.

    Example:
        >>> is_address("postgresql://reader@db.hospital.example/omop"), is_address("north.csv")
        (True, False)
    """
    return _ADDRESS.match(text) is not None


def database(text: str) -> Database:
    """The database at an address.

    Raises:
        UserError: the address holds a password, which the message does not repeat; or the database is of a kind that is
            not read.
    """
    try:
        parts = urlsplit(text)
        secret = parts.password is not None
    except ValueError:
        raise UserError("data: the address of a database is damaged: write such as sqlite:///omop.db") from None
    if secret or any("password" in name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise UserError(
            f"data: the address of a database holds a password: leave it out, and set {PASSWORD_FILE} to a file that "
            "holds it"
        )
    if parts.scheme not in ("sqlite", "postgresql"):
        kind = "".join(letter for letter in parts.scheme if letter.isprintable())[:30]
        raise UserError(
            f"data: databases of kind '{kind}' are not read: give sqlite:///FILE or postgresql://USER@HOST/NAME"
        )
    return Database(text)


def below(text: str, at: Callable[[str], str]) -> str:
    """An address whose file, if it is one of SQLite with a relative path, is where ``at`` says.

    Example:
        >>> below("sqlite:///omop.db", lambda path: f"/study/{path}")
        'sqlite:////study/omop.db'
    """
    address = database(text).address
    return f"{_SQLITE}{at(address.removeprefix(_SQLITE))}" if address.startswith(_SQLITE) else address


def read_query(
    held: Database, query: Path, where: str, form: TableFormat = PLAIN, numeric: Collection[str] = ()
) -> Columns:
    """The rows that a query gives, as a table.

    Args:
        query: a file with one statement, a SELECT.
        form: how numbers are written in values that are text.

    Raises:
        UserError: the file or the database cannot be read, the statement writes or is wrong, or it gives no row.
    """
    sqlalchemy = import_extra("sqlalchemy", extra="databases", what=f"{where}, a query of a database,")
    statement = read_text(query, "data.query: ")
    secret = password()
    try:
        with sizes.reading(where), _engine(sqlalchemy, held, secret).connect() as connection:
            reading = connection.execution_options(no_parameters=True, stream_results=True)
            result = reading.exec_driver_sql(statement)
            if not result.returns_rows:
                raise UserError(f"{where} gives no rows: write one SELECT statement into {query.name}")
            names, rows = list(result.keys()), list[Any]()
            while some := result.fetchmany(_AT_ONCE):
                rows += some
                sizes.check_table(where, len(rows), len(names))
    except UserError:
        raise
    except (sqlalchemy.exc.SQLAlchemyError, ImportError, sqlite3.Error) as error:
        raise _refusal(where, held, getattr(error, "orig", None) or error, secret) from None
    _check_names(where, names)
    return from_columns(where, {name: [row[at] for row in rows] for at, name in enumerate(names)}, form, numeric)


def _check_names(where: str, names: list[str]) -> None:
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise UserError(
            f"{where} gives two columns '{twice}': name one of them with AS",
            public=f"{where} gives two columns of one name",
        )


def _refusal(where: str, held: Database, error: BaseException, secret: str | None) -> UserError:
    """What a database says, in one line without the password; it may quote cells, so others read none of it."""
    text = " ".join(str(error).split())
    if secret:
        text = text.replace(secret, "…")
    words = "".join(letter for letter in text if letter.isprintable())[:_MOST_WORDS]
    more = "" if held.address.startswith(_SQLITE) else f" or the address, or set {PASSWORD_FILE}"
    return UserError(
        f"{where}: the database, which is open for reading only, refuses ({words}): mend the query{more}",
        public=f"{where}: the database refuses the query",
    )


def password() -> str | None:
    """The password that the environment, or a file that it names, holds; None if there is none.

    UserError if the file cannot be read, or every user of this machine can.
    """
    file = os.environ.get(PASSWORD_FILE)
    if not file:
        return os.environ.get(PASSWORD) or None
    try:
        if os.stat(file).st_mode & 0o007:
            raise UserError(f"{PASSWORD_FILE}: every user of this machine can use {file}: chmod 600 {file}")
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n") or None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{PASSWORD_FILE}: cannot read {file}: {why}") from None


def _engine(sqlalchemy: Any, held: Database, secret: str | None) -> Any:
    if held.address.startswith("sqlite:"):
        return sqlalchemy.create_engine(
            "sqlite://", creator=lambda: _sqlite(held), poolclass=sqlalchemy.pool.NullPool, hide_parameters=True
        )
    url = sqlalchemy.make_url(held.address).set(drivername="postgresql+psycopg", password=secret)
    return sqlalchemy.create_engine(
        url,
        poolclass=sqlalchemy.pool.NullPool,
        hide_parameters=True,
        execution_options={"postgresql_readonly": True},
        connect_args={
            "options": "-c default_transaction_read_only=on",
            "prepare_threshold": 0,  # a prepared statement is one statement
            "connect_timeout": 10,
        },
    )


def _sqlite(held: Database) -> sqlite3.Connection:
    file = held.address.removeprefix(_SQLITE)
    if not file or not held.address.startswith(_SQLITE) or not Path(file).is_file():
        raise UserError(f"data: there is no database {held}: write sqlite:/// and the path of a file that exists")
    connection = sqlite3.connect(f"file:{quote(str(Path(file).resolve()))}?mode=ro", uri=True)
    connection.set_authorizer(_authorise)
    return connection


def _authorise(action: int, what: str | None, value: str | None, *_: str | None) -> int:
    """Whether a step of a statement reads. SQLAlchemy asks for one setting of a new connection."""
    asks = (action, what, value) == (sqlite3.SQLITE_PRAGMA, "read_uncommitted", None)
    return sqlite3.SQLITE_OK if asks or action in _READING else sqlite3.SQLITE_DENY
