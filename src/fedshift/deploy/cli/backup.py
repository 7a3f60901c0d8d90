"""``fedshift site backup`` and ``restore``."""

from __future__ import annotations

from pathlib import Path

from fedshift.cli.console import say
from fedshift.deploy.flare import roles
from fedshift.deploy.site_backup import back_up, restore
from fedshift.deploy.site_file import SiteConfig, load_site
from fedshift.encryption import KEY_FILE, present_key
from fedshift.errors import UserError


def backup_site(path: Path, out: Path) -> None:
    """Write a site's backup; say what is in it."""
    config = load_site(path)
    _check_stopped(config)
    files = back_up(config, out)
    sealed = "encrypted" if present_key() else f"not encrypted ({KEY_FILE} is not set): it holds the kit's private key"
    say(f"site {config.file.site}: {files} files in {out}, {sealed}")


def restore_site(backup: Path, path: Path, log: Path | None) -> None:
    """Put a site back; say what was written, what stayed, and what counts as spent."""
    if path.exists():
        _check_stopped(load_site(path))
    done = restore(backup, path, log)
    say(f"site {done.config.file.site}: {len(done.written)} files put back, {len(done.kept)} that are there stay")
    if done.counted:
        say(f"budget of privacy: counted as spent: {done.counted}")
    say(f"look at it with fedshift site check {path}; runs that were under way are deployed anew")


def _check_stopped(config: SiteConfig) -> None:
    """Raise UserError if the site's service runs."""
    if (config.kit / "kit.json").exists() and roles.running(config.kit):
        raise UserError(f"site '{config.file.site}' runs; stop it first: fedshift site stop {config.path}")
