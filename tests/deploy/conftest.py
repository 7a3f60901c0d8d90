"""The tiny sites of the federation's tests serve these tests too; those of FLARE and of secure sums need the extra."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))

OF_CLI = ["cli/test_roles.py", "cli/test_selftest.py", "cli/test_status.py"]
NEEDS_EXTRA = ["crypto/*", "flare/*", "secure/*", "test_chained_log.py", *OF_CLI]
collect_ignore_glob = [] if find_spec("nvflare") and find_spec("cryptography") else NEEDS_EXTRA


def pytest_report_header() -> list[str]:
    return [f"tests/deploy: not run without fedshift[deploy]: {', '.join(collect_ignore_glob)}"] * bool(
        collect_ignore_glob
    )
