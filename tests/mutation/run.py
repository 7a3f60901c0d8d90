"""Break the code on purpose, one mistake at a time, and see whether a test notices.

    python tests/mutation/run.py --jobs 8            all mutations that have no result yet
    python tests/mutation/run.py --only csac --again

Every mutation runs in a copy of ``src`` of its own; the checkout is never edited. Results are kept in ``report.json``
after each mutation, so a run that was cut off goes on. A result counts for as long as the mutation, the module and the
files of its tests stay as they are. A kill counts only if the test that noticed passes without the mistake.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutation_report import KILLED, markdown
from mutations import HERE, ROOT, Mutation, all_mutations

SOURCE = ROOT / "src"
KEPT = HERE / "report.json"
_PROCESSES = multiprocessing.get_context("forkserver")
"""Each run of tests is a fork of a process that has imported what takes seconds, but nothing of the package."""
_PROCESSES.set_forkserver_preload(["pytest", "numpy", "pydantic", "torch", "torchvision"])
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)


def main() -> int:
    """Run what is asked for; 0 when no mutation survived."""
    options = _options()
    os.environ["OMP_NUM_THREADS"] = "1"  # read where torch is imported
    mutations = all_mutations()
    chosen = [mutation for mutation in mutations if any(part in mutation.name for part in options.only)]
    kept = _kept()
    waiting = [
        mutation
        for mutation in chosen
        if options.again or kept.get(mutation.name, {}).get("digest") != mutation.digest(SOURCE, ROOT)
    ]
    print(f"{len(mutations)} mutations, {len(chosen)} chosen, {len(waiting)} to run, {options.jobs} at a time")
    _check_copy_is_used()
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(_tried, mutation, options.timeout): mutation for mutation in waiting}
        for number, future in enumerate(as_completed(running), 1):
            name, result = running[future].name, future.result()
            kept[name] = result
            print(f"{number:4}/{len(waiting)} {result['status']:9} {result['seconds']:6.1f} s  {name}", flush=True)
            _write(mutations, kept)
    _confirm(chosen, kept, options)
    _write(mutations, kept)
    bad = [name for name in (m.name for m in chosen) if kept[name]["status"] not in KILLED]
    print("\n".join(f"not killed: {name}" for name in bad) or "all killed")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break the code on purpose and see whether a test notices.")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one mutation's tests")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; the default is all")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    return parser.parse_args()


def _kept() -> dict[str, dict[str, Any]]:
    """Results so far, by name."""
    if not KEPT.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))["mutations"]
    return found


def _copy(folder: Path) -> Path:
    """A copy of the package's source in ``folder``, without compiled files: they could be of another text."""
    shutil.copytree(SOURCE, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder / "src"


def _environment(source: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _check_copy_is_used() -> None:
    """Raises RuntimeError when Python would import another copy than the one it is given."""
    with tempfile.TemporaryDirectory() as folder:
        child = _PROCESSES.Process(target=_find_copy, args=(_copy(Path(folder)),))
        child.start()
        child.join()
    if child.exitcode != 0:
        raise RuntimeError("the mutated copy is not what Python imports")


def _find_copy(source: Path) -> None:
    _use(source)
    found = importlib.util.find_spec("fedshift")
    sys.exit(0 if found and Path(str(found.origin)).resolve().is_relative_to(source.resolve()) else 1)


def _use(source: Path) -> None:
    """Let this process, and those that its tests start, import the package in ``source``."""
    os.environ.update(_environment(source))
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(source))


def _run_tests(source: Path, arguments: list[str], output: str) -> None:
    """In a process of its own: pytest, with what it prints in the file ``output``; its status is the process's."""
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    _use(source)
    os.chdir(ROOT)
    sys.exit(int(pytest.main(arguments)))


def _pytest(source: Path, targets: Iterable[str], timeout: float, *more: str) -> tuple[int | None, str]:
    """Exit status (none where time ran out) and output of pytest on the package in ``source``."""
    arguments = ["-q", "--tb=line", "-rfE", "-p", "no:cacheprovider", "-m", "not slow"]
    if importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", "0"]
    with tempfile.NamedTemporaryFile() as output:
        child = _PROCESSES.Process(target=_run_tests, args=(source, [*arguments, *more, *targets], output.name))
        child.start()
        child.join(timeout)
        if child.is_alive():
            assert child.pid is not None
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
            return None, ""
        return child.exitcode, Path(output.name).read_text(encoding="utf-8", errors="replace")


def _tried(mutation: Mutation, timeout: float) -> dict[str, Any]:
    """What became of one mutation."""
    begun = time.monotonic()
    digest = mutation.digest(SOURCE, ROOT)
    with tempfile.TemporaryDirectory(prefix="fedshift-mutation-") as folder:
        source = _copy(Path(folder))
        file = mutation.file(source)
        file.write_text(mutation.applied(file.read_text(encoding="utf-8")), encoding="utf-8")
        code, output = _pytest(source, mutation.tests, timeout, "-x")
    noticed = _FAILED.findall(output)
    result: dict[str, Any] = {"digest": digest, "area": mutation.area, "seconds": round(time.monotonic() - begun, 1)}
    if code is None:
        return {**result, "status": "timeout"}
    if code == 0:
        return {**result, "status": "survived"}
    if code == 1 and noticed:
        return {**result, "status": "killed", "by": noticed[0]}
    return {**result, "status": "invalid", "output": output[-2000:]}  # nothing collected, or the module does not load


def _confirm(chosen: list[Mutation], kept: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Run the tests that noticed on the source as it is: a test that fails there has killed nothing."""
    killers = {kept[m.name]["by"]: None for m in chosen if "by" in kept[m.name] and not kept[m.name].get("confirmed")}
    files: dict[str, list[str]] = {}
    for target in killers:
        files.setdefault(target.split("::")[0], []).append(target)
    with tempfile.TemporaryDirectory(prefix="fedshift-mutation-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        source = _copy(Path(folder))
        limit = 4 * options.timeout
        outcomes = list(pool.map(lambda targets: _pytest(source, targets, limit), files.values()))
    for targets, (code, output) in zip(files.values(), outcomes, strict=True):
        failing = set(_FAILED.findall(output))
        for mutation in chosen:
            result = kept[mutation.name]
            if result.get("by") in targets and not result.get("confirmed"):
                sound = code in (0, 1) and result["by"] not in failing
                result |= {"confirmed": True} if sound else {"status": "unsound"}


def _versions() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "pytest")}
    return {"commit": commit.strip(), "python": platform.python_version(), **packages, "machine": platform.machine()}


def _write(mutations: list[Mutation], kept: dict[str, dict[str, Any]]) -> None:
    """Keep the results, and render the report. Results of mutations that are no longer listed go."""
    listed = {mutation.name: kept[mutation.name] for mutation in mutations if mutation.name in kept}
    versions = _versions()
    text = json.dumps({"versions": versions, "mutations": listed}, indent=1, ensure_ascii=False)
    draft = KEPT.with_suffix(".part")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(KEPT)
    (HERE / "report.md").write_text(markdown(mutations, listed, versions), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
