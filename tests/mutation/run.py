"""Break the code on purpose, one mistake at a time, and see whether a test notices.

    python tests/mutation/run.py                     all that no test noticed, or not in the present text
    python tests/mutation/run.py --only csac --again

Every mutation is tried in a fork of this process, which has imported torch and pytest and nothing of the package. The
fork imports the package from the checkout, and the mutated module from memory: no file is changed. Results are kept in
``report.json`` after each mutation, so a run that was cut off goes on. A kill counts only if the test that noticed
passes without the mistake.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read where torch is imported

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutation_report import KILLED, markdown
from mutations import HERE, ROOT, Mutation, all_mutations, named_tests

SOURCE = ROOT / "src"
KEPT = HERE / "report.json"
_PRELOADED = (
    "cryptography.x509", "hypothesis.extra.numpy", "PIL.Image", "rich.console",
    "rich.progress", "rich.table", "safetensors.torch", "scipy.optimize", "scipy.spatial", "scipy.special",
    "sklearn.cluster", "sklearn.datasets", "sklearn.linear_model", "sklearn.metrics", "torch.func", "torchvision",
    "typer.testing", "yaml",
)  # fmt: skip
"""What takes seconds to import: once, instead of once a mutation."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
_NOT_A_RESULT = 99
"""Status of a fork that went wrong outside of pytest, which has statuses of its own from 0 to 5."""
_NO_TEST = int(pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True)
class Outcome:
    """What became of one fork: its exit status, none where its time ran out, its output and its processor seconds."""

    status: int | None
    output: str
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The tests that failed."""
        return _FAILED.findall(self.output)


def main() -> int:
    """Run what is asked for; 0 when no mutation survived."""
    options = _options()
    mutations = all_mutations()
    chosen = [
        mutation
        for mutation in mutations
        if any(part in mutation.name for part in options.only) and options.list in ("", mutation.area)
    ]
    kept, known = _kept(), named_tests()
    waiting = [
        mutation
        for mutation in ([] if options.report else chosen)
        if options.again
        or not mutation.is_current(kept.get(mutation.name), known)
        or kept[mutation.name]["status"] not in KILLED
    ]
    print(f"{len(mutations)} mutations, {len(chosen)} chosen, {len(waiting)} to run, {options.jobs} at a time")
    if waiting:
        _preload()
    done = 0

    def note(mutation: Mutation, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        kept[mutation.name] = result = _result(mutation, outcome)
        print(f"{done:4}/{len(waiting)} {result['status']:9}{outcome.seconds:6.1f} s  {mutation.name}", flush=True)
        _write(mutations, kept)

    _fork_each({m: _tests_of(m, kept.get(m.name, {}).get("by")) for m in waiting}, note, options.jobs, options.timeout)
    if not options.report:
        _confirm([kept[m.name] for m in chosen if m.name in kept], options.timeout)
    gc.unfreeze()
    _write(mutations, kept)
    bad = [m.name for m in chosen if m.name in kept and kept[m.name]["status"] not in KILLED]
    print("\n".join(f"not killed: {name}" for name in bad) or "all killed")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break the code on purpose and see whether a test notices.")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--timeout", type=int, default=60, help="processor seconds for one mutation's tests")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; the default is all")
    parser.add_argument("--list", default="", help="only those of one file of lists/, such as evaluation")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--report", action="store_true", help="write the report anew and run nothing")
    return parser.parse_args()


def _kept() -> dict[str, dict[str, Any]]:
    """Results so far, by name."""
    if not KEPT.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))["mutations"]
    return found


def _preload() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    assert not any(name.partition(".")[0] == "fedshift" for name in sys.modules)
    # No database, the same examples every time, and the first failing one is enough.
    hypothesis.settings.register_profile(
        "mutation", database=None, derandomize=True, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
    )
    hypothesis.settings.load_profile("mutation")
    sys.dont_write_bytecode = False  # what one fork compiles, the next one reads
    gc.collect()
    gc.freeze()  # a fork that collects would copy every page


def _fork_each(
    work: dict[Mutation, list[list[str]]], note: Callable[[Mutation, Outcome], None], jobs: int, timeout: int
) -> None:
    """Run the tests of each mutation, ``jobs`` at a time, and tell ``note`` what became of it."""
    waiting, running = list(work.items()), dict[int, tuple[Mutation, Path]]()
    with tempfile.TemporaryDirectory(prefix="fedshift-mutation-") as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutation, tests = waiting.pop(0)
                output = Path(folder) / f"{len(waiting)}"
                running[_forked(mutation, tests, output, timeout)] = mutation, output
            process, status, usage = os.wait4(-1, 0)
            mutation, output = running.pop(process)
            code = None if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _OUT_OF_TIME else _exit_code(status)
            text = output.read_text(encoding="utf-8", errors="replace")
            note(mutation, Outcome(code, text, round(usage.ru_utime + usage.ru_stime, 2)))


_OUT_OF_TIME = (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)


def _exit_code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else _NOT_A_RESULT


def _forked(mutation: Mutation | None, tests: list[list[str]], output: Path, timeout: int) -> int:
    """Start a process that runs the lists of tests in ``tests`` one after another, until one of a list fails."""
    handle = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    sys.stdout.flush()
    process = os.fork()
    if process:
        os.close(handle)
        return process
    code = _NOT_A_RESULT
    try:
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout + 5))
        signal.alarm(20 * timeout)  # for a test that waits and does nothing
        code = _run_tests(mutation, tests)
    finally:
        sys.stdout.flush()
        os._exit(code)
    raise AssertionError("a fork ends above")


def _run_tests(mutation: Mutation | None, tests: list[list[str]]) -> int:
    """The status of the last run of pytest that had tests: of each list the quick ones, then the slow ones."""
    os.chdir(ROOT)
    sys.path.insert(0, str(SOURCE))
    if mutation is not None:
        sys.meta_path.insert(0, _WithMistake(mutation))
    arguments = ["-q", "--tb=line", "-rfE", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", "0"]
    code = _NOT_A_RESULT
    for targets, marked in itertools.product(tests, ("not slow", "slow and not cluster")):
        status = int(pytest.main([*arguments, *(["-x"] if mutation else []), "-m", marked, *targets]))
        if status != _NO_TEST or code == _NOT_A_RESULT:
            code = status
        if code == 1:
            break
    package = sys.modules.get("fedshift")
    if package is None or not Path(str(package.__file__)).is_relative_to(SOURCE):
        return _NOT_A_RESULT
    return code


class _WithMistake(MetaPathFinder):
    """Finds the mutated module, and no other."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        file = self._mutation.file(SOURCE)
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(self._mutation, file))


class _Loader(SourceFileLoader):
    def __init__(self, mutation: Mutation, file: Path) -> None:
        super().__init__(mutation.module, str(file))
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        """The module's code with the mistake in it; no compiled file is read or written."""
        return compile(self._mutation.applied(Path(self.path).read_text(encoding="utf-8")), self.path, "exec")


def _tests_of(mutation: Mutation, noticed_before: str | None) -> list[list[str]]:
    """First the test that noticed the last time, if it is still where it was; then all that should notice."""
    there = noticed_before is not None and (ROOT / noticed_before.split("::")[0]).is_file()
    return [*([[str(noticed_before)]] if there else []), mutation.targets()]


def _result(mutation: Mutation, outcome: Outcome) -> dict[str, Any]:
    result: dict[str, Any] = {"digest": mutation.digest(), "seconds": outcome.seconds}
    if outcome.status is None:
        return {**result, "status": "timeout"}
    if outcome.status == 0:
        return {**result, "status": "survived"}
    if outcome.status == 1 and outcome.failed:
        return {**result, "status": "killed", "by": outcome.failed[0]}
    return {**result, "status": "invalid", "output": outcome.output[-2000:]}  # nothing ran, or the module does not load


def _confirm(results: Iterable[dict[str, Any]], timeout: int) -> None:
    """Run the tests that noticed on the source as it is: a test that fails there has killed nothing."""
    unsure = [result for result in results if result["status"] == "killed" and not result.get("confirmed")]
    if not unsure:
        return
    _preload()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        tests = sorted({result["by"] for result in unsure})
        _, status = os.waitpid(_forked(None, [tests], output, len(tests) * timeout), 0)
        failed = set(_FAILED.findall(output.read_text(encoding="utf-8", errors="replace")))
    if _exit_code(status) not in (0, 1):
        raise RuntimeError("the tests that noticed could not be run without the mistakes")
    for result in unsure:
        result |= {"status": "unsound"} if result["by"] in failed else {"confirmed": True}


def _versions() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "pytest")}
    return {"commit": commit.strip(), "python": platform.python_version(), **packages, "machine": platform.machine()}


def _write(mutations: list[Mutation], kept: dict[str, dict[str, Any]]) -> None:
    """Keep the results, and render the report. Results of mutations that are no longer listed go."""
    listed = {mutation.name: kept[mutation.name] for mutation in mutations if mutation.name in kept}
    versions, known = _versions(), named_tests()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in listed.items())
    draft = KEPT.with_suffix(".part")
    draft.write_text(f'{{"versions": {json.dumps(versions)}, "mutations": {{\n{lines}\n}}}}\n', encoding="utf-8")
    draft.replace(KEPT)
    current = {m.name for m in mutations if m.is_current(listed.get(m.name), known)}
    (HERE / "report.md").write_text(markdown(mutations, listed, current, versions), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
