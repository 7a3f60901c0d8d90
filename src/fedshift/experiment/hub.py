"""An exported model in a repository on Hugging Face's hub, by its own package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.extras import import_extra

_WHAT = "--push"


def checked_repository(repository: str) -> str:
    """The name of a repository, ``OWNER/NAME``. UserError if it is none, or huggingface_hub is not installed."""
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repository)
        if repository.count("/") != 1:
            raise ValueError
    except ValueError:  # huggingface_hub's own error is one, too
        raise UserError(f"{_WHAT}: '{repository}' is no repository: write OWNER/NAME; --out is a folder") from None
    return repository


def push(repository: str, folder: Path, files: Sequence[str]) -> str:
    """Upload files of a folder in one commit. A repository that is not there yet is made, for its owner alone.

    The token is the one that huggingface_hub finds (``hf auth login``, ``HF_TOKEN``). Nothing is asked.

    Args:
        repository: ``OWNER/NAME``.
        files: their names; whatever else lies in the folder stays.

    Returns:
        The address of the commit.

    Raises:
        UserError: the hub cannot be reached, or refuses.
    """
    hub = _hub()
    api = hub.HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message="A model of fedshift and its card",
        )
    except (OSError, ValueError, hub.errors.HTTPError) as error:  # no token, no network, or the hub refuses
        why = _without_token(str(error).partition("\n")[0], hub)
        raise UserError(
            f"{_WHAT}: {repository} was not changed ({why}): log in with hf auth login, or set HF_TOKEN to a token "
            f"that may write there; the files are in {folder}"
        ) from None
    return str(done.commit_url)


def _without_token(text: str, hub: Any) -> str:
    token = hub.get_token()
    return text.replace(token, "…") if token else text


def _hub() -> Any:
    return import_extra("huggingface_hub", extra="export", what=_WHAT)
