"""Tables from a query: the rows are those that Python counts, nothing is written, and no password is told."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshift
from fedshift.data import sizes
from fedshift.data.builders.table_labels import Condition
from fedshift.data.databases import PASSWORD, PASSWORD_FILE, Database, read_query
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from omop import GLUCOSE, TABLES, rows, sqlite_database

pytest.importorskip("sqlalchemy")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUERY = str(EXAMPLES / "omop.sql")
SECRET = "hunter2-zebra"


def asked(place: Path, statement: str) -> Any:
    (place / "query.sql").write_text(statement)
    return read_query(Database(f"sqlite:///{place / 'held.db'}"), place / "query.sql", "query.sql")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    sqlite_database(tmp_path / "held.db")
    return tmp_path


def test_the_query_of_the_example_gives_what_the_rows_say(place: Path) -> None:
    """Ages, means and diagnoses as plain Python counts them from the same rows."""
    table = asked(place, (EXAMPLES / "omop.sql").read_text())
    held = rows(0)
    values = [[value for _, person, _, value in held["measurement"] if person == number] for number in range(40)]
    assert [float(cell) for cell in table.column("age")] == [2026 - int(born) for _, born, _ in held["person"]]  # type: ignore[call-overload]
    assert list(table.column("gender")) == [gender for _, _, gender in held["person"]]
    assert list(table.column("diabetes")) == ["yes", "no"] * 20
    for cell, known in zip(table.column("glucose"), values, strict=True):
        assert cell == "" if not known else float(cell) == pytest.approx(np.mean(known))  # type: ignore[arg-type]


def test_a_query_that_gives_more_than_fits_ends_in_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sizes.VARIABLE, "1e-7")
    with pytest.raises(UserError, match=sizes.VARIABLE):
        asked(place, "SELECT * FROM person")


def test_a_condition_has_a_number_however_it_is_written() -> None:
    """A database says 1.0 where a file says 1."""
    assert Condition.parse("num = 1.0") == Condition.parse("num = 1")
    assert Condition.parse("num != yes").value == "yes"


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO person VALUES (900, 1900, 'F')",
        "UPDATE person SET year_of_birth = 1",
        "DELETE FROM person",
        "DROP TABLE person",
        "CREATE TABLE other (x)",
        "ATTACH DATABASE 'other.db' AS other",
        "VACUUM INTO 'copy.db'",
        "PRAGMA writable_schema = ON",
        "WITH x AS (SELECT 1) DELETE FROM person",
        "/* SELECT */ DELETE FROM person RETURNING person_id",
        "SELECT 1; DELETE FROM person",
    ],
)
@pytest.mark.case("a database", "a statement that writes, attaches a file or copies the database")
def test_a_statement_that_writes_is_refused(statement: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = hashlib.sha256((place / "held.db").read_bytes()).hexdigest()
    with pytest.raises(UserError, match=r"query\.sql: the database, which is open for reading only, refuses") as error:
        asked(place, statement)
    assert "\n" not in str(error.value)
    assert error.value.public == "query.sql: the database refuses the query"
    assert sorted(file.name for file in place.iterdir()) == ["held.db", "query.sql"]
    assert hashlib.sha256((place / "held.db").read_bytes()).hexdigest() == before


def test_mistakes_are_one_line_and_sqlite_itself_reads_only(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for statement, message in (
        ("SELECT height FROM person", "no such column"),
        ("SELECT person_id, person_id FROM person", "two columns 'person_id': name one of them with AS"),
        ("SELECT * FROM person WHERE 0", "is empty"),
        ("", "gives no rows|refuses"),
        ("SELEC 1", "syntax error"),
    ):
        with pytest.raises(UserError, match=message) as error:
            asked(place, statement)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"gone\.sql cannot be read"):
        read_query(Database(f"sqlite:///{place / 'held.db'}"), place / "gone.sql", "gone.sql")
    with pytest.raises(UserError, match="there is no database sqlite:"):
        read_query(Database("sqlite:///nowhere.db"), place / "query.sql", "query.sql")
    monkeypatch.setattr(sqlite3, "SQLITE_DENY", sqlite3.SQLITE_OK)
    with pytest.raises(UserError, match="readonly database"):
        asked(place, "DELETE FROM person RETURNING person_id")


def table_section(**fields: Any) -> dict[str, Any]:
    section = {
        "name": "table",
        "sites": {"north": "sqlite:///held.db", "south": "sqlite:///other.db"},
        "query": "omop.sql",
        "label": "diabetes",
        "numeric": ["age", "glucose"],
        "categorical": ["gender"],
    }
    return {"data": {**section, **fields}, "model": "linear", "methods": ["fedavg"], "protocol": {"seeds": [0]}}


def test_one_database_of_a_site_or_of_all(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite_database(place / "other.db", seed=1, persons=30)
    shutil.copy(EXAMPLES / "omop.sql", place)
    monkeypatch.chdir("/")
    data = parse(table_section(), folder=place).data.build()
    assert [len(domain) for domain in data.domains.values()] == [40, 30]
    assert data.classes == ("no", "yes")
    assert data.input_shape == (2 + 1 + 2,)  # age, glucose, whether it is missing, two genders
    shutil.copy(EXAMPLES / "omop.sql", place)
    by_gender = table_section(sites=None, file="sqlite:///held.db", site_column="gender", categorical=[])
    data = parse(by_gender, folder=place).data.build()
    genders = [gender for _, _, gender in rows(0)["person"]]
    assert {site: len(domain) for site, domain in data.domains.items()} == {g: genders.count(g) for g in set(genders)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query": None}, "query and the addresses of databases go together"),
        ({"sites": {"north": "north.csv", "south": "sqlite:///other.db"}}, "query and the addresses"),
        ({"sites": {"north": "mysql://reader@host/omop", "south": "sqlite:///other.db"}}, "kind 'mysql' are not read"),
        ({"name": "arrays"}, "data"),
    ],
)
def test_sections_that_do_not_fit_are_one_line(fields: dict[str, Any], message: str, place: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(table_section(**fields), folder=place)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [f"postgresql://reader:{SECRET}@host/omop", f"postgresql://reader@host/omop?password={SECRET}"],
)
@pytest.mark.case("a database", "a password in the address of a database is not repeated")
def test_a_password_in_the_address_is_refused_and_not_repeated(address: str, place: Path) -> None:
    with pytest.raises(UserError, match=f"set {PASSWORD_FILE}") as error:
        parse(table_section(sites={"north": address, "south": address}), folder=place)
    assert SECRET not in str(error.value)
    with pytest.raises(UserError) as error:
        parse(table_section(sites=None, file=address, site_column="gender", nonsense=1), folder=place)
    assert SECRET not in str(error.value)


def test_a_password_file_that_everybody_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "secret").chmod(0o604)
    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "secret"))
    (tmp_path / "query.sql").write_text("SELECT 1")
    with pytest.raises(UserError, match="chmod 600") as error:
        read_query(Database("postgresql://reader@127.0.0.1:1/omop"), tmp_path / "query.sql", "query.sql")
    assert SECRET not in str(error.value)


# PostgreSQL -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a PostgreSQL that this test started, whose users need passwords."""
    pytest.importorskip("psycopg")
    folders = [Path(path) for path in os.environ["PATH"].split(":")] + sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    programs = next((folder for folder in folders if (folder / "initdb").exists()), None)
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    place = tmp_path_factory.mktemp("postgres")
    for folder in (place, *place.parents[:2]):
        folder.chmod(0o755)
    place.chmod(0o777)
    user: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}

    def call(program: str, *words: str, **more: Any) -> None:
        subprocess.run([str(programs / program), *words], check=True, capture_output=True, cwd=place, **user, **more)

    (place / "secret").write_text(SECRET)
    (place / "secret").chmod(0o644)
    server = place / "server"
    try:
        call("initdb", "-D", str(server), "-U", "owner", "-A", "scram-sha-256", "--pwfile", str(place / "secret"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"PostgreSQL's initdb fails here: {error.stderr[-200:]!r}")
    options = f"-c listen_addresses='' -k {place} -c fsync=off"
    call("pg_ctl", "-D", str(server), "-w", "-l", str(place / "log"), "-o", options, "start")
    try:
        yield f"postgresql://owner@/postgres?host={place}"
    finally:
        call("pg_ctl", "-D", str(server), "-m", "immediate", "stop")


@pytest.fixture
def omop(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import psycopg

    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "secret"))
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "secret").chmod(0o600)
    with psycopg.connect(postgres, password=SECRET, autocommit=True) as connection:
        connection.execute(TABLES.encode())
        for table, content in rows(0).items():
            marks = ", ".join("%s" for _ in content[0])
            connection.cursor().executemany(f"INSERT INTO {table} VALUES ({marks})".encode(), content)
        connection.execute(b"CREATE SEQUENCE counter")
        connection.execute(
            b"CREATE FUNCTION sly() RETURNS integer LANGUAGE sql AS 'DELETE FROM person RETURNING person_id'"
        )
        yield postgres
        connection.execute(b"DROP FUNCTION sly; DROP SEQUENCE counter")
        connection.execute(b"DROP TABLE person, measurement, condition_occurrence")


def persons(address: str) -> int:
    import psycopg

    with psycopg.connect(address, password=SECRET) as connection:
        found = connection.execute("SELECT count(*) FROM person").fetchone()
    assert found is not None
    return int(found[0])


def test_postgresql_gives_the_table_that_sqlite_gives(omop: str, place: Path) -> None:
    there = read_query(Database(omop), EXAMPLES / "omop.sql", "omop.sql")
    here = asked(place, (EXAMPLES / "omop.sql").read_text())
    assert list(there.cells) == list(here.cells)
    for name in ("age", "gender", "diabetes"):
        assert list(there.column(name)) == list(here.column(name))
    for one, other in zip(there.column("glucose"), here.column("glucose"), strict=True):
        assert one == other == "" or float(one) == pytest.approx(float(other))
    (place / "like.sql").write_text("SELECT person_id FROM person WHERE gender_source_value LIKE 'M%'")
    wanted = sum(gender == "M" for _, _, gender in rows(0)["person"])
    assert len(read_query(Database(omop), place / "like.sql", "like.sql")) == wanted


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("SELECT nextval('counter')", "read-only transaction"),
        ("SELECT sly()", "read-only transaction"),
        ("DELETE FROM person RETURNING person_id", ""),
        ("WITH gone AS (DELETE FROM person RETURNING person_id) SELECT * FROM gone", ""),
        ("SELECT 1; COMMIT; BEGIN READ WRITE; DELETE FROM person; COMMIT", ""),
        ("COMMIT; BEGIN READ WRITE; DELETE FROM person; COMMIT; SELECT 1", ""),
        ("SET TRANSACTION READ WRITE", ""),
        ("COPY person TO '/tmp/persons.csv'", ""),
    ],
)
def test_postgresql_is_read_only(statement: str, words: str, omop: str, tmp_path: Path) -> None:
    (tmp_path / "query.sql").write_text(statement)
    with pytest.raises(UserError, match=f"open for reading only, refuses.*{words}") as error:
        read_query(Database(omop), tmp_path / "query.sql", "query.sql")
    assert "\n" not in str(error.value)
    assert persons(omop) == 40
    assert not Path("/tmp/persons.csv").exists()


def test_no_password_is_stored_or_told(
    omop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not in what a run writes, on the terminal, or in the error of a wrong password."""
    section = table_section(sites=None, file=omop, site_column="gender", categorical=[], query=QUERY)
    section |= {"training": {"rounds": 1, "lr": 0.1}, "engine": {"threads": 1}, "device": "cpu"}
    results = fedshift.run(parse(section, folder=tmp_path), tmp_path / "runs")
    assert len(results.runs) == 2
    written = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(written) > 5
    assert not any(SECRET.encode() in file.read_bytes() for file in written)
    monkeypatch.delenv(PASSWORD_FILE)
    monkeypatch.setenv(PASSWORD, f"wrong-{SECRET}")
    with pytest.raises(UserError, match="password authentication failed") as error:
        read_query(Database(omop), EXAMPLES / "omop.sql", "omop.sql")
    assert SECRET not in str(error.value)
    assert SECRET not in "".join(capfd.readouterr())
    assert str(GLUCOSE) not in str(error.value)


def test_a_deployed_site_reads_the_rows_again_when_its_database_or_query_changes(place: Path) -> None:
    """`project try` gives the address to the site, and copies no row."""
    pytest.importorskip("nvflare")
    from fedshift.deploy.cli.play import spread
    from fedshift.deploy.site_file import file_stamp

    sqlite_database(place / "other.db", seed=1, persons=30)
    shutil.copy(EXAMPLES / "omop.sql", place)
    section = table_section()
    stamps = [file_stamp(section["data"], place)]
    with sqlite3.connect(place / "other.db") as connection:
        connection.execute("DELETE FROM person WHERE person_id = 0")
    stamps.append(file_stamp(section["data"], place))
    (place / "omop.sql").write_text((place / "omop.sql").read_text() + "\n")
    stamps.append(file_stamp(section["data"], place))
    assert len(set(stamps)) == 3
    _, sites = spread(parse(section, folder=place), place / "deployment")
    assert {site: file["data"]["sites"] for site, file in sites.items()} == {  # type: ignore[index]
        site: {site: f"sqlite:///{place / name}"} for site, name in (("north", "held.db"), ("south", "other.db"))
    }
    assert not (place / "deployment").exists()
