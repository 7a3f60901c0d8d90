"""Memory of what grows with sites or samples; `bench.py` runs it in fresh processes.

``python benchmarks/bench_memory.py PART SITES`` prints one line of JSON. The server aggregates the 45 MB models of many
sites:

fedavg: one round of FedAvg, the replies stream once.
csac_kept: one round of CSAC; replies are kept for three passes, beyond 256 MiB in temporary files.
csac_passes: CSAC's three passes over models that are made anew in each pass, so that the disk sets no limit.

No site trains: an engine that stands for all of them makes one model at a time.

remote_fedavg, remote_csac, remote_median, remote_krum: one round at the coordinator of a deployment. Every site's
reply is a message of 45 MB that `RemoteFederation` takes in through `FlareTransport`, as in a job. The replies come all
at once and in reverse. FLARE itself is not there: its buffers, which hold what it sends and receives, come on top.

KD3A's target judges SITES sources by what they say of 100,000 samples of 345 classes, batch after batch:

vote: the knowledge vote alone.
vote_shapley, vote_leave_one_out: vote and consensus focus.

Predictions are drawn, sure ones and unsure ones; the seconds are without the drawing.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fedshift.federation.exchange import Answer, Request
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.methods.base import Method, State
from fedshift.methods.federated.csac import CSAC, divergence_aggregate
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.kd3a import FocusTally, knowledge_vote
from fedshift.methods.registry import method_class
from fedshift.models import registry as models
from fedshift.weights import Weights

PARTS = ("fedavg", "csac_kept", "csac_passes")
REMOTE: dict[str, dict[str, Any]] = {
    "remote_fedavg": {"name": "fedavg"},
    "remote_csac": {"name": "csac"},
    "remote_median": {"name": "fedavg", "robust": "median"},
    "remote_krum": {"name": "fedavg", "robust": {"rule": "krum", "faulty": 3, "keep": 5}},
}
VOTES = ("vote", "vote_leave_one_out", "vote_shapley")
_STATUS = Path("/proc/self/status")


def model_of(like: Weights, number: int) -> Weights:
    """A model of site ``number``, in memory of its own."""
    shift = 1e-3 * (number % 17 + 1)
    return Weights({key: value + shift if value.is_floating_point() else value.clone() for key, value in like.items()})


class Generated(Federation):
    """Sites whose updates are made when the server takes them."""

    def __init__(self, method: Method, like: Weights, sites: int) -> None:
        names = [str(number) for number in range(sites)]
        super().__init__(method, about={}, sources=names, targets=(), budget=dict.fromkeys(names, 2), rounds=2, seed=0)
        self.like = like

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any], None, None]:
        for request in requests:
            number = int(request.site)
            yield Answer(request.site, Update(model_of(self.like, number), 100 + number % 7, 0.5), 1)

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        return {}

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        """These sites remember nothing."""


class Remade:
    """The models of all sites, made anew in every pass."""

    def __init__(self, like: Weights, sites: int) -> None:
        self.like, self.sites = like, sites

    def __iter__(self) -> Iterator[Weights]:
        return (model_of(self.like, number) for number in range(self.sites))


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: now, and at most since `forget_peak`."""
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        now, most = (int(lines[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
        return now, most
    # On Linux ru_maxrss is at least what the parent had, hence the file above. macOS counts bytes.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return most, most


def forget_peak() -> None:
    """Begin a new peak where the kernel can (Linux); importing torch has one of its own."""
    clear = _STATUS.with_name("clear_refs")
    if clear.exists():
        try:
            clear.write_text("5")
        except OSError:
            return


def measure(part: str, sites: int) -> dict[str, Any]:
    """Aggregate once; bytes of the process before and at most."""
    torch.set_num_threads(1)
    resnet = models.parse({"name": "resnet18"})
    network = models.build(resnet, (3, 224, 224), 7, 0)
    like = Weights({key: tensor.contiguous() for key, tensor in network.state_dict().items()})
    del network
    forget_peak()
    before, _ = resident()
    began = time.perf_counter()
    if part == "csac_passes":
        divergence_aggregate(Remade(like, sites))
    else:
        method: Method = FedAvg() if part == "fedavg" else CSAC()
        method.round(Generated(method, like, sites), State(like))
    seconds = time.perf_counter() - began
    _, most = resident()
    return {
        "part": part,
        "sites": sites,
        "model_bytes": like.nbytes,
        "peak_bytes": most,
        "growth_bytes": most - before,
        "seconds": seconds,
    }


class _Controller:
    """Stands for FLARE's: takes the requests, then brings all replies, the last asked first."""

    def __init__(self, folder: Path, like: Weights) -> None:
        self.folder, self.like = folder, like
        self.asked: list[tuple[str, Any, str]] = []

    def send(self, task: Any, context: Any, targets: list[str]) -> None:
        key = json.loads(task.data["header"])["key"]
        self.asked.append((targets[0], task, key))

    def cancel_task(self, task: Any) -> None:
        """Nothing is left to do."""

    def answer(self) -> None:
        """Bring the replies. Their bodies are read from files, as they would come from a socket."""
        from fedshift.deploy.flare.engine import shareable_of
        from fedshift.deploy.remote.wire import Body, seal

        for site, task, key in reversed(self.asked):
            data = (self.folder / site).read_bytes()
            body = Body(data, hashlib.sha256(data).hexdigest(), {})
            answer = seal({"answers": key, "mini_batches": 1, "memory": {}}, body)
            del data, body
            task.result_received_cb(
                SimpleNamespace(client=SimpleNamespace(name=site), result=shareable_of(answer)), None
            )
            del answer


def write_bodies(sites: int, folder: Path) -> None:
    """Write the bodies of the sites' replies."""
    from fedshift.deploy.remote.wire import body_of

    like = Weights(models.build(models.parse({"name": "resnet18"}), (3, 224, 224), 7, 0).state_dict())
    for number in range(sites):
        whole = body_of({"weights": model_of(like, number), "samples": 100, "loss": 0.5})
        (folder / str(number)).write_bytes(whole.data)


def measure_remote(part: str, sites: int) -> dict[str, Any]:
    """One round through the coordinator's receiving code; bytes of the process before and at most."""
    from nvflare.apis.signal import Signal

    from fedshift.data.domain import Preprocessing
    from fedshift.deploy.flare import engine
    from fedshift.deploy.remote.remote_federation import RemoteFederation
    from fedshift.deploy.remote.requests import SeedSplit, SitePart
    from fedshift.federation.replies import About
    from fedshift.federation.setting_json import setting_recipe
    from fedshift.federation.site_runner import Setting
    from fedshift.federation.training import Training
    from fedshift.methods.screening import screening_of

    torch.set_num_threads(1)
    resnet = models.parse({"name": "resnet18"})
    network = models.build(resnet, (3, 224, 224), 7, 0)
    like = Weights({key: tensor.contiguous() for key, tensor in network.state_dict().items()})
    options = dict(REMOTE[part])
    method = method_class(options.pop("name")).model_validate(options)
    names = [str(number) for number in range(sites)]
    with tempfile.TemporaryDirectory() as folder:
        # By another process, since freed memory may stay with the one that had it.
        subprocess.run([sys.executable, __file__, "write", str(sites), folder], check=True)
        controller = _Controller(Path(folder), like)

        class Transport(engine.FlareTransport):
            def _exchange(self, *given: Any) -> Any:
                arrivals = super()._exchange(*given)
                yield next(arrivals)  # all requests are sent
                thread = threading.Thread(target=controller.answer)
                thread.start()
                yield from arrivals
                thread.join()

        transport = Transport(controller, None, Signal(), lambda: None, 1024)
        about = About(network, 200, (3, 224, 224), 7, Training())
        setting = Setting(method, Training(), resnet, Preprocessing(kind="image"), (3, 224, 224), 7, sites, 0, "cpu")
        split = SeedSplit(test_fraction=0.2, split="auto", seed=0)
        site_part = SitePart(role="source", number=0, split=split, whole=False, fingerprint="f")
        federation = RemoteFederation(
            method,
            transport,
            run="memory",
            recipe=setting_recipe(setting),
            parts=dict.fromkeys(names, site_part),
            about=dict.fromkeys(names, about),
            deadline=600.0,
            sources=names,
            targets=(),
            budget=dict.fromkeys(names, 2),
            rounds=2,
            seed=0,
        )
        federation.screening = screening_of(method, like)
        forget_peak()
        before, _ = resident()
        began, worked = time.perf_counter(), time.process_time()
        method.round(federation, State(like))
        seconds, processor = time.perf_counter() - began, time.process_time() - worked
        _, most = resident()
    assert federation.ledger.total["up"]["weights"] == sites * like.nbytes, "every reply counted"
    return {
        "part": part,
        "sites": sites,
        "model_bytes": like.nbytes,
        "before_bytes": before,
        "peak_bytes": most,
        "growth_bytes": most - before,
        "seconds": seconds,
        "processor_seconds": processor,
    }


def measure_vote(part: str, sources: int) -> dict[str, Any]:
    """Vote on all samples once; bytes of the process before and at most, and seconds."""
    samples, classes, batch = 100_000, 345, 500
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    tally = None
    if part != "vote":
        tally = FocusTally(sources, 0.9, rule="shapley" if part == "vote_shapley" else "leave_one_out")
    forget_peak()
    before, _ = resident()
    seconds = passing = 0.0
    for start in range(0, samples, batch):
        size = min(batch, samples - start)
        # Teachers who agree on most samples, each as sure as chance will have it.
        truth = torch.randint(classes, (size,), generator=draws).expand(sources, size)
        logits = torch.randn(sources, size, classes, generator=draws)
        heights = 6 + 4 * torch.randn(sources, size, 1, generator=draws)
        predictions = logits.scatter_add(2, truth[..., None], heights).softmax(2)
        began = time.perf_counter()
        passing += float((knowledge_vote(predictions, 0.9).support >= 1).sum())
        if tally is not None:
            tally.add(predictions)
        seconds += time.perf_counter() - began
    if tally is not None:
        began = time.perf_counter()
        tally.focus()
        seconds += time.perf_counter() - began
    _, most = resident()
    return {
        "part": part,
        "sources": sources,
        "samples": samples,
        "classes": classes,
        "supported": passing / samples,
        "predictions_bytes": 4 * sources * samples * classes,
        "peak_bytes": most,
        "growth_bytes": most - before,
        "seconds": seconds,
    }


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_bodies(int(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    measured = measure_vote if sys.argv[1] in VOTES else measure_remote if sys.argv[1] in REMOTE else measure
    print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))
