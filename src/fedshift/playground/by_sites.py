"""What a site that lies tries at the coordinator, and at those who read the results."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fedshift.experiment.predict import load_model
from fedshift.federation.remote.transport import Lost
from fedshift.federation.remote.wire import Message, body_of, seal, unseal
from fedshift.playground.in_process import rehearse
from fedshift.playground.played import Played
from fedshift.playground.promise import Promise, expect
from fedshift.report.collect import collect
from fedshift.report.page import page
from fedshift.text import csv_text
from fedshift.weights import Weights

LIAR = "north"
Spoil = Callable[[Message], Message | list[Message]]


def _spoiled(played: Played, name: str, spoil: Spoil) -> str:
    """The liar spoils its replies; the other site goes on, and the coordinator says who it was."""

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost | list[Message]:
        if site == LIAR and header["do"] == "step" and isinstance(answer, Message):
            return spoil(answer)
        return answer

    events = rehearse(played, name, change)
    said = [event for event in events if event.get("is") in ("refused", "lost") and "reason" in event]
    expect(bool(said), "nothing is refused")
    expect({event["site"] for event in said} == {LIAR}, f"another site is blamed: {said}")
    done = [event for event in events if event.get("what") == "round"]
    expect(len(done) >= 2, "the run does not go on without it")
    return f"site '{LIAR}' refused: {said[0]['reason']}"


def _with_weights(change: Callable[[Weights], Weights]) -> Spoil:
    def spoil(answer: Message) -> Message:
        header, content, _ = unseal(answer)
        weights = content["weights"]
        assert isinstance(weights, Weights)
        content["weights"] = change(weights)
        return seal(header, body_of(content))

    return spoil


def _malformed(played: Played) -> str:
    def shorter(weights: Weights) -> Weights:
        name, tensor = next(iter(weights.items()))
        return weights.merge({name: tensor[:-1]})

    return _spoiled(played, "malformed", _with_weights(shorter))


def _no_number(played: Played) -> str:
    return _spoiled(
        played, "nan", _with_weights(lambda weights: weights.merge({k: v * float("nan") for k, v in weights.items()}))
    )


def _garbage(played: Played) -> str:
    return _spoiled(played, "garbage", lambda answer: Message(answer.header, answer.body[:-7], answer.digest))


def _second_reply(played: Played) -> str:
    return _spoiled(played, "twice", lambda answer: [answer, answer])


def _old_reply(played: Played) -> str:
    """The reply of the first round, sent again as that of each later one."""
    first: list[Message] = []

    def old(answer: Message) -> Message:
        first.append(answer)
        return first[0]

    return _spoiled(played, "old", old)


def _honest_run(played: Played) -> Path:
    """What the honest deployment left at the coordinator. Its classes have the names that the liar chose."""
    return played.coordinator / "deployments" / "honest" / "runs" / "honest"


def _script(played: Played) -> str:
    text = page(collect(_honest_run(played)))
    expect("&lt;script&gt;" in text, "the page does not show the classes")
    expect(text.count("<script") == 1, "the page holds a script that is not its own")
    return "the page shows the name as text"


def _control_sequence(played: Played) -> str:
    from rich.console import Console

    from fedshift.report.table import table_of
    from fedshift.report.table_formats import FORMATS, terminal

    found = collect(_honest_run(played))
    shown = io.StringIO()
    with redirect_stdout(shown):
        Console(width=200).print(terminal(table_of(found)))
    pieces: Sequence[str] = [page(found), shown.getvalue(), *(write(table_of(found)) for write in FORMATS.values())]
    expect(any("owned" in piece for piece in pieces), "no output shows the classes")
    for piece in pieces:
        expect("\x1b]" not in piece and "\x1b[2J" not in piece, "a control sequence reaches the reader")
    return "pages and tables hold no control sequence"


def _formula(played: Played) -> str:
    """Predictions of the honest run's model, as `fedshift predict --format csv` writes them."""
    model = next((_honest_run(played) / "fedavg").rglob("model.safetensors"))
    trained = load_model(model)
    predicted = trained.predict(played.sites[LIAR] / "data.npz")
    rows = csv.reader(io.StringIO(csv_text([trained.classes, [str(one.predicted) for one in predicted]]), newline=""))
    cells = [cell for row in rows for cell in row]
    expect(any("HYPERLINK" in cell for cell in cells), "the formula is not there")
    expect(not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in cells), "a cell is a formula")
    return "its cells begin with an apostrophe"


PROMISES = (
    Promise("a site that lies", "sends a tensor of another shape", _malformed),
    Promise("a site that lies", "sends weights that are no numbers", _no_number),
    Promise("a site that lies", "sends half a message", _garbage),
    Promise("a site that lies", "sends its reply twice", _second_reply),
    Promise("a site that lies", "sends the reply of an earlier round again", _old_reply),
    Promise("a site that lies", "calls a class <script>…", _script),
    Promise("a site that lies", "puts control sequences of a terminal into a name", _control_sequence),
    Promise("a site that lies", "calls a class =HYPERLINK…", _formula),
)
