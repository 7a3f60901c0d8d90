"""What a site that lies tries at the coordinator, and at those who read the results."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fedshift.deploy.playground.in_process import rehearse
from fedshift.deploy.playground.played import Played
from fedshift.deploy.playground.promise import Promise, expect
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Body, Message, body_of, narrowed, seal, unseal
from fedshift.experiment.predict import load_model
from fedshift.federation.messages import encode
from fedshift.report.collect import collect
from fedshift.report.page import page
from fedshift.text import csv_text
from fedshift.weights import Weights

LIAR = "north"
Spoil = Callable[[Message], Message | list[Message]]


def _spoiled(played: Played, name: str, spoil: Spoil, do: str = "call", **engine: Any) -> str:
    """The liar spoils its replies; the other site goes on, and the coordinator says who it was."""

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost | list[Message]:
        if site == LIAR and header["do"] == do and isinstance(answer, Message):
            return spoil(answer)
        return answer

    events = rehearse(played, name, change, experiment={"engine": engine})
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


def _saying(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Spoil:
    """``change`` is given the header of an answer and its content."""

    def spoil(answer: Message) -> Message:
        header, content, _ = unseal(answer)
        change(header, content)
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


def _too_far(played: Played) -> str:
    far = _with_weights(lambda weights: weights.merge({k: v * 1e6 for k, v in weights.items()}))
    return _spoiled(played, "far", far)


def _too_much_work(played: Played) -> str:
    return _spoiled(played, "work", _saying(lambda header, _: header.update(mini_batches=10**6)))


def _too_many_samples(played: Played) -> str:
    return _spoiled(played, "samples", _saying(lambda _, content: content.update(samples=10**6)))


def _forged_refusal(played: Played) -> str:
    other = next(site for site in played.sites if site != LIAR)
    forged = {"error": "KindRefused", "message": f"site '{other}' refuses to send weights"}
    return _spoiled(played, "forged", _saying(lambda header, _: header.update(forged)))


def _impossible_accuracy(played: Played) -> str:
    return _spoiled(
        played, "accuracy", _saying(lambda header, _: header["measures"].update(accuracy=1e9)), do="measure"
    )


def _expanding(played: Played) -> str:
    """Rounded weights whose manifest says that they are a tensor of 4 GB."""

    def expanding(answer: Message) -> Message:
        header, content, _ = unseal(answer)
        crossing, _ = narrowed({"weights": content["weights"]}, "int8")
        packed = {"weights": [["a", "torch.float32", [10**9]]]}
        data = encode({**content, **crossing}, {"packed": packed})
        return seal(header, Body(data, hashlib.sha256(data).hexdigest(), {}))

    return _spoiled(played, "expanding", expanding, wire="int8")


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
    Promise("a site that lies", "sends weights so large that everybody diverges", _too_far),
    Promise("a site that lies", "claims work that it cannot have done", _too_much_work),
    Promise("a site that lies", "claims more samples than it has", _too_many_samples),
    Promise("a site that lies", "forges a refusal of another site", _forged_refusal),
    Promise("a site that lies", "reports an impossible accuracy", _impossible_accuracy),
    Promise("a site that lies", "sends a small message that expands to gigabytes", _expanding),
    Promise("a site that lies", "sends half a message", _garbage),
    Promise("a site that lies", "sends its reply twice", _second_reply),
    Promise("a site that lies", "sends the reply of an earlier round again", _old_reply),
    Promise("a site that lies", "calls a class <script>…", _script),
    Promise("a site that lies", "puts control sequences of a terminal into a name", _control_sequence),
    Promise("a site that lies", "calls a class =HYPERLINK…", _formula),
)
