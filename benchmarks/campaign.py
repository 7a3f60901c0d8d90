"""Faults for an hour: a federation that is played on this machine is killed, cut off, slowed, filled up and lied to.

A coordinator and three sites as processes of their own, mutual TLS, each role in its own network namespace where this
account may make them (root), else over loopback, without partitions and slow links:

    python benchmarks/campaign.py [--minutes 60] [--seed 0]

It deploys one small study after the other. Each suffers faults drawn at random, at random moments, and then has to end
by itself, or after one ``fedshift deploy resume`` where docs/deploy.md says that a person is asked. It is checked that

* it ends (`HANG` seconds without a round is a hang),
* its weights are bit for bit those of the local engine, without the sites that were lost, where there is a quorum,
* no line of a round is missing or doubled, and the audit log of every site is unbroken.

Every second study sums the sites' models under masks, unless a fault of it needs a quorum.

Recovery is the time from a fault to the end of the next round, without the time that the fault itself lasts. Writes
benchmarks/results/network/campaign.json after every study. Started again, it goes on until its studies took so many
minutes in all; each study's faults depend on the seed and the study's number alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "federation"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deployment"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deployment" / "flare"))
sys.path.insert(0, str(Path(__file__).parent))

from loopback import SITES, Without, model, options_of, same, simulate
from namespaces import Namespaces, why_not
from network import Network, rounds

from bench_processes import trust_module
from campaign_faults import SECONDS, Fault, Faults
from campaign_site import Played
from fedshift.deploy.flare.deployment_folder import ENDS, Deployment
from fedshift.deploy.remote.policy import AuditLog
from fedshift.errors import UserError
from fedshift.experiment.environment import versions
from fedshift.experiment.runs import round_loop
from fedshift.files import write_bytes

RESULTS = Path(__file__).parent / "results" / "network" / "campaign.json"
HANG = 300.0
ROUNDS = 8
QUORUM = {"quorum": 2, "deadline": 60.0, "patience": 2.0}


class Campaign:
    """A played federation, and what was done to it."""

    def __init__(self, network: Network, folder: Path, seed: int, studies: list[dict[str, Any]]) -> None:
        self.network, self.folder, self.seed, self.studies = network, folder, seed, studies
        self.faults = Faults(network, folder)

    def study(self) -> None:
        """Deploy one study, let it suffer, and check what came of it."""
        number = len(self.studies) + 1
        chance = self.faults.chance = random.Random(f"{self.seed} {number}")
        kinds = self.faults.kinds()
        faults = [chance.choice(kinds)() for _ in range(2)]
        quorum = any(fault.quorum for fault in faults)
        if quorum:
            faults = [fault for fault in faults if fault.quorum]  # others may lose a second site, by right
        secure = not quorum and number % 2 == 0  # a sum of one set of sites waits for a site that is lost
        aggregation = "secure" if secure else "plain"
        method = {"name": Played.name, "label": "played", "seconds": SECONDS}
        options = options_of(method, name=f"study-{number}")
        options["training"] = {**options["training"], "rounds": ROUNDS}
        begun = time.monotonic()
        deployment = self.network.deploy(options, aggregation=aggregation, **(QUORUM if quorum else {}))
        study: dict[str, Any] = {
            "study": number,
            "quorum": quorum,
            "aggregation": aggregation,
            "faults": [],
            "resumed": 0,
        }
        try:
            for fault in faults:
                self._until(deployment, study, rounds(deployment) + chance.randint(1, 2))
                time.sleep(chance.uniform(0, 2 * SECONDS))
                study["faults"].append(self._suffer(deployment, study, fault))
            self._until(deployment, study, None)
            study["wrong"] = self._compare(deployment, options, quorum, aggregation)
        except Hang as error:
            study["hang"] = str(error)
            deployment.want("abort")
            time.sleep(5)
        study["seconds"] = round(time.monotonic() - begun, 1)
        self.studies.append(study)
        print(json.dumps(study), flush=True)

    def _suffer(self, deployment: Deployment, study: dict[str, Any], fault: Fault) -> dict[str, Any]:
        before = rounds(deployment)
        if deployment.state["state"] in ENDS:
            return {"fault": fault.name, "after_round": before, "recovery": None}
        begun = time.monotonic()
        fault.begin()
        time.sleep(fault.lasts)
        fault.end()
        over = time.monotonic()
        self._until(deployment, study, before + 1)
        # A round that ends while the fault lasts has not suffered.
        recovery = max(0.0, time.monotonic() - (over if fault.lasts else begun))
        return {"fault": fault.name, "after_round": before, "recovery": round(recovery, 1)}

    def _until(self, deployment: Deployment, study: dict[str, Any], number: int | None) -> None:
        """Wait for so many rounds, or for the end of the study."""
        last, since = -1, time.monotonic()
        while True:
            state = deployment.state
            done = rounds(deployment)
            if state["state"] == "finished" or (number is not None and done >= number):
                return
            if state["state"] in ("failed", "aborted"):
                study.setdefault("asked for a person", []).append(state.get("message", "")[:200])
                study["resumed"] += 1
                if study["resumed"] > 3:
                    raise Hang(f"it ends again and again: {state}")
                deployment.want("run")
                time.sleep(1)
            if done != last:
                last, since = done, time.monotonic()
            elif time.monotonic() - since > HANG:
                raise Hang(f"no round for {HANG:g} s after round {done}: {state} {list(deployment.events())[-3:]}")
            time.sleep(0.05)

    def _compare(self, deployment: Deployment, options: dict[str, Any], quorum: bool, aggregation: str) -> list[str]:
        """What is wrong with the results of a finished study."""
        there = self.network.finish(deployment)
        played = {**options, "methods": [{**options["methods"][0], "seconds": 0.0}]}
        lost = {(event["site"], event["round"]) for event in deployment.events() if event.get("is") == "lost"}
        Without.absent = lost if quorum else set()
        orders = os.environ.pop("FEDSHIFT_CAMPAIGN")  # they are not for this process: its clock stays
        engine = vars(round_loop)["LocalFederation"]
        vars(round_loop)["LocalFederation"] = Without
        try:
            here = simulate(self.folder / options["name"], played, aggregation=aggregation)
        finally:
            vars(round_loop)["LocalFederation"] = engine
            os.environ["FEDSHIFT_CAMPAIGN"] = orders
        wrong = [] if same(model(here, "played", "west"), model(there, "played", "west")) else ["the weights differ"]
        lines = (there / "played/west/seed-0/rounds.jsonl").read_text().splitlines()
        if [json.loads(line)["round"] for line in lines] != list(range(1, ROUNDS + 1)):
            wrong.append("rounds are missing or doubled")
        wrong += [f"the audit log of {site}: {error}" for site in self.network.names if (error := self._broken(site))]
        shutil.rmtree(self.folder / options["name"], ignore_errors=True)
        # The disk is small. The coordinator would start a folder anew that it finds half deleted: rename it first.
        gone = deployment.folder.with_name("gone") / "it"
        gone.parent.mkdir()
        shutil.rmtree(deployment.folder.rename(gone).parent, ignore_errors=True)
        return wrong

    def _broken(self, site: str) -> str:
        """What is wrong with a site's audit log; empty if nothing is."""
        try:
            AuditLog.check(self.network.made.sites[site] / "memory" / "audit.jsonl")
        except UserError as error:
            return str(error)
        return ""

    @property
    def minutes(self) -> float:
        return sum(float(study["seconds"]) for study in self.studies) / 60

    def report(self, minutes: float) -> dict[str, Any]:
        """What the campaign shows so far."""
        suffered = [fault for study in self.studies for fault in study["faults"]]
        kinds = sorted({fault["fault"].split(":")[0] for fault in suffered})
        times = {
            kind: [f["recovery"] for f in suffered if f["fault"].startswith(kind) and f["recovery"]] for kind in kinds
        }
        every = sorted(time for values in times.values() for time in values)
        return {
            "command": f"python benchmarks/campaign.py --minutes {minutes:g} --seed {self.seed}",
            "versions": versions(),
            "cores": os.cpu_count(),
            "minutes": round(self.minutes, 1),
            "namespaces": self.faults.apart,
            "studies": len(self.studies),
            "of them with secure sums": sum(study["aggregation"] == "secure" for study in self.studies),
            "faults": len(suffered),
            "hangs": sum("hang" in study for study in self.studies),
            "wrong": [[study["study"], *study["wrong"]] for study in self.studies if study.get("wrong")],
            "resumed by a person": sum(study["resumed"] for study in self.studies),
            "recovery": {
                "median": statistics.median(every) if every else None,
                "longest": every[-1] if every else None,
            },
            "by fault": {
                kind: {"number": len(values), "median": statistics.median(values) if values else None}
                for kind, values in times.items()
            },
            "each": self.studies,
        }


class Hang(Exception):
    """A study that does not end."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays behind
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir="/tmp"))  # a short path: sockets lie in it
    trust_module(Played.name, folder)
    network = Network(folder, SITES) if why_not() else Namespaces(folder, SITES)
    before = json.loads(asked.out.read_text()) if asked.out.exists() else {"each": []}
    campaign = Campaign(network, folder, asked.seed, before["each"])
    os.environ["FEDSHIFT_CAMPAIGN"] = str(campaign.faults.orders)
    policy = {
        "smallest_group": 1,
        "exposure": 1,
        "rounds_per_day": None,
        "measurements_per_day": None,
        "methods": [Played.name],
    }
    for site in network.names:
        network.write_site(site, policy=policy)
    with campaign.faults.small_disks():
        try:
            if isinstance(network, Namespaces):
                network.connect()
            network.start()
            while campaign.minutes < asked.minutes:
                campaign.study()
                asked.out.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(asked.out, (json.dumps(campaign.report(asked.minutes), indent=1) + "\n").encode())
        finally:
            network.stop()
            if isinstance(network, Namespaces):
                network.disconnect()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
