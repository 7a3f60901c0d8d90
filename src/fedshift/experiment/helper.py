"""A further process of ``engine.parallel_runs``: ``python -m fedshift.experiment.helper EXPERIMENT.json RUNS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fedshift.errors import FedshiftError
from fedshift.experiment.loop import run_experiment
from fedshift.experiment.schema import parse


def main() -> int:
    """Take parts that no other process holds until none is left."""
    try:
        run_experiment(parse(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]), helper=True)
    except FedshiftError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
