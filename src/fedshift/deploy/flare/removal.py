"""Takes a site out of a project: out of the project's file, and out of what the coordinator accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fedshift.deploy.flare.authority import ISSUED, RENEW
from fedshift.deploy.flare.kits import Project, load_project
from fedshift.deploy.flare.provision import Provisioned, check_certified, finish
from fedshift.digests import read_object, write_object
from fedshift.errors import UserError, nearest
from fedshift.files import write_bytes


def remove(path: Path, out: Path, site: str) -> Provisioned:
    """Remove a site. Its kit is refused from then on; its files stay where they are.

    Repeated after an interruption, it goes on: the project's file is written last.

    Args:
        path: the project's file, of which all other lines stay.
        out: the folder of the kits.
        site: the site's name.

    Raises:
        UserError: there is no such site, it is the only one, there are no kits, or the file is written so that only a
            person can change it.
    """
    project = load_project(path)
    if site not in project.sites:
        raise UserError(f"{path}: project '{project.name}' has no site '{site}'; {nearest(site, project.sites)}")
    if len(project.sites) == 1:
        raise UserError(f"{path}: '{site}' is the only site of the project, which needs one")
    folder = out / project.name
    issued = read_object(folder / "authority" / ISSUED, RENEW, older=True)
    if not issued or not (folder / "coordinator" / "kit.json").exists():
        raise UserError(f"{folder} does not hold the kits of the project: say with --out where they are")
    check_certified(project, folder / "coordinator")
    rest = project.model_copy(update={"sites": tuple(item for item in project.sites if item != site)})
    text = without_site(path, rest, site)
    issued.pop(site, None)
    write_object(folder / "authority" / ISSUED, issued, private=True)
    made = finish(rest, folder, issued, ())
    write_bytes(path, text.encode())
    return made


def without_site(path: Path, rest: Project, site: str) -> str:
    """The text of a project's file without a site in its list, and with all else, comments too.

    Args:
        path: the file.
        rest: what the new text has to mean.
        site: the site's name.

    Raises:
        UserError: the list is written in a way that this does not know.
    """
    text = path.read_bytes().decode()
    try:
        changed = _cut(text, site)
        if Project.model_validate(yaml.safe_load(changed)) == rest:
            return changed
    except (ValueError, LookupError, yaml.YAMLError):
        pass
    raise UserError(f"{path}: take '{site}' out of sites yourself, then call fedshift project provision {path}")


def _cut(text: str, site: str) -> str:
    """Cut a site's line out of a list of lines, or its entry out of a list in brackets."""
    whole: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    sites = next(value for key, value in whole.value if key.value == "sites").value
    index = next(number for number, node in enumerate(sites) if node.value == site)
    node = sites[index]
    begin, end = node.start_mark.index, node.end_mark.index
    line = text.rfind("\n", 0, begin) + 1
    if text[line:begin].strip() == "-":  # an entry on a line of its own, with the comment behind it
        return text[:line] + text[text.find("\n", end) + 1 or len(text) :]
    if index + 1 < len(sites):
        return text[:begin] + text[sites[index + 1].start_mark.index :]
    return text[: sites[index - 1].end_mark.index] + text[end:]
