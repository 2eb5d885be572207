"""Describe events, messages and commands in words, for stories, transcripts and playbooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from railgun.engine.protocol.batch import Batch
from railgun.engine.protocol.frontier import LAST, MAX, MIN
from railgun.engine.protocol.rescale import messages as m
from railgun.hashing import Hashes
from verification.explorer import Step
from verification.rescale.rows import Rows


def story(steps: Iterable[Step]) -> list[str]:
    """Return the steps of an explored story, a line each."""
    lines = []
    for step in steps:
        if step.message is None:
            lines.append(f"  worker {step.node}: {step.event}")
        else:
            stage, message = step.message
            lines.append(
                f"  worker {step.node} gets {tell(message)} from {step.sender}, stage {stage}"
            )
    return lines


def tell(thing: m.Event | m.Message | m.Command) -> str:
    """Describe one event, message or command in a few words."""
    match thing:
        case m.Data(epoch, batch):
            return f"Data/{epoch} {rows(batch)}"
        case m.Forward(_, batch):
            return f"FWD {rows(batch)}"
        case m.Acquire(_, chunk, hashes, state):
            return f"Acquire chunk {chunk} {keys(hashes)} {compact(state)}".rstrip()
        case m.Local(batch):
            return f"local {rows(batch)}"
        case m.Process(batch):
            return f"process {rows(batch)}"
        case m.Received(sender, message):
            return f"{tell(message)} from {sender}"
        case m.Send(to, message):
            return f"→{to} {tell(message)}"
        case m.Collect(parts):
            return "collect " + ", ".join(f"{keys(hashes)} for {to}" for to, hashes in parts)
        case m.Collected(states):
            return f"collected {', '.join(map(compact, states))}"
        case m.Take(hashes, state):
            return f"take {keys(hashes)} {compact(state)}".rstrip()
        case m.Drop(hashes):
            return f"drop {keys(hashes)}"
        case m.Interrogated(named):
            return f"interrogated {keys(named.hashes)}"
        case m.Rescale(epoch, placement):
            return f"rescale/{epoch} to {workers(placement.workers)}"
        case m.Fence(stage, _, home, chunk, owners):
            return f"Fence {stage} of {home} chunk {chunk} for {workers(owners)}"
        case m.Fenced(_, home, chunk):
            return f"Fenced of {home} chunk {chunk}"
        case m.RaiseFence(fence) | m.PassFence(fence):
            word = "raise" if isinstance(thing, m.RaiseFence) else "pass"
            return f"{word} {tell(fence)}"
        case m.Confirm(to, stage, message):
            return f"→{to} stage {stage} {tell(message)}"
        case m.Flushed(_, origin):
            return f"Flushed({origin})"
        case m.Bar1(snapshot) | m.Bar2(snapshot):
            return f"{type(thing).__name__.upper()}({snapshot})"
        case m.Snapshot(snapshot):
            return f"take snapshot {snapshot}"
        case m.StartSnapshot(snapshot):
            return f"barrier {snapshot}"
        case m.Frontier(_, value) | m.Relay(_, value) | m.Emission(_, value):
            return f"{type(thing).__name__}({when(value)})"
        case m.Advanced(value) | m.Bound(value) | m.Advance(value):
            return f"{type(thing).__name__.lower()} {when(value)}"
        case m.Join(joining):
            return f"join {workers(joining)}"
        case m.Move(count):
            return f"move {count}"
        case m.Started(epoch) | m.Completed(epoch):
            return f"report {type(thing).__name__.lower()} {epoch}"
        case m.Left(worker):
            return f"report left {worker}"
        case m.Heard() | m.Done() | m.Flush() | m.Leave():
            return type(thing).__name__
        case m.Interrogate() | m.Depart():
            return type(thing).__name__.lower()
    raise TypeError(f"no words for {thing!r}")


def rows(batch: Batch) -> str:
    """Format records as key#number@origin."""
    if not isinstance(batch, Rows):
        return f"{len(batch)} records"
    return " ".join(f"k{item.key}#{item.seq}@{item.origin}" for item in batch.items)


def keys(hashes: Hashes) -> str:
    """Format keys by their names."""
    return "{" + " ".join(f"k{key}" for key in hashes.tolist()) + "}"


def workers(names: Iterable[int]) -> str:
    """Format a set of workers."""
    return "{" + " ".join(map(str, names)) + "}"


def when(value: int) -> str:
    """Format a time; the first and last times have names."""
    return {MIN: "MIN", MAX: "MAX", LAST: "LAST"}.get(value, str(value))


def compact(state: Any) -> str:
    """Format the model operators' state as key: origin×count."""
    if not isinstance(state, dict):
        return ""
    parts = []
    for key, (counts, *_) in sorted(state.items()):
        inner = " ".join(f"{count}@{origin}" for origin, count in sorted(counts.items()))
        parts.append(f"k{key}={inner}")
    return "[" + ", ".join(parts) + "]" if parts else ""
