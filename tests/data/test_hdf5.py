"""HDF5 files are read as the same arrays in .npz are, and never make this machine open another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.data.builders.arrays import Arrays
from fedshift.data.inference import load_for_prediction
from fedshift.data.locate import load_arrays
from fedshift.errors import UserError

h5py = pytest.importorskip("h5py")


def saved(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, compression="gzip" if np.ndim(values) else None)
    return path


def test_the_same_data_set_as_from_npz(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    arrays = {
        "x": draws.integers(0, 256, (12, 8, 8), dtype=np.uint8),
        "y": np.arange(12) % 3,
        "groups": np.arange(12) // 2,
    }
    np.savez(tmp_path / "a.npz", **arrays)
    built = {}
    for file in (tmp_path / "a.npz", saved(tmp_path / "a.h5", **arrays)):
        domain = Arrays(sites={"a": file}).build().domains["a"]
        built[file.suffix] = domain
        names, inputs = load_for_prediction(file, Arrays(sites={"a": file}).build().preprocessing)
        assert len(names) == 12
        assert np.array_equal(inputs, domain.inputs)
    for part in ("inputs", "labels", "groups"):
        assert np.array_equal(getattr(built[".h5"], part), getattr(built[".npz"], part))
    file = saved(tmp_path / "a.hdf5", x=np.ones((2, 3)), y=["cat", "dög"])
    assert load_arrays(file, ["x"], ["y"])["y"].tolist() == ["cat", "dög"]


@pytest.mark.case("a stranger's file", "HDF5 whose values lie in other files, by links, external storage or views")
def test_files_that_point_elsewhere_are_refused(tmp_path: Path) -> None:
    secret = saved(tmp_path / "secret.h5", x=np.ones((2, 3)))
    (tmp_path / "plain").write_bytes(b"a password" * 10)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink(str(secret), "x")
        file["soft"] = h5py.SoftLink("/link")
        file.create_dataset("outside", (20,), "u1", external=[(str(tmp_path / "plain"), 0, 20)])
        layout = h5py.VirtualLayout((2, 3), "f8")
        layout[:] = h5py.VirtualSource(str(secret), "x", (2, 3))
        file.create_virtual_dataset("view", layout)
        file.create_group("group")
    for name in ("link", "soft", "outside", "view", "group"):
        with pytest.raises(UserError, match=f"'{name}' is no array in this file"):
            load_arrays(tmp_path / "a.h5", [name])


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(tmp_path / "a.h5", x=np.ones((2, 3)), c=np.ones(2, dtype=np.complex128))
    (tmp_path / "cut.h5").write_bytes(whole.read_bytes()[:300])
    (tmp_path / "text.h5").write_text("x,y")
    for file, name, message in (
        (tmp_path / "cut.h5", "x", "truncated or not HDF5"),
        (tmp_path / "text.h5", "x", "truncated or not HDF5"),
        (tmp_path / "gone.h5", "x", "does not exist"),
        (whole, "y", "has no array 'y'; it holds: c, x"),
        (whole, "c", "save numbers or texts"),
    ):
        with pytest.raises(UserError, match=message) as error:
            load_arrays(file, [name])
        assert "\n" not in str(error.value)
    with h5py.File(tmp_path / "huge.h5", "w") as file:  # declares 80 GB, holds nothing
        file.create_dataset("x", (100_000, 100_000), "f8", chunks=(1000, 1000))
    monkeypatch.setenv("FEDSHIFT_LARGEST_DATA", "1")
    with pytest.raises(UserError, match=r"declares 74\.5 GiB of data"):
        load_arrays(tmp_path / "huge.h5", ["x"])
