"""What a site keeps between exchanges: declared names only, and the same bits after a file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedshift.encryption import write_private
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.message_files import read_message
from fedshift.federation.messages import Statistics, encode
from fedshift.federation.site_memory import SiteMemory
from fedshift.weights import Weights


def test_memory_has_declared_names_only() -> None:
    memory = SiteMemory(["mask"])
    with pytest.raises(FedshiftError, match="'masc' is not declared"):
        memory["masc"] = 1
    with pytest.raises(KeyError):
        _ = memory["mask"]
    memory["mask"] = 1
    assert dict(memory) == {"mask": 1}
    with pytest.raises(FedshiftError, match="holds int, not Weights"):
        memory.weights("mask")
    del memory["mask"]
    assert len(memory) == 0


def test_memory_is_saved_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    memory = SiteMemory(["model", "bank", "count"])
    memory["model"] = Weights({"w": torch.tensor([math.nan, -0.0, 1e-40]), "n": torch.tensor(2**40)})
    memory["bank"] = {"a": Statistics({"m": torch.ones(2).double()}), "b": 0.1}
    memory["count"] = 3
    other = SiteMemory(["model", "bank", "count"])
    other["count"] = 9
    other.load(tmp_path, memory.save(tmp_path, 1))
    assert dict(other) == dict(memory)
    assert other["model"].equal(memory["model"])  # type: ignore[union-attr, arg-type]
    other.load(tmp_path, {})
    assert dict(other) == {}


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    memory = SiteMemory(["model", "count"])
    memory["model"], memory["count"] = Weights({"w": torch.ones(2)}), 1
    before = memory.save(tmp_path, 4)
    assert [name.split("-")[:2] for name in before.values()] == [["model", "4"], ["count", "4"]]
    for file in tmp_path.iterdir():
        file.write_bytes(b"untouched")
    memory["count"] = 2
    after = memory.save(tmp_path, 5)
    assert after["model"] == before["model"]
    assert after["count"].startswith("count-5-")
    assert (tmp_path / before["model"]).read_bytes() == b"untouched"
    assert (tmp_path / before["count"]).read_bytes() == b"untouched"  # an older checkpoint may point to it
    del memory["model"]
    assert memory.save(tmp_path, 6) == {"count": after["count"]}
    again = SiteMemory(["count"])
    again.load(tmp_path, {"count": after["count"]})
    assert again.save(tmp_path, 7) == {"count": after["count"]}


def test_files_of_two_runs_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    """A site's memory of one run, at the same exchange, put in the place of the other run's."""
    files = []
    for run in ("one", "other"):
        memory = SiteMemory(["count"])
        memory["count"] = 1
        files.append(tmp_path / run / memory.save(tmp_path / run, 3)["count"])
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(UserError, match="another name"):
        memory.load(files[0].parent, {"count": files[0].name})


@pytest.mark.case("files of earlier versions", "a site's memory that does not hold its name is refused as what it is")
def test_memory_of_before_files_held_their_names(tmp_path: Path) -> None:
    memory = SiteMemory(["count"])
    memory["count"] = 1
    files = memory.save(tmp_path, 3)
    content, _ = read_message(tmp_path / files["count"])
    write_private(tmp_path / files["count"], encode(content))
    with pytest.raises(UserError, match="not written by this version"):
        memory.load(tmp_path, files)


def test_memory_files_that_are_damaged_or_of_another_entry(tmp_path: Path) -> None:
    memory = SiteMemory(["count", "mask"])
    memory["count"] = 1
    files = memory.save(tmp_path, 1)
    with pytest.raises(UserError, match="does not hold 'mask'"):
        memory.load(tmp_path, {"mask": files["count"]})
    assert dict(memory) == {"count": 1}
    (tmp_path / files["count"]).write_bytes(b"x")
    with pytest.raises(UserError, match="damaged"):
        memory.load(tmp_path, files)
    with pytest.raises(UserError, match="cannot read"):
        memory.load(tmp_path, {"count": "absent.safetensors"})


def test_loading_forgets_what_was_not_saved(tmp_path: Path) -> None:
    memory = SiteMemory(("a", "b"))
    memory["a"] = Weights({"w": torch.ones(1)})
    files = memory.save(tmp_path, 1)
    memory["a"] = Weights({"w": torch.zeros(1)})
    memory["b"] = Statistics({"s": torch.ones(1)})
    later = memory.save(tmp_path, 2)
    assert set(later) == {"a", "b"}
    memory.load(tmp_path, files)
    assert set(memory) == {"a"}
    assert memory.weights("a")["w"].item() == 1
    memory.load(tmp_path, later)
    assert memory.weights("a")["w"].item() == 0
