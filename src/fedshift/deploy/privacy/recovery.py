"""What a site lacks of its own records, and how a person there gives it up: what is not known counts as spent."""

from __future__ import annotations

from fedshift.deploy.chained_log import lines_of, objects_in
from fedshift.deploy.privacy.ledger import PrivacyLedger
from fedshift.deploy.remote.policy import RECOVERED, AuditLog, whole_number
from fedshift.deploy.site_file import SiteConfig
from fedshift.errors import FedshiftError


def lost_records(config: SiteConfig) -> list[str]:
    """What does not fit of a site's audit log, its ledger of privacy and its secret: a line each."""
    try:
        log = AuditLog(config.audit_log)
    except FedshiftError as error:
        return [str(error)]
    fault = PrivacyLedger(config.memory, config.file.site, config.file.privacy, log).fault()
    return [] if fault is None else [fault]


def recover_records(config: SiteConfig) -> list[str]:
    """Begin anew what does not fit, with all that can be read; the files of before keep another name.

    Returns:
        What was done, a line for each file; nothing if all fits.
    """
    done: list[str] = []
    answers, counted = list(objects_in(lines_of(config.audit_log))), 0
    try:
        log = AuditLog(config.audit_log)
    except FedshiftError:
        aside, counted = AuditLog.set_aside(config.audit_log)
        log = AuditLog(config.audit_log)
        done.append(f"audit log: {f'kept as {aside.name}, and ' if aside else ''}begun anew")
    ledger = PrivacyLedger(config.memory, config.file.site, config.file.privacy, log)
    if paid := ledger.recover(answers, counted):
        done.append(f"ledger of privacy: {'; '.join(paid)}; ε = {ledger.epsilon():.3g} in all")
    if done:
        rosters = max([log.rosters, *(whole_number(answer.get("rosters")) for answer in answers)])
        log.append(do=RECOVERED, done=done, rosters=rosters, ledger={"lines": ledger.lines()})
    return done
