"""SITE.yaml, which says what data a site holds and what it allows; and the data it describes."""

from __future__ import annotations

import contextlib
import hashlib
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml
from pydantic import ConfigDict, Field, PositiveInt, ValidationError, model_validator

from fedshift.data.agreement import Few
from fedshift.data.domain import DataSet, DataSource, Domain, Preprocessing
from fedshift.data.site_labels import SiteLabels
from fedshift.deploy.remote.policy import Policy, PrivacyBudget
from fedshift.deploy.role_file import RoleFile
from fedshift.errors import UserError, nearest
from fedshift.experiment.config.data_section import data_source
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.environment import data_fingerprint
from fedshift.files import edited_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WATCHED_FILES = 10_000


class SiteFile(RoleFile):
    """The content of a SITE.yaml. The file stays at the site."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str = Field(description="the site's name, as in the project")
    kit: Path = Field(Path("."), description="the start-up kit's folder, relative to this file")
    data: dict[str, Any] = Field(description="the data set, as under data: of an experiment; one site or domain of it")
    domain: str | None = Field(
        None, description="which domain of the data set; none = the only one, or the site's name"
    )
    classes: tuple[str, ...] | None = Field(
        None, description="all classes of the federation in order, where this site may lack samples of some"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps …")
    threads: PositiveInt | None = Field(
        None, le=1024, description="threads of the site's process; none = torch's own choice"
    )
    received: Path = Field(
        Path("received"),
        description="where a site without labels keeps the models that it got, its predictions and what to expect of "
        "them, relative to this file",
    )
    policy: Policy = Field(default_factory=Policy)
    privacy: PrivacyBudget | None = Field(
        None,
        description="what all answers may cost the site's samples: ε and δ for the life of the project; none = any",
    )

    @model_validator(mode="after")
    def _tells_no_classes(self) -> Self:
        if self.privacy is not None and self.classes is None:
            raise ValueError("privacy: list all classes under classes: which of them this site has may not be told")
        if self.privacy is not None and self.data.get("impute") == "drop":
            raise ValueError(
                "data.impute: with privacy, how many samples there are may not depend on cells: leave out drop, or "
                "take such rows out of the file"
            )
        return self


@dataclass(frozen=True)
class SiteConfig:
    """A SITE.yaml that was read: its content, and the paths that it names."""

    path: Path
    file: SiteFile

    @property
    def kit(self) -> Path:
        return (self.path.parent / self.file.kit).resolve()

    @property
    def memory(self) -> Path:
        return (self.path.parent / self.file.memory).resolve()

    @property
    def received(self) -> Path:
        return (self.path.parent / self.file.received).resolve()

    @property
    def audit_log(self) -> Path:
        return self.memory / "audit.jsonl"


def load_site(path: Path) -> SiteConfig:
    """Read a SITE.yaml; UserError if there is a mistake in it."""
    try:
        options = edited_yaml(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the site's file {path}: {error}".splitlines()[0]) from None
    if not isinstance(options, Mapping):
        raise UserError(f"{path}: a site's file is a mapping of site, data, device, policy …")
    try:
        file = SiteFile.model_validate(dict(options))
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, '', SiteFile)}") from None
    if not _NAME.fullmatch(file.site):
        raise UserError(f"{path}: site '{file.site}': letters, digits, '.', '_' and '-' only")
    config = SiteConfig(path.resolve(), file)
    if config.received.is_relative_to(config.memory):
        raise UserError(f"{path}: received: a folder outside that of memory, whose files end with a run")
    return config


@dataclass(frozen=True)
class Holding:
    """A site's data: its data set, its own domain, and the statistics it gives for the common encoding.

    ``few`` are the parts of a table's columns that are in few rows, of which ``given`` tells nothing. ``listed`` says
    whether a person here listed the classes of the federation. ``part`` is the one of a file's two parts that is held
    here, where few labels train.
    """

    source: DataSource
    data: DataSet
    domain: Domain
    fingerprint: str
    given: dict[str, Any] | None
    few: tuple[Few, ...] = ()
    listed: bool = False
    part: str | None = None

    def encode(self, preprocessing: Preprocessing, shape: Sequence[int]) -> Domain:
        """The domain in an encoding that all sites share, if there is one; UserError if it is not of ``shape``."""
        domain = self.domain
        if self.given is not None:
            data = self.source.encode(preprocessing, self.data.classes)
            held = next(iter(data.domains.values())) if self.part is None else data.domains[self.part]
            domain = replace(held, name=domain.name)
        if tuple(shape) != tuple(domain.inputs.shape[1:]):
            raise UserError(f"site '{domain.name}': samples have the shape {tuple(domain.inputs.shape[1:])}")
        return domain


def read_holding(config: SiteConfig) -> Holding:
    """Read the site's data as training uses them; UserError if they cannot be used."""
    source = data_source(config.file.data, config.path.parent)
    if config.file.classes is not None and "classes" in type(source).model_fields:
        source = source.model_copy(update={"classes": config.file.classes})
    if isinstance(source, SiteLabels) and source.site_labels:
        source = _without_labels(config, source)
    data = source.build()
    if data.task == "segmentation":
        raise UserError(f"{config.path}: data: '{data.name}' is for {data.task}, which a deployment cannot train yet")
    name = config.file.domain or (config.file.site if config.file.site in data.domains else None)
    if name is None and len(data.domains) == 1:
        name = next(iter(data.domains))
    if name is None or name not in data.domains:
        raise UserError(
            f"{config.path}: domain: say which domain of the data this site holds; {nearest(name or '', data.domains)}"
        )
    lacks = name in data.unlabelled or data.domains[name].only_source
    if getattr(source, "site_labels", {}) and not lacks:
        raise UserError(f"{config.path}: data.site_labels: it names other sites than '{name}', whose data these are")
    part = source.held_part if isinstance(source, SiteLabels) else None
    if source.shares and len(data.domains) > (1 if part is None else 2):
        raise UserError(f"{config.path}: data.sites: name only this site's own file; the encoding is made of all of it")
    domain = replace(data.domains[name], name=config.file.site)
    if config.file.classes is not None and data.task != "classification":
        raise UserError(f"{config.path}: classes: the data are for {data.task}: leave it out")
    if config.file.classes is not None and data.classes != config.file.classes:
        domain, data = _renumber(config, data, domain)
    columns = {config.file.site: data.columns[name]} if name in data.columns else {}
    held_data = replace(data, domains={config.file.site: domain}, columns=columns)
    listed = config.file.classes is not None
    return Holding(source, held_data, domain, data_fingerprint(held_data), source.gives(), listed=listed, part=part)


def _without_labels(config: SiteConfig, source: SiteLabels) -> SiteLabels:
    """The data of a site that has no labels, or few."""
    if config.file.classes is None:
        raise UserError(
            f"{config.path}: classes: list all classes of the federation in order: a site without labels cannot know "
            "them"
        )
    wanted = config.file.domain or config.file.site
    few = source.part_names([site for site, labels in source.site_labels.items() if labels == "few_train"])
    if few and wanted not in few:
        raise UserError(f"{config.path}: domain: say which part of the file this site holds: {' or '.join(few)}")
    return source.of_federation(config.file.classes, wanted if few else None)


def _renumber(config: SiteConfig, data: DataSet, domain: Domain) -> tuple[Domain, DataSet]:
    """Number the labels by the classes of the federation; the data set may hold only some of them."""
    wanted = config.file.classes or ()
    unknown = [name for name in data.classes if name not in wanted]
    if unknown:
        raise UserError(f"{config.path}: classes: the data hold '{unknown[0]}', which is not listed")
    if domain.unlabelled:  # its labels are numbered by the classes of the federation
        return domain, replace(data, classes=wanted)
    numbers = np.array([wanted.index(name) for name in data.classes], dtype=np.int64)
    return replace(domain, labels=numbers[domain.labels]), replace(data, classes=wanted)


def file_stamp(options: Mapping[str, Any], folder: Path) -> str:
    """A digest that changes when a data file does.

    ``options``: the ``data`` section of SITE.yaml; names, sizes and times of the files below ``root``, ``sites``,
    ``file`` and ``query`` count. Of databases only a file of SQLite counts.
    """
    digest = hashlib.sha256()
    for path in _files_of([options.get(name) for name in ("root", "sites", "file", "query")], folder):
        with contextlib.suppress(OSError):
            result = path.stat()
            digest.update(f"{path}|{result.st_size}|{result.st_mtime_ns}|{stat.S_IFMT(result.st_mode)}\n".encode())
    return digest.hexdigest()


def _files_of(value: Any, folder: Path) -> Iterator[Path]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _files_of(item, folder)
    elif isinstance(value, str | Path):
        path = folder / str(value).removeprefix("sqlite:///")
        yield path
        if path.is_dir():
            for number, below in enumerate(sorted(path.rglob("*"))):
                if number >= _WATCHED_FILES:
                    return
                yield below
