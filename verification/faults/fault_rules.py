"""What clients must see of a fault: going on elsewhere while their node is frozen, no error of an orderly restart.

And: no error of a master that cannot write; readers, but no writes, at a node that is cut off.

Rules:

1. A fault is judged only where it was alone: in a cluster of three nodes or more, so that the others are a quorum, and
   with no other fault from `AFTER_S` seconds before it (clients may still be on their way) until it is over.
2. While a node is frozen for `LONG_FREEZE_S` seconds or longer, each publisher that was connected to it gets a publish
   through, with IDs and without; each reader without a group gets something that was published after the node froze,
   and so does each group with a member there, unless the group handed over and is still busy with older messages.
3. In an orderly restart of one node after the other no publish ends in an error, with an ID or without.
4. `acks=all` is passed over: it waits while a node is down, and its publisher with it. So is a publish that an
   impatient client (less than `PATIENT_S` seconds) gave up at its deadline: a busy machine is no fault.
5. While the master of a stream cannot write (`unwritable_master`), no publish is told what its disk says, and each
   stream that was written before takes a publish that begins and ends meanwhile, if it lasts for `LONG_REFUSAL_S`. That
   nothing acknowledged is lost is a rule of the log.
6. A node that has been cut off for longer than writes wait for a master answers a reader, if it says to have messages,
   and refuses a publish with `NO_MASTER` in less than `AT_ONCE_S`: it does not wait for a master. (`CutOff`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from verification.faults.anomalies import Findings
from verification.faults.history import Blown, CutOff, Delivery, Meta, Publish, Purged, Record

LONG_FREEZE_S: Final = 8.0
"""How long a freeze must last to be judged: longer than a client needs to leave a silent node."""
AFTER_S: Final = 4.0
CATCH_UP_S: Final = 4.0
"""How long before the thaw a message must have been acknowledged, to be delivered before the thaw."""
PATIENT_S: Final = 15.0
LONG_REFUSAL_S: Final = 8.0
AT_ONCE_S: Final = 4.0
"""Less than a write waits for a master (5 s), and much more than an answer takes."""
OF_DISKS: Final = frozenset({"NO_SPACE", "STORAGE", "LOG_FAILED"})
TRIES: Final = 3
"""Publishes of a kind that show whether the kind works."""


def check_faults(records: Sequence[Record], findings: Findings) -> None:
    """Add to `findings` what clients must not have seen of freezes and rolling restarts."""
    for told in records:
        if isinstance(told, CutOff):
            _check_cut_off(told, findings)
    meta = next((one for one in records if isinstance(one, Meta)), None)
    blows = [one for one in records if isinstance(one, Blown)]
    if meta is None or meta.nodes < 3 or not blows:
        return
    every = [one for one in records if isinstance(one, Publish)]
    publishes = [one for one in every if one.acks != "all"]
    purged = {one.stream for one in records if isinstance(one, Purged)}
    # Of purged streams a reader need not see what was published meanwhile.
    deliveries = [one for one in records if isinstance(one, Delivery) and one.stream not in purged]
    for blow in blows:
        if not _alone(blow, blows):
            continue
        if blow.fault == "freeze" and blow.end - blow.struck >= LONG_FREEZE_S:
            held = {p.client for p in every if p.acks == "all" and p.begin < blow.end <= p.end}
            _check_freeze(blow, publishes, held, deliveries, findings)
        elif blow.fault == "rolling":
            _check_restart(blow, publishes, meta.patience_s, findings)
        elif blow.fault == "unwritable_master":
            _check_unwritable(blow, publishes, findings)


def _alone(blow: Blown, blows: Sequence[Blown]) -> bool:
    return all(
        one is blow or one.settled + AFTER_S < blow.begin or one.begin > blow.settled
        for one in blows
    )


# ---------------------------------------------------------------- masters that cannot write, minorities


def _check_unwritable(blow: Blown, publishes: Sequence[Publish], findings: Findings) -> None:
    for one in publishes:
        if blow.begin <= one.begin and one.end <= blow.settled and one.code in OF_DISKS:
            text = f"{one.client} published {one.value!r} to {one.stream}, and was told {one.code}"
            findings.add("disk_error", text, blow, one)
    if blow.end - blow.struck < LONG_REFUSAL_S:
        return
    written = {one.stream for one in publishes if one.outcome == "ok" and one.end < blow.begin}
    for stream in sorted(written):
        during = [
            one
            for one in publishes
            if one.stream == stream and blow.struck < one.begin and one.end < blow.end
        ]
        if not any(one.outcome == "ok" for one in during):
            text = f"{stream} took nothing while {', '.join(blow.nodes)} could not write"
            findings.add("stalled", text, blow, *during[:3])


def _check_cut_off(told: CutOff, findings: Findings) -> None:
    if told.end and not told.read:
        text = f"{told.node}, cut off, has {told.end} messages of {told.stream}, and showed none: {told.text}"
        findings.add("minority_silent", text, told)
    if told.code != "NO_MASTER" or told.publish_s >= AT_ONCE_S:
        answer = told.code or "that it is stored"
        text = f"{told.node}, cut off, told a publisher {answer} after {told.publish_s:.1f} s"
        findings.add("minority_wrote", text, told)


# ---------------------------------------------------------------- restarts


def _check_restart(
    blow: Blown, publishes: Sequence[Publish], patience_s: float, findings: Findings
) -> None:
    for one in publishes:
        inside = blow.begin <= one.begin and one.end <= blow.settled
        if not inside or one.outcome == "ok" or not one.code:  # no code: it was ended with the run
            continue
        if one.end - one.begin >= patience_s > 0 and patience_s < PATIENT_S:
            continue
        how = "with an ID" if one.id is not None else "without an ID"
        text = f"{one.client} published {one.value!r} {how}, and was told {one.code}"
        findings.add("restart_error", text, blow, one)


# ---------------------------------------------------------------- freezes


def _check_freeze(
    blow: Blown,
    publishes: Sequence[Publish],
    held: set[str],
    deliveries: Sequence[Delivery],
    findings: Findings,
) -> None:
    """Judge clients of a frozen node; `held`: those whose publish waits for all replicas until the thaw."""
    during = [one for one in publishes if blow.struck < one.begin and one.end < blow.end]
    _check_publishers(blow, publishes, during, held, findings)
    awaited = {
        one.stream for one in during if one.safe and one.end < blow.end - CATCH_UP_S
    }  # streams that have something new for consumers
    fresh = {(one.stream, one.value) for one in publishes if one.begin > blow.struck}
    _check_consumers(blow, deliveries, awaited, fresh, findings)


def _check_publishers(
    blow: Blown,
    publishes: Sequence[Publish],
    during: Sequence[Publish],
    held: set[str],
    findings: Findings,
) -> None:
    working = {one.client for one in publishes if one.outcome == "ok" and one.end < blow.begin}
    for client in sorted(working & set(blow.clients)):
        own = [one for one in during if one.client == client]
        if not own and client in held:
            continue  # it had no chance to publish anything else
        where = f"{client}, connected to {', '.join(blow.nodes)} when it froze,"
        if not any(one.outcome == "ok" for one in own):
            findings.add("stranded", f"{where} published nothing before the thaw", blow, *own[:3])
            continue
        for how, some in (
            ("with an ID", [one for one in own if one.id is not None]),
            ("without an ID", [one for one in own if one.id is None]),
        ):
            tries = {one.begin for one in some}
            if len(tries) >= TRIES and not any(one.outcome == "ok" for one in some):
                text = f"{where} published nothing {how} before the thaw, in {len(tries)} tries"
                findings.add("stranded", text, blow, *some[:3])


def _check_consumers(
    blow: Blown,
    deliveries: Sequence[Delivery],
    awaited: set[str],
    fresh: set[tuple[str, str]],
    findings: Findings,
) -> None:
    """Judge each reader by itself, and each group as a whole: a group hands over."""
    judged: dict[tuple[str, str], str] = {}  # stream, and reader or group, of those that were there
    epochs: dict[tuple[str, str], int] = {}
    gone_on: set[tuple[str, str]] = set()
    for one in deliveries:
        key = (one.stream, f"group {one.group}" if one.group else one.consumer)
        if one.at < blow.begin:
            if one.consumer in blow.clients and one.stream in awaited:
                judged[key] = one.consumer
            epochs[key] = max(epochs.get(key, 0), one.epoch)
        elif blow.struck < one.at < blow.end and (
            (one.stream, one.value) in fresh or (one.exclusive and one.epoch > epochs.get(key, 0))
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
