"""`./run docs`: generate the parts of docs/ that come from the code, so that both agree.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. A test generates all of them again and
compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.phase import TRANSITIONS
from verification.rescale.mutants import MUTANTS
from verification.rescale.seed_rules import HOLES, story_of

DOCS = Path(__file__).parents[1] / "docs"
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def phases() -> str:
    """Return the diagram of a home's phases, from the table of transitions."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> normal"]
    lines += [f"    {before} --> {after}: {why}" for (before, why), after in TRANSITIONS.items()]
    return "\n".join([*lines, "```"])


def messages() -> str:
    """Return the table of messages between workers, from their classes."""
    lines = ["| message | meaning |", "|---|---|"]
    for kind in m.Message.__args__:
        meaning = (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{kind.__name__}` | {meaning} |")
    return "\n".join(lines)


def holes() -> str:
    """Return the holes of the original rules, each with the shortest story that the explorer finds."""
    lines = []
    for name, hole in HOLES.items():
        exploration = hole.find()
        lines += [f"**{name.capitalize()}**: {hole.meaning}. ({hole.scenario})", "", "```text"]
        lines += story_of(exploration.story)
        lines += [f"→ {exploration.violation}", "```", ""]
    return "\n".join(lines).rstrip()


def mutants() -> str:
    """Return the table of mutants, and where each shows its fault."""
    lines = ["| one rule changed | looked at with |", "|---|---|"]
    lines += [f"| {name} | {look_at} |" for name, (_, look_at) in MUTANTS.items()]
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "phases": phases,
    "messages": messages,
    "holes": holes,
    "mutants": mutants,
}


def renew(text: str) -> str:
    """Return a page with its generated parts made anew."""
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}", text)


def main() -> int:
    """Write the generated parts of all pages."""
    for path in sorted(DOCS.rglob("*.md")):
        old = path.read_text()
        new = renew(old)
        if new != old:
            path.write_text(new)
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
