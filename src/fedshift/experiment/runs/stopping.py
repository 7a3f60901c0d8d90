"""Stop after the round in progress when a scheduler says so, instead of losing it.

Schedulers send SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP some time before they end a job. The round in progress is finished
and written; if it takes longer than the grace, it is dropped. Ctrl-C (SIGINT), or a second signal, stops at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedshift.errors import FedshiftError, seconds_from

GRACE = "FEDSHIFT_GRACE"
"""The variable of the environment with the seconds that a round in progress gets."""
_GRACE = 25.0
"""Less than the 30 seconds that SLURM waits between SIGTERM and SIGKILL."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(FedshiftError):
    """A signal ended the work after a round. The exit code, 75 (EX_TEMPFAIL), means: start me again to go on."""

    exit_code = 75


class Stop:
    """Whether to stop: `check` is called before every round."""

    def __init__(self) -> None:
        self.by: str | None = None
        """The signal that came."""

    def check(self) -> None:
        """Do nothing until a signal came. Stopped if it came."""
        if self.by is not None:
            raise Stopped(f"stopped by {self.by} after a round: run the same command again to go on")

    def unfinished_round(self) -> Stopped:
        """What to raise for a round that was not finished in time."""
        return Stopped(
            f"stopped by {self.by} in the middle of a round, which took longer than {grace():g} seconds: run the same "
            f"command again to go on after the last round, or give rounds longer with {GRACE}"
        )


def grace() -> float:
    """The seconds that a round in progress gets.

    Raises:
        UserError: the variable of the environment is no number of seconds.

    Example:
        >>> grace()
        25.0
    """
    return seconds_from(GRACE, _GRACE, zero=True)


@contextmanager
def heed_signals() -> Iterator[Stop]:
    """Heed the signals in this block, and leave the process's handlers as they were behind it.

    Stopped if a signal came and the round took longer than the grace, or a second signal came.
    """
    stop, seconds = Stop(), grace()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.by is not None or seconds == 0:
            stop.by = stop.by or signal.Signals(number).name
            signal.default_int_handler(number, frame)
        stop.by = signal.Signals(number).name
        signal.setitimer(signal.ITIMER_REAL, seconds)

    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, ask) for number in heard}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield stop
    except KeyboardInterrupt:
        if stop.by is None:
            raise
        raise stop.unfinished_round() from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
