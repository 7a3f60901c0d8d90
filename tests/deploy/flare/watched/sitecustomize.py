"""Python imports this first in every process of a test's federation: notes which addresses it looks up and dials."""

import json
import os
import socket
import sys
from typing import Any

FOLDER = os.environ.get("FEDSHIFT_WATCHED", "")
"""Where the notes go, one file per process."""


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """Write down an address that is no path of this machine."""
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        if arguments[0].family == socket.AF_UNIX:
            return
        what = "sent" if event != "socket.connect" else "aimed" if arguments[0].type == socket.SOCK_DGRAM else "dialled"
        address = arguments[1]  # to connect a datagram's socket sends nothing
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        what, address = "looked up", arguments[:2]
    else:
        return
    with open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps([what, *(str(part) for part in address or ())]) + "\n")


if FOLDER:
    with open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), "w", encoding="utf-8"):
        pass  # a process that dials nobody is seen, too
    sys.addaudithook(note)
