"""A deployed federation on one machine: processes for a coordinator and two hospitals, mutual TLS between them.

It needs the extra deploy. The same experiment is then simulated, which gives the same model, bit for bit.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import fedshift

FILE = Path(__file__).parents[1] / "table.yaml"
FEWER = ["protocol.targets=[east]", "protocol.seeds=[0]", "training.rounds=2", "methods=[fedavg]", "device=cpu"]
FEWER += ["engine.threads=1"]

if __name__ == "__main__":
    subprocess.run([sys.executable, "-m", "fedshift", "project", "try", FILE, *FEWER, "--runs", "deployed"], check=True)
    deployed = fedshift.results("deployed/table")
    simulated = fedshift.run(fedshift.load(FILE, *FEWER), "simulated")
    print(deployed)
    (there,), (here,) = deployed.collected.runs, simulated.collected.runs
    models = [load_file(run.folder / "model.safetensors") for run in (there, here)]
    same = all(np.array_equal(models[0][name], models[1][name]) for name in models[1])
    print(f"the same model as in a simulation: {'yes' if same else 'no'}")
    print(f"left the hospitals: {there.result.bytes_up}")
