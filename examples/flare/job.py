"""fedshift's methods in a FLARE project of your own: here in FLARE's simulator. It needs the extra deploy."""

import os
from pathlib import Path

from nvflare.recipe import SimEnv

import fedshift
from fedshift.deploy.flare.recipe import FedshiftRecipe

HERE, SITES = Path(__file__).parent, ["north", "south", "east"]
if __name__ == "__main__":
    os.environ["FEDSHIFT_SITE"] = str(HERE / "{site}" / "SITE.yaml")  # all sites are on this machine
    run = FedshiftRecipe(HERE / "study.yaml", SITES).execute(SimEnv(clients=SITES, workspace_root="flare"))
    print(fedshift.results(run.get_result()))
