"""Sites of tests: their data and their SITE.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tiny import domains

SITES = {"north": 41, "south": 17, "east": 26}


UNSEEN = {"west": 30}


VECTOR_MODEL: dict[str, Any] = {"name": "mlp", "hidden": [8, 6]}


def write_data(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    for domain in domains(VECTOR_MODEL, sizes):
        if not (folder / f"{domain.name}.npz").exists():
            np.savez(folder / f"{domain.name}.npz", x=domain.inputs, y=domain.labels)
    return {name: str(folder / f"{name}.npz") for name in sizes}


def site_file(folder: Path, name: str, data: str | Mapping[str, Any], **changes: Any) -> Path:
    """A SITE.yaml of one npz, or with that section. ``changes``: of its policy; ``sections``: other sections."""
    site_yaml = folder / name / "SITE.yaml"
    site_yaml.parent.mkdir(parents=True, exist_ok=True)
    sections = changes.pop("sections", {})
    options = {
        "site": name,
        "data": {"name": "arrays", "sites": {name: data}} if isinstance(data, str) else dict(data),
        "classes": ["0", "1", "2"],
        "device": "cpu",
        "threads": 1,
        "policy": {"smallest_group": 1, **changes},
    }
    site_yaml.write_text(yaml.safe_dump({**options, **sections}))
    return site_yaml


def edit(site_yaml: Path, section: str = "", **changes: Any) -> Path:
    """Change fields of a SITE.yaml, or of one of its sections; a field that becomes None goes."""
    whole = yaml.safe_load(site_yaml.read_text())
    part = whole.setdefault(section, {}) if section else whole
    part |= changes
    for name in [name for name, value in changes.items() if value is None]:
        del part[name]
    site_yaml.write_text(yaml.safe_dump(whole))
    return site_yaml


def table_files(
    folder: Path, files: Mapping[str, Any], section: Mapping[str, Any], of_site: Any = None, **changes: Any
) -> dict[str, Path]:
    """A SITE.yaml for each file, with that section of data; ``of_site``: site → what is otherwise in its section."""
    of_site = of_site or {}
    return {
        site: site_file(folder, site, {**section, "sites": {site: str(file)}, **of_site.get(site, {})}, **changes)
        for site, file in files.items()
    }


def site_files(folder: Path, sites: Mapping[str, int] = SITES, **policy: Any) -> dict[str, Path]:
    files = write_data(folder / "data", sites)
    return {name: site_file(folder, name, files[name], **policy) for name in sites}
