"""What a site says of scores crosses the network as it is, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loopback import site_file, write_data
from pydantic import ValidationError

from fedshift.deploy.site_estimates import KeptScores, SiteEstimates
from fedshift.deploy.site_file import load_site
from fedshift.evaluation.estimate.plain_sums import GivenSums, plain_sums
from fedshift.evaluation.estimate.sums import sums_of


def test_counts_of_scores_arrive_and_fit_the_classes() -> None:
    draw = np.random.default_rng(0)
    second, labels = draw.random(50), draw.integers(0, 2, 50)
    sums = sums_of(np.stack([1 - second, second], axis=1), labels, 0.3)
    arrived = GivenSums.model_validate(plain_sums(sums)).sums.by_score
    assert arrived is not None
    assert sums.by_score is not None
    np.testing.assert_array_equal(arrived, sums.by_score)
    other = np.roll(sums.by_score, 1, axis=0)
    with pytest.raises(ValidationError, match="scores are not those of the classes"):
        GivenSums.model_validate({**plain_sums(sums), "by_score": (other + 1).tolist()})
    before = {name: value for name, value in plain_sums(sums).items() if name != "by_score"}
    assert GivenSums.model_validate(before).by_score is None


@pytest.mark.parametrize(("rare", "given"), [(9, False), (10, True), (11, True), (0, True)])
def test_sums_are_of_as_many_samples_of_each_class_as_the_smallest_group(
    tmp_path: Path, rare: int, given: bool
) -> None:
    files = write_data(tmp_path / "data", {"north": 40})
    send = ["weights", "numbers", "confidences"]
    site = SiteEstimates(load_site(site_file(tmp_path, "north", files["north"], send=send, smallest_group=10)))
    labels = np.repeat([0, 1], [30, rare])
    scores = np.random.default_rng(0).dirichlet([1.0, 1.0], len(labels))
    sums = site.sums("run", KeptScores(scores, labels), 2, {"sent": {}})
    assert (sums is not None) is given
