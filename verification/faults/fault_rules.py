"""Check what clients see of faults: they leave a frozen node, and an orderly restart gives no errors.

Also: no error of a master that cannot write; reads, but no writes, at a node that is cut off.

Rules:

1. A fault is judged only if it was the only one: in a cluster of three nodes or more, so that the others are a quorum,
   and with no other fault from `AFTER_S` seconds before it (clients may still be moving) until its end.
2. While a node is frozen for `LONG_FREEZE_S` seconds or longer, each publisher that was connected to it gets a publish
   through, with IDs and without; each reader without a group gets a message that was published after the node froze,
   and so does each group with a member there, unless the group handed over and is still busy with older messages.
3. In an orderly restart of one node after the other no publish ends in an error, with an ID or without.
4. `acks=all` is ignored: such a publish waits while a node is down, and its publisher too. So is a publish that an
   impatient client (less than `PATIENT_S` seconds) gave up at its deadline: a busy machine is no fault.
5. While the master of a stream cannot write (`unwritable_master`), no publish fails with the error of its disk, and
   each stream that was written before takes a publish that begins and ends meanwhile, if the fault lasts for
   `LONG_REFUSAL_S`. The rules of the log check that no acknowledged message is lost.
6. A node that has been cut off for longer than writes wait for a master answers a reader, if it claims to have
   messages, and refuses a publish with `NO_MASTER` in less than `AT_ONCE_S`: it does not wait for a master. (`CutOff`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from verification.faults.anomalies import Findings
from verification.faults.history import Blown, CutOff, Delivery, Meta, Publish, Purged, Record

LONG_FREEZE_S: Final = 8.0
"""Seconds a freeze must last to be judged: longer than a client needs to leave a silent node."""
AFTER_S: Final = 4.0
CATCH_UP_S: Final = 4.0
"""Seconds before the thaw by which a message must be acknowledged, to be delivered before the thaw."""
PATIENT_S: Final = 15.0
LONG_REFUSAL_S: Final = 8.0
AT_ONCE_S: Final = 4.0
"""Seconds: less than a write waits for a master (5 s), and much more than an answer takes."""
OF_DISKS: Final = frozenset({"NO_SPACE", "STORAGE", "LOG_FAILED"})
TRIES: Final = 3
"""Publishes of a kind that show whether the kind works."""


def check_faults(records: Sequence[Record], findings: Findings) -> None:
    """Add to `findings` every anomaly of freezes, restarts, unwritable masters and cut-off nodes."""
    for record in records:
        if isinstance(record, CutOff):
            _check_cut_off(record, findings)
    meta = next((meta for meta in records if isinstance(meta, Meta)), None)
    blows = [blown for blown in records if isinstance(blown, Blown)]
    if meta is None or meta.nodes < 3 or not blows:
        return
    every = [publish for publish in records if isinstance(publish, Publish)]
    publishes = [publish for publish in every if publish.acks != "all"]
    purged = {purged.stream for purged in records if isinstance(purged, Purged)}
    # A reader of a purged stream may miss messages that were published meanwhile.
    deliveries = [
        delivery
        for delivery in records
        if isinstance(delivery, Delivery) and delivery.stream not in purged
    ]
    for blow in blows:
        if not _alone(blow, blows):
            continue
        if blow.fault == "freeze" and blow.end - blow.struck >= LONG_FREEZE_S:
            held = {
                p.client: p.begin for p in every if p.acks == "all" and p.begin < blow.end <= p.end
            }
            _check_freeze(blow, publishes, held, deliveries, findings)
        elif blow.fault == "rolling":
            _check_restart(blow, publishes, meta.patience_s, findings)
        elif blow.fault == "unwritable_master":
            _check_unwritable(blow, publishes, findings)


def _alone(blow: Blown, blows: Sequence[Blown]) -> bool:
    return all(
        other is blow or other.settled + AFTER_S < blow.begin or other.begin > blow.settled
        for other in blows
    )


# ---------------------------------------------------------------- masters that cannot write, minorities


def _check_unwritable(blow: Blown, publishes: Sequence[Publish], findings: Findings) -> None:
    for publish in publishes:
        if blow.begin <= publish.begin and publish.end <= blow.settled and publish.code in OF_DISKS:
            text = f"{publish.client} published {publish.value!r} to {publish.stream}, and was told {publish.code}"
            findings.add("disk_error", text, blow, publish)
    if blow.end - blow.struck < LONG_REFUSAL_S:
        return
    written = {
        publish.stream
        for publish in publishes
        if publish.outcome == "ok" and publish.end < blow.begin
    }
    for stream in sorted(written):
        during = [
            publish
            for publish in publishes
            if publish.stream == stream and blow.struck < publish.begin and publish.end < blow.end
        ]
        if not any(publish.outcome == "ok" for publish in during):
            text = f"{stream} took nothing while {', '.join(blow.nodes)} could not write"
            findings.add("stalled", text, blow, *during[:3])


def _check_cut_off(cut_off: CutOff, findings: Findings) -> None:
    if cut_off.end and not cut_off.read:
        where = f"{cut_off.node}, cut off, has {cut_off.end} messages of {cut_off.stream}"
        text = f"{where}, and showed none: {cut_off.text}"
        findings.add("minority_silent", text, cut_off)
    if cut_off.code != "NO_MASTER" or cut_off.publish_s >= AT_ONCE_S:
        answer = cut_off.code or "that it is stored"
        text = f"{cut_off.node}, cut off, told a publisher {answer} after {cut_off.publish_s:.1f} s"
        findings.add("minority_wrote", text, cut_off)


# ---------------------------------------------------------------- restarts


def _check_restart(
    blow: Blown, publishes: Sequence[Publish], patience_s: float, findings: Findings
) -> None:
    for publish in publishes:
        inside = blow.begin <= publish.begin and publish.end <= blow.settled
        if (
            not inside or publish.outcome == "ok" or not publish.code
        ):  # no code: the end of the run interrupted it
            continue
        if publish.end - publish.begin >= patience_s > 0 and patience_s < PATIENT_S:
            continue
        how = "with an ID" if publish.id is not None else "without an ID"
        text = f"{publish.client} published {publish.value!r} {how}, and was told {publish.code}"
        findings.add("restart_error", text, blow, publish)


# ---------------------------------------------------------------- freezes


def _check_freeze(
    blow: Blown,
    publishes: Sequence[Publish],
    held: dict[str, float],
    deliveries: Sequence[Delivery],
    findings: Findings,
) -> None:
    """Judge clients of a frozen node; `held`: since when a publish of each waits for all replicas, until the thaw."""
    during = [
        publish for publish in publishes if blow.struck < publish.begin and publish.end < blow.end
    ]
    _check_publishers(blow, publishes, during, held, findings)
    awaited = {
        publish.stream for publish in during if publish.safe and publish.end < blow.end - CATCH_UP_S
    }  # streams with new messages for consumers
    fresh = {
        (publish.stream, publish.value) for publish in publishes if publish.begin > blow.struck
    }
    _check_consumers(blow, deliveries, awaited, fresh, findings)


def _check_publishers(
    blow: Blown,
    publishes: Sequence[Publish],
    during: Sequence[Publish],
    held: dict[str, float],
    findings: Findings,
) -> None:
    working = {
        publish.client
        for publish in publishes
        if publish.outcome == "ok" and publish.end < blow.begin
    }
    for client in sorted(working & set(blow.clients)):
        own = [publish for publish in during if publish.client == client]
        lost = {publish.begin for publish in own}
        if client in held and len(lost) <= 1 and all(begin < held[client] for begin in lost):
            continue  # it had no chance to publish anything else; one publish may be lost with the frozen node
        where = f"{client}, connected to {', '.join(blow.nodes)} when it froze,"
        if not any(publish.outcome == "ok" for publish in own):
            findings.add("stranded", f"{where} published nothing before the thaw", blow, *own[:3])
            continue
        for how, attempts in (
            ("with an ID", [publish for publish in own if publish.id is not None]),
            ("without an ID", [publish for publish in own if publish.id is None]),
        ):
            tries = {publish.begin for publish in attempts}
            if len(tries) >= TRIES and not any(publish.outcome == "ok" for publish in attempts):
                text = f"{where} published nothing {how} before the thaw, in {len(tries)} tries"
                findings.add("stranded", text, blow, *attempts[:3])


def _check_consumers(
    blow: Blown,
    deliveries: Sequence[Delivery],
    awaited: set[str],
    fresh: set[tuple[str, str]],
    findings: Findings,
) -> None:
    """Judge each reader by itself, and each group as a whole: a group hands over."""
    judged: dict[tuple[str, str], str] = {}  # stream, and reader or group, of consumers at the node
    epochs: dict[tuple[str, str], int] = {}
    gone_on: set[tuple[str, str]] = set()
    for delivery in deliveries:
        key = (delivery.stream, f"group {delivery.group}" if delivery.group else delivery.consumer)
        if delivery.at < blow.begin:
            if delivery.consumer in blow.clients and delivery.stream in awaited:
                judged[key] = delivery.consumer
            epochs[key] = max(epochs.get(key, 0), delivery.epoch)
        elif blow.struck < delivery.at < blow.end and (
            (delivery.stream, delivery.value) in fresh
            or (delivery.exclusive and delivery.epoch > epochs.get(key, 0))
        ):
            gone_on.add(key)
    for key, consumer in judged.items():
        if key not in gone_on:
            stream, who = key
            text = (
                f"{who} got nothing new of {stream} before the thaw; "
                f"{consumer} was connected to {', '.join(blow.nodes)} when it froze"
            )
            findings.add("stranded", text, blow)
