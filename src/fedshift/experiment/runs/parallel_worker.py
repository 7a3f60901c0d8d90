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
from fedshift.experiment.runs.parallel import DIVERGED, STOP
from fedshift.experiment.runs.stopping import Stop, heed_signals
from fedshift.extras import runs_program
from fedshift.import_paths import CHILD


def main() -> int:
    """Run the runs that no other process holds, until none is left. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    atexit.register(gc.freeze)  # otherwise Python searches all of torch's objects for garbage at exit
    os.environ[CHILD] = "1"
    runs_program("runs")
    try:
        with heed_signals() as stop:
            threading.Thread(target=_end_with_parent, args=(stop,), daemon=True).start()
            experiment = parse(json.loads(Path(sys.argv[1]).read_text()))
            run_experiment(experiment, Path(sys.argv[2]), helper=True, stop=stop.check)
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


def _end_with_parent(stop: Stop) -> None:
    """Stop this process after its round when its parent says so, at once when its parent ends, as the pipe closes."""
    if os.read(0, len(STOP)):
        if stop.by is None:  # a scheduler may have told this process, too: a second signal would drop the round
            os.kill(os.getpid(), signal.SIGUSR1)
        os.read(0, 1)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
