"""A further process of ``engine.parallel_runs``.

Started by ``python -m fedshift.experiment.runs.parallel_worker EXPERIMENT.json RUNS``.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path

from fedshift.errors import OUT_OF_MEMORY, FedshiftError, TrainingDiverged, UserError, is_out_of_memory
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.experiment.runs.parallel import DIVERGED
from fedshift.extras import runs_program
from fedshift.import_paths import CHILD


def main() -> int:
    """Run the runs that no other process holds, until none is left. Returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that workers and their files are cleaned up
    atexit.register(gc.freeze)  # otherwise Python searches all of torch's objects for garbage at exit
    os.environ[CHILD] = "1"
    runs_program("runs")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_experiment(parse(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]), helper=True)
    except TrainingDiverged as error:
        print(error, file=sys.stderr)
        return DIVERGED
    except FedshiftError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(OUT_OF_MEMORY, file=sys.stderr)
        return UserError.exit_code
    return 0


def _end_with_parent() -> None:
    """Stop this process when its parent ends.

    The parent writes nothing to this process's standard input. So a read returns only when the parent's end is closed.
    """
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
