"""Data at the sites of a deployed federation. The coordinator may have a data set of its own that no site has."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from fedshift.data.domain import DataSet, DataSource, Manifest
from fedshift.errors import UserError


class AtSites(DataSource):
    """Data at the project's sites, for `fedshift deploy`."""

    name: Literal["sites"] = "sites"
    unseen: dict[str, Any] | None = Field(
        None, description="the coordinator's own data set; its domains can be targets that no site sees"
    )

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Data at sites",
            source="the sites of a project",
            licence="the sites'",
            how_to_get="each site describes its data in its SITE.yaml",
            layout="whatever a site's SITE.yaml names; unseen: a data set of the coordinator's own",
            notes="Only fedshift deploy can use it: names, shapes and classes are agreed before training.",
        )

    def build(self) -> DataSet:
        raise UserError(
            "data: the data are at the sites and cannot be read here; run the experiment with fedshift deploy"
        )
