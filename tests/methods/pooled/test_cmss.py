"""CMSS: a step by hand, no curriculum at equal scores, and which way the curriculum network goes."""

from __future__ import annotations

import pytest
import torch
from pooling import SIZES, first_batches, pool_of

from fedshift.methods.pooled.cmss import CMSS, curriculum_network


@pytest.mark.parametrize("shape", [(5,), (1, 12, 12), (3, 7, 9)])
def test_curriculum_networks_give_one_score_per_sample(shape: tuple[int, ...]) -> None:
    assert curriculum_network(shape, 4)(torch.rand(6, *shape)).shape == (6, 1)


def test_a_source_batch_is_of_all_sources() -> None:
    site = pool_of(CMSS())
    sources, _ = first_batches(site)
    assert [set(batch.domains.tolist()) for batch in sources] == [{0}, {1}, {2}]
    assert len(SIZES) == 3
