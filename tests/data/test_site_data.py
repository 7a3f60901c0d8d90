"""A site's view of its samples: batches by row, whatever the storage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.data.domain import Domain, Preprocessing, SparseRows
from fedshift.data.site_data import SiteData, epoch_batches
from fedshift.data.transforms import preset, to_network
from fedshift.errors import UserError

IMAGE = Preprocessing(kind="image", channels=3, size=6, mean=(0.5,) * 3, std=(0.25,) * 3)
FEATURES = Preprocessing(kind="features")


def pictures(name: str, number: int, seed: int) -> Domain:
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (number, 3, 6, 6), dtype=np.uint8)
    return Domain(name, images, generator.integers(0, 4, number))


ONE, TWO = pictures("one", 30, 0), pictures("two", 11, 1)
PARTS = [(ONE, np.array([5, 3, 29, 0]), 7), (TWO, np.array([10, 2]), 2)]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_rows_of_several_domains(cache_bytes: int) -> None:
    data = SiteData(PARTS, IMAGE, cache_bytes=cache_bytes)
    assert data.samples == 6
    rows = torch.tensor([4, 0, 5, 2, 0])
    inputs, labels, numbers = data.batch(rows)
    stored = np.concatenate([ONE.inputs[[5, 3, 29, 0]], TWO.inputs[[10, 2]]])
    expected = (torch.from_numpy(stored[rows.numpy()]).float() / 255 - 0.5) / 0.25
    assert torch.allclose(inputs, expected)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [TWO.labels[10], ONE.labels[5], TWO.labels[2], ONE.labels[29], ONE.labels[5]]
    assert numbers.tolist() == [2, 7, 2, 7, 7]
    assert (labels.dtype, numbers.dtype) == (torch.int64, torch.int64)


def test_storage_makes_no_difference(tmp_path: Path) -> None:
    rows = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    parts = [(ONE, np.arange(30), 0)]
    cached, gathered = SiteData(parts, IMAGE), SiteData(parts, IMAGE, cache_bytes=0)
    assert torch.equal(cached.batch(rows)[0], gathered.batch(rows)[0])
    np.save(tmp_path / "x.npy", ONE.inputs)
    mapped = Domain("m", np.load(tmp_path / "x.npy", mmap_mode="r"), ONE.labels)
    rows = torch.tensor([29, 0, 7])
    for cache_bytes in (0, 1 << 20):
        found = SiteData([(mapped, np.arange(30), 0)], IMAGE, cache_bytes=cache_bytes).batch(rows)[0]
        assert torch.equal(found, SiteData([(ONE, np.arange(30), 0)], IMAGE).batch(rows)[0])
    domain = Domain("d", np.zeros((3, 2), dtype=np.float32), np.array([4, 1, 4]))
    with pytest.raises(UserError, match="no samples in d"):
        SiteData([(domain, np.array([], dtype=np.int64), 0)], FEATURES)


def test_batches_of_all_kinds_of_samples() -> None:
    data = SiteData([(ONE, np.arange(30), 0)], IMAGE, preset("csac"))
    assert not data.deterministic
    batches = list(data.all_batches(8))
    assert [len(labels) for _, labels, _ in batches] == [8, 8, 8, 6]
    assert torch.equal(torch.cat([labels for _, labels, _ in batches]), torch.from_numpy(ONE.labels))
    inputs = torch.cat([found for found, _, _ in batches])
    assert torch.equal(inputs, to_network(torch.from_numpy(ONE.inputs), IMAGE, "cpu"))
    data = SiteData([(ONE, np.arange(30), 0)], IMAGE, preset("csac"))
    rows = torch.arange(8)
    draws = [data.batch(rows, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], data.batch(rows)[0])
    assert SiteData([(ONE, np.arange(30), 0)], IMAGE).deterministic
    domain = Domain("f", np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32), np.zeros(9, dtype=np.int64))
    data = SiteData([(domain, np.arange(9), 0)], FEATURES, preset("csac"))
    assert data.deterministic
    found = data.batch(torch.tensor([3, 1]), torch.Generator().manual_seed(0))[0]
    assert torch.equal(found, torch.from_numpy(domain.inputs[[3, 1]]))


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=12), st.data())
def test_sparse_rows_are_dense_rows(table: list[list[int]], chosen: st.DataObject) -> None:
    dense = np.array(table, dtype=np.float32)
    nonzero = [np.flatnonzero(row) for row in dense]
    sparse = SparseRows(
        np.concatenate([row[columns] for row, columns in zip(dense, nonzero, strict=True)]),
        np.concatenate(nonzero).astype(np.int64),
        np.cumsum([0, *map(len, nonzero)]),
        5,
    )
    rows = chosen.draw(st.lists(st.integers(0, len(table) - 1), max_size=8))
    assert sparse.shape == dense.shape
    assert np.array_equal(sparse.dense(np.array(rows, dtype=np.int64)), dense[rows])
    domain = Domain("s", sparse, np.zeros(len(table), dtype=np.int64))
    for parts in (
        [(domain, np.arange(len(table)), 0)],
        [(domain, np.array([0]), 0), (domain, np.arange(len(table)), 1)],
    ):
        for cache_bytes in (0, 1 << 20):
            data = SiteData(parts, FEATURES, cache_bytes=cache_bytes)
            assert torch.equal(data.batch(torch.tensor([data.samples - 1]))[0], torch.from_numpy(dense[-1:]))


@given(st.integers(1, 200), st.integers(1, 70), st.integers(0, 5))
def test_an_epoch_visits_every_sample_once(samples: int, batch_size: int, seed: int) -> None:
    batches = epoch_batches(samples, batch_size, torch.Generator().manual_seed(seed))
    visited = torch.cat(batches).tolist()
    if samples == 1:
        assert visited == [0, 0]
        return
    assert sorted(visited) == list(range(samples))
    if batch_size > 1:
        assert all(2 <= len(batch) <= batch_size + 1 for batch in batches)
    again = epoch_batches(samples, batch_size, torch.Generator().manual_seed(seed))
    assert visited == torch.cat(again).tolist()


def test_a_last_batch_of_one_is_joined() -> None:
    generator = torch.Generator().manual_seed(0)
    assert [len(batch) for batch in epoch_batches(9, 4, generator)] == [4, 5]
    assert [len(batch) for batch in epoch_batches(10, 4, generator)] == [4, 4, 2]
    assert [len(batch) for batch in epoch_batches(3, 64, generator)] == [3]
    assert [len(batch) for batch in epoch_batches(3, 1, generator)] == [1, 1, 1]
