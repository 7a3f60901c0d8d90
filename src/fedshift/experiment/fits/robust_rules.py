"""Robust aggregation."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.experiment.protocols.base import Roles
from fedshift.methods.base import Method
from fedshift.methods.robust import Rule


def fits(about: About, method: Method) -> None:
    """Check that a rule can work on the replies of the sites that are asked, and of those that a quorum leaves."""
    rule = method.robust
    if rule is not None:
        for roles in about.roles:
            try:
                _check(rule, method, roles, about)
            except UserError as error:
                raise UserError(f"methods: {method.display}: robust.{error}") from None


def _check(rule: Rule, method: Method, roles: Roles, about: About) -> None:
    sources, others = roles
    rule.check_sources(sources)
    for averaged in method.traits.averages.values():
        asked = (about.drawn or len(sources)) if averaged.at == "sources" else len(others)
        rule.check(asked)
        if about.engine.quorum is not None:
            _check_with_quorum(rule, asked, about.engine.quorum)


def _check_with_quorum(rule: Rule, asked: int, quorum: int) -> None:
    try:
        rule.check(min(quorum, asked))
    except UserError as error:
        raise UserError(f"{error}, or raise engine.quorum, which is {quorum}") from None
