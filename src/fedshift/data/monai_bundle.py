"""A bundle of MONAI in a local folder: its configs, which MONAI's own parser reads once a person trusts them.

A config may name any class or function of Python (``_target_``), hold expressions (``$…``) and import the folder's
scripts. So a bundle is code: it runs if `fedshift.trust` lets it, by the checksum of all files that could run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedshift import trust
from fedshift.errors import UserError
from fedshift.extras import import_extra

Array = npt.NDArray[Any]
_CODE = (".json", ".yaml", ".yml", ".py", ".pyc", ".so", ".pyd")
"""Endings of what a parser or an import reads. Weights and documents are none of these."""
_CONFIGS = (".json", ".yaml", ".yml")
_LOADING = ("LoadImage", "EnsureChannelFirst", "AsChannelFirst", "AddChannel")
"""Transforms that read a file. fedshift has read it."""


class Bundle(NamedTuple):
    """A bundle that a person trusts."""

    folder: Path  # where it is
    sha256: str  # the checksum of its configs and scripts
    what: str  # what it is for, for messages


def trusted_bundle(what: str, folder: Path) -> Bundle:
    """A bundle, if `trust` lets it run. Nothing of it has run yet.

    ``what``: what it is for, such as ``model 'bundle:spleen'``. UserError if it is no bundle, or nobody trusts it.
    """
    folder = folder.absolute()
    if not (folder / "configs").is_dir():
        raise UserError(f"{what}: {folder} is no bundle of MONAI, which is a folder with configs/train.json in it")
    bundle = Bundle(folder, checksum(folder), what)
    trust.allow(trust.Code(what, folder, bundle.sha256))
    return bundle


def checksum(folder: Path) -> str:
    """A checksum of the names and contents of all files in a folder that could run.

    UserError if a folder in it is a link, behind which other files could come to lie.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and path.is_dir():
            raise UserError(f"{path} is a link to a folder: put the folder itself into the bundle")
        if path.suffix.lower() in _CODE and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\t{len(content)}\n".encode(errors="surrogatepass"))
            digest.update(content)
    return digest.hexdigest()


@contextmanager
def parser_of(bundle: Bundle, configs: Sequence[str], wanted: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """MONAI's parser of the first config that has one of some entries, and which one; within it, scripts are imported.

    Args:
        configs: names of configs without their endings, in the order of trying.
        wanted: ids of entries, in the order of trying.

    Raises:
        UserError: MONAI is not installed, no config has such an entry, or the bundle has changed since it was trusted.
    """
    monai = import_extra("monai.bundle", extra="volumes", what=bundle.what)
    for part in ("transforms", "networks.nets"):  # the parser knows the names of what is imported
        import_extra(f"monai.{part}", extra="volumes", what=bundle.what)
    if checksum(bundle.folder) != bundle.sha256:
        raise UserError(f"{bundle.what}: {bundle.folder} has changed since it was trusted: start again")
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the checksum is of all that could run
    sys.path.insert(0, str(bundle.folder))
    try:
        for file in (bundle.folder / "configs" / f"{name}{end}" for name in configs for end in _CONFIGS):
            if not file.is_file():
                continue
            parser = monai.ConfigParser()
            parser.read_config(str(file))
            parser["bundle_root"] = str(bundle.folder)
            entry = next((entry for entry in wanted if _has(parser, entry)), None)
            if entry is not None:
                yield parser, entry
                return
        raise UserError(
            f"{bundle.what}: no config of {bundle.folder} has {' or '.join(wanted)} (looked at {', '.join(configs)})"
        )
    finally:
        sys.path.remove(str(bundle.folder))
        sys.dont_write_bytecode = written


def transforms_of(bundle: Bundle) -> list[Any]:
    """The bundle's transforms of volumes and masks, without those that draw at random or read files.

    They are those of validation, else of training, else of inference.

    UserError if it has none, or they cannot be made.
    """
    try:
        with parser_of(
            bundle, ("train", "inference"), ("validate::preprocessing", "train::preprocessing", "preprocessing")
        ) as (parser, entry):
            chain = parser.get_parsed_content(entry, instantiate=True)
            transforms = import_extra("monai.transforms", extra="volumes", what=bundle.what)
    except UserError:
        raise
    except Exception as error:  # of any kind: a config is code
        raise UserError(f"{bundle.what}: its transforms cannot be made: {one_line(error)}") from error
    listed = chain.flatten().transforms if isinstance(chain, transforms.Compose) else [chain]
    return [
        item
        for item in listed
        if not isinstance(item, transforms.RandomizableTrait | transforms.Randomizable)
        and not type(item).__name__.startswith(_LOADING)
    ]


def transform_volume(
    bundle: Bundle, transforms: Sequence[Any], values: Array, affine: Array, masks: Sequence[Array], name: str
) -> list[Array]:
    """A volume and its masks behind a bundle's transforms, which know them as ``image`` and ``label``.

    Args:
        transforms: as `transforms_of` gives them.
        values: (z, y, x).
        affine: (4, 4), from the indices z, y, x to millimetres in DICOM's coordinates.
        masks: each of the volume's shape, 0 and 1.

    Returns:
        The volume, then the masks, (z, y, x) as MONAI's axes x, y, z are read backwards.

    Raises:
        UserError: a transform fails, or leaves volume and masks of different sizes.
    """
    meta_tensor = import_extra("monai.data", extra="volumes", what=bundle.what).MetaTensor
    there = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine[:, [2, 1, 0, 3]]  # NIfTI's coordinates, indices x, y, z
    item = {
        kind: meta_tensor(np.stack([array.transpose(2, 1, 0) for array in some]).astype(np.float32), affine=there)
        for kind, some in (("image", [values]), ("label", masks))
        if len(some)
    }
    try:
        for transform in transforms:
            item = transform(item)
        arrays = [
            np.asarray(array).transpose(2, 1, 0) for kind in ("image", "label") if kind in item for array in item[kind]
        ]
    except Exception as error:  # of any kind: a config is code
        raise UserError(f"{bundle.what}: its transforms fail on {name}: {one_line(error)}") from error
    if len(arrays) != 1 + len(masks) or len({array.shape for array in arrays}) > 1:
        shapes = ", ".join("×".join(map(str, array.shape)) for array in arrays)
        raise UserError(f"{bundle.what}: its transforms leave of {name} and {len(masks)} masks: {shapes}")
    return arrays


def one_line(error: BaseException) -> str:
    """The innermost cause in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _has(parser: Any, entry: str) -> bool:
    try:
        return parser[entry] is not None
    except (KeyError, IndexError, ValueError, TypeError):
        return False
