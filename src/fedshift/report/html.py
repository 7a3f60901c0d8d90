"""Renders the templates of the page. Whatever they show is escaped, and made printable."""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import TYPE_CHECKING, Any

from fedshift.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **content: Any) -> str:
    """The template of this name with its variables filled in."""
    return environment().get_template(template).render(content)


def mark_trusted(html: str) -> Markup:
    """HTML that fedshift made itself, which is shown as it is."""
    from markupsafe import Markup

    return Markup(html)


@functools.cache
def environment() -> Environment:
    """The templates, beside this file. Jinja2 is imported when something is rendered, not before."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("fedshift.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable_text,
    )
    made.globals["script"] = mark_trusted(source("page.js"))
    made.globals["script_digest"] = base64.b64encode(hashlib.sha256(source("page.js").encode()).digest()).decode()
    return made


@functools.cache
def source(template: str) -> str:
    """A template's text as it is."""
    from importlib.resources import files

    return (files("fedshift.report") / "templates" / template).read_text(encoding="utf-8")


def _printable_text(value: Any) -> Any:
    """Plain text without control characters; a template's own HTML as it is."""
    return printable(value, keep="\n") if type(value) is str else value
