"""Check what a program can check of the prose and the names in code: `python -m verification.style [PATH ...]`.

Rules:

1. `docstring`: the docstring of a public function or method begins with a verb, not with a pronoun, a question word or
   an article, and says more than the name. Properties, overloads and `__special__` methods are not checked.
2. `unit`: a constant with a number has its unit in its name (`RETRY_PAUSE_S`, `MAX_FRAME_BYTES`), not only in the
   comment or docstring beside it.
3. `vague-name`: no variable is called `found`, `told`, `one`, … Fields of classes are not checked: they may be stored.

With paths, the program checks these files and folders, prints every finding as `file:line: rule: message`, and exits
with code 1 if there is any.

Without paths, it checks `src/railgun` against `style_debt.txt`, which has a line `package rule count` for the findings
that are still allowed. More findings of a rule in a package fail. Fewer do not: `--write` then lowers the count. It
never raises one.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CHECKED: Final = ROOT / "src" / "railgun"
DEBT: Final = Path(__file__).with_name("style_debt.txt")

WRONG_OPENINGS: Final = frozenset({
    "what", "who", "which", "how", "where", "whether", "one", "it", "there", "all", "nothing", "none", "only",
    "a", "an", "the",
})  # fmt: skip
MIN_DOCSTRING_WORDS: Final = 4
VAGUE_NAMES: Final = frozenset({
    "told", "found", "one", "made", "asked", "said", "given", "known", "some", "other", "thing",
})  # fmt: skip
SKIPPED_DECORATORS: Final = frozenset(
    {"property", "cached_property", "setter", "deleter", "overload"}
)

MEASURES: Final = re.compile(
    r"\b(seconds?|milliseconds?|microseconds?|nanoseconds?|ms|µs|minutes?|hours?|days?"
    r"|bytes?|[kmg]i?b)\b",
    re.IGNORECASE,
)
"""Units of time and size: a comment that has one anywhere gives the unit of its constant."""
COUNTED: Final = (
    "messages", "records", "rows", "lines", "keys", "entries", "batches", "frames", "transactions", "characters",
    "events", "items", "entities", "commands", "tasks", "streams", "workers", "nodes", "connections",
)  # fmt: skip
COUNTS: Final = re.compile(rf"^\W*(?:\w+\W+){{0,2}}({'|'.join(COUNTED)})\b", re.IGNORECASE)
"""Nouns that are counted: only at the beginning of a comment do they give the unit of its constant."""
UNITS_IN_NAMES: Final = frozenset({
    "S", "MS", "US", "NS", "SECONDS", "MINUTES", "HOURS", "DAYS", "BYTES", "BITS", "KIB", "MIB", "GIB", "CHARS",
    *map(str.upper, COUNTED),
})  # fmt: skip
NUMBERS_WITHOUT_UNIT: Final = frozenset({
    "VERSION", "PORT", "CODE", "STATUS", "FORMAT", "MAGIC", "SEED", "RATIO", "SHARE", "FACTOR", "DIVISOR",
})  # fmt: skip
"""Words in names of constants that are numbers and no quantities."""

_CONSTANT: Final = re.compile(r"_*[A-Z][A-Z0-9_]*")
_WORD: Final = re.compile(r"[\w'-]+")

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.rule}: {self.message}"


def check_text(text: str, path: Path = Path("text.py")) -> list[Finding]:
    """Return the findings in the source text of a module, ordered by line.

    >>> for finding in check_text("PAUSE = 2.0  # seconds"): print(finding)
    text.py:1: unit: PAUSE is in seconds: say so in the name
    """
    tree = ast.parse(text)
    findings = [
        Finding(path, line, rule, message)
        for rule, places in (
            ("docstring", _docstrings(tree)),
            ("unit", _constants(tree, _comments(text))),
            ("vague-name", _variables(tree)),
        )
        for line, message in places
    ]
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def check_paths(paths: Sequence[Path]) -> list[Finding]:
    """Return the findings in files, and in the Python files below folders."""
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
        if not file.name.endswith("_pb2.py")
    ]
    return [finding for file in files for finding in check_text(file.read_text("utf-8"), file)]


# ---------------------------------------------------------------- docstrings


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for definition in _public_functions(tree.body):
        docstring = ast.get_docstring(definition)
        if docstring is None:  # ruff says where one is missing
            continue
        problem = docstring_problem(definition.name, docstring)
        if problem:
            yield definition.body[0].lineno, f"{definition.name}: {problem}"


def _public_functions(body: Sequence[ast.stmt]) -> Iterator[Definition]:
    for statement in body:
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
            yield from _public_functions(statement.body)
        elif (
            isinstance(statement, Definition)
            and not statement.name.startswith("_")
            and not SKIPPED_DECORATORS & {_last_name(each) for each in statement.decorator_list}
        ):
            yield statement


def _last_name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""


def docstring_problem(name: str, docstring: str) -> str:
    """Return why the docstring of a function with this name is a bad one, or an empty text.

    >>> docstring_problem("parse", "What a line says.")
    "begins with 'What', not with a verb"
    >>> docstring_problem("close", "Leave it."), docstring_problem("close", "Close the connection to the node.")
    ('says too little: Leave it.', '')
    """
    summary = " ".join(docstring.split("\n\n")[0].split())
    words = _WORD.findall(summary)
    if words and words[0].lower() in WRONG_OPENINGS:
        return f"begins with {words[0]!r}, not with a verb"
    name_words = {word.lower() for word in name.split("_") if word}
    is_short = len(words) < MIN_DOCSTRING_WORDS and len(name_words) < MIN_DOCSTRING_WORDS
    if is_short or {word.lower() for word in words} <= name_words:
        return f"says too little: {summary}"
    return ""


# ---------------------------------------------------------------- constants


def _comments(text: str) -> dict[int, str]:
    """Return the comment on each line that has one; a comment on a line of its own begins with `#`."""
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            comments[token.start[0]] = token.string if alone else token.string.lstrip("# ")
    return comments


def _constants(tree: ast.Module, comments: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for body in bodies:
        for statement, following in zip(body, [*body[1:], None], strict=True):
            name = _number_named(statement)
            if name is None:
                continue
            words = set(name.strip("_").split("_"))
            if words & UNITS_IN_NAMES or words & NUMBERS_WITHOUT_UNIT:
                continue
            unit = _unit_in(_text_beside(statement, following, comments))
            if unit:
                yield statement.lineno, f"{name} is in {unit}: say so in the name"


def _number_named(statement: ast.stmt) -> str | None:
    """Return the name of the constant that a statement sets to a number; None if it sets none."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        return None
    if not isinstance(target, ast.Name) or not _CONSTANT.fullmatch(target.id):
        return None
    return target.id if _is_number(value) else None


def _is_number(value: ast.expr) -> bool:
    """Return whether an expression is a number, or arithmetic with numbers and other constants."""
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            sides = [side for side in (left, right) if not isinstance(side, ast.Name)]
            return bool(sides) and all(map(_is_number, sides))
    return False


def _text_beside(
    statement: ast.stmt, following: ast.stmt | None, comments: Mapping[int, str]
) -> list[str]:
    """Return the comments on the lines of a statement, the comment above it, and the docstring below it."""
    end = statement.end_lineno or statement.lineno
    texts = [comments[line] for line in range(statement.lineno, end + 1) if line in comments]
    above: list[str] = []
    line = statement.lineno - 1
    while comments.get(line, "").startswith("#"):
        above.insert(0, comments[line].lstrip("# "))
        line -= 1
    texts.append(" ".join(above))
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        texts.append(str(following.value.value))
    return texts


def _unit_in(texts: Sequence[str]) -> str:
    for text in texts:
        match = MEASURES.search(text) or COUNTS.match(text)
        if match:
            return match[1].lower()
    return ""


# ---------------------------------------------------------------- variables


def _variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        name = _assigned(node)
        if name in VAGUE_NAMES and node not in fields:
            line = getattr(node, "lineno", 0)
            yield line, f"variable {name!r} does not say what it is"


def _assigned(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.MatchMapping(rest=name):
            return name
        case ast.ExceptHandler(name=name):
            return name
    return None


# ---------------------------------------------------------------- allowed findings

Counts = dict[tuple[str, str], int]
"""Numbers of findings by package and rule."""


def count(findings: Sequence[Finding], root: Path) -> Counts:
    """Count findings by package, the folder below `root` or `railgun` itself, and by rule."""
    return dict(Counter((_package(finding.path, root), finding.rule) for finding in findings))


def _package(path: Path, root: Path) -> str:
    folders = path.relative_to(root).parts[:-1]
    return ".".join((root.name, *folders[:1]))


def read_debt(text: str) -> Counts:
    """Parse the lines `package rule count` of the allowed findings.

    >>> read_debt("railgun.cli unit 2")
    {('railgun.cli', 'unit'): 2}
    """
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {(package, rule): int(allowed) for package, rule, allowed in rows}


def write_debt(counts: Counts) -> str:
    """Return the text of the allowed findings, which `read_debt` parses."""
    head = "# Findings of verification/style.py that are still allowed: package, rule, count.\n"
    rows = sorted(counts.items())
    return head + "".join(
        f"{package} {rule} {number}\n" for (package, rule), number in rows if number
    )


def lowered(allowed: Counts, counts: Counts) -> Counts:
    """Return the allowed counts, lowered to the actual ones, but never raised.

    >>> lowered({("a", "unit"): 5, ("b", "unit"): 1}, {("a", "unit"): 2, ("b", "unit"): 4})
    {('a', 'unit'): 2, ('b', 'unit'): 1}
    """
    return {key: min(number, counts.get(key, 0)) for key, number in allowed.items()}


def against_debt(findings: Sequence[Finding], allowed: Counts, root: Path) -> list[str]:
    """Return the lines to print for the packages and rules with more findings than allowed."""
    lines = []
    for key, number in sorted(count(findings, root).items()):
        limit = allowed.get(key, 0)
        if number > limit:
            lines += [
                str(finding)
                for finding in findings
                if (_package(finding.path, root), finding.rule) == key
            ]
            lines.append(f"{key[0]}: {number} findings of {key[1]}, and {limit} are allowed")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run the check with the arguments of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m verification.style", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="file or folder")
    parser.add_argument("--write", action="store_true", help="lower the allowed counts")
    options = parser.parse_args(argv)
    if options.paths:
        findings = check_paths([path.resolve() for path in options.paths])
        for finding in findings:
            print(finding)
        return 1 if findings else 0
    findings = check_paths([CHECKED])
    counts = count(findings, CHECKED)
    if options.write:
        allowed = lowered(read_debt(DEBT.read_text()), counts) if DEBT.exists() else counts
        DEBT.write_text(write_debt(allowed))
    allowed = read_debt(DEBT.read_text()) if DEBT.exists() else {}
    lines = against_debt(findings, allowed, CHECKED)
    for line in lines:
        print(line)
    if lines:
        return 1
    if lowered(allowed, counts) != allowed:
        spare = sum(allowed.values()) - len(findings)
        print(
            f"style: {spare} findings fewer than {DEBT.name} allows: "
            "lower it with ./run python -m verification.style --write"
        )
    print(f"style: {len(findings)} findings in {CHECKED.relative_to(ROOT)}, all allowed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
