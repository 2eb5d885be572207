"""What is named if user code raises, is interrupted, ends its process or hangs: step, function and record or key.

A process that ends leaves its breadcrumb, and what is told of one that hangs is read from outside. Both are looked at
from inside the call here, so no process has to end, and nothing depends on time.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from railgun import (
    Collect,
    Flow,
    Items,
    Place,
    Reader,
    Sink,
    Source,
    Stateful,
    TwoPhaseSink,
    TwoPhaseWriter,
    Writer,
)
from railgun.engine.operators import calls
from railgun.engine.worker.breadcrumb import Breadcrumb, left_behind
from railgun.engine.worker.liveness import describe_position
from railgun.engine.worker.spec import WorkerSpec
from railgun.errors import RailgunError
from railgun.flows.errors import StepError
from railgun.testing import FlowTester
from railgun.testing.disks import SimulatedDisk

SPEC = WorkerSpec("job", 3, 7, "127.0.0.1", 1, b"secret")
BAD = 7
Act = Callable[[], None]
act: Act = lambda: None  # noqa: E731 - what the hook does
hook = ""  # which one is to misbehave


saving = threading.Event()  # set when a snapshot is taken
ending = threading.Event()  # set when the source is to end


def at(name: str, record: Any = BAD) -> None:
    if name == hook and record == BAD:
        act()


class Key:
    def __init__(self, number: int) -> None:
        self.number = number

    def __stable_key__(self) -> int:
        at("__stable_key__", self.number)
        return self.number

    def __eq__(self, other: object) -> bool:
        at("__eq__", self.number)
        return isinstance(other, Key) and other.number == self.number

    def __hash__(self) -> int:
        at("__hash__", self.number)
        return self.number

    def __reduce__(self) -> Any:
        at("key __reduce__", self.number)
        return Key, (self.number,)

    def __repr__(self) -> str:
        return f"Key({self.number})"


class Counted:
    """A state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        at("state __reduce__")
        if saving.is_set():
            at("saved __reduce__", self.number)
        return Counted, (self.number,)


class Item:
    """A record that travels."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        at("record __reduce__", self.number)
        return load_item, (self.number,)

    def __repr__(self) -> str:
        return f"Item({self.number})"


def load_item(number: int) -> Item:
    at("record unpickled", number)
    return Item(number)


class Numbers(Source[int]):
    def partitions(self) -> Sequence[str]:
        at("partitions")
        return ["part"]

    def open(self, partition: str, position: Any) -> Reader[int]:
        at("open")
        return NumbersReader()


class NumbersReader(Reader[int]):
    position: int | None = None

    def read(self, most: int, now: int) -> list[int] | None:
        at("read", self.position)
        if self.position == BAD:
            return None if ending.is_set() else []
        self.position = BAD
        return list(range(10))

    def close(self) -> None:
        at("reader close")


class Logic(Stateful[Any, Any, Any, Any]):
    def initial(self) -> Counted:
        at("initial")
        return Counted(-1)

    def on_item(self, item: Item, context: Any) -> list[Item]:
        at("on_item", item.number)
        context.state = Counted(item.number)
        context.set_timer(5_000_000 + item.number)
        return [item]

    def on_timer(self, context: Any) -> None:
        at("on_timer", context.key.number)

    def on_end(self, context: Any) -> None:
        at("on_end", context.key.number)


class Out(Sink[Any]):
    def open(self, place: Place) -> Writer[Any]:
        at("sink open")
        return OutWriter()


class OutWriter(Writer[Any]):
    def write(self, items: Sequence[Any]) -> None:
        at("write")

    def flush(self) -> None:
        at("flush")

    def close(self) -> None:
        at("close")


class Parcels(TwoPhaseSink[Any]):
    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        return ParcelWriter()

    def commit(self, token: Any) -> None:
        at("commit")

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Any]) -> None:
        at("recover", BAD if tokens else None)


class ParcelWriter(TwoPhaseWriter[Any]):
    def write(self, items: Sequence[Any]) -> None:
        pass

    def prepare(self, snapshot: int) -> str:
        at("prepare")
        return (
            f"parcel {snapshot}"  # two writers, one token: no two calls in these tests differ by it
        )


def same(name: str) -> Callable[[int], int]:
    def function(item: int) -> int:
        at(name, item)
        return item

    function.__qualname__ = name
    return function


def kept(item: int) -> bool:
    at("filter", item)
    return True


def several(item: int) -> list[int]:
    at("flat_map", item)
    return [item]


def many(items: list[int]) -> list[int]:
    at("map_batches")
    return items


def key_of(item: int) -> Key:
    at("key_by", item)
    return Key(item)


def time_of(item: int) -> int:
    at("time", item)
    return 1_000_000 + item


def upgraded(state: Any) -> Any:
    at("upgrade", state.number)
    return state


def flow_of(*upgrades: Callable[[Any], Any]) -> Flow:
    flow = Flow("named")
    numbers = flow.source(Numbers(), name="numbers", time=time_of)
    mapped = numbers.map(same("map"), name="mapped").filter(kept, name="filtered")
    made = mapped.flat_map(several, name="spread").map_batches(many, name="batched")
    keyed = made.key_by(key_of, Item, name="keyed")
    results = keyed.stateful(Logic(), name="logic", upgrades=upgrades)
    results.sink(Out(), name="out")
    results.sink(Parcels(), name="parcels")
    return flow


BATCH = "in a batch of 10 records that begins with 0"
ITEMS = "records that begins with <Item>"
RECORD = f"for the record {BAD}"
ITEM = f"for the record Item({BAD}) of key Key({BAD})"
TEN = "for 10 records that begin with 0"
TIMERS = "for keys that begin with the key <Key> at time"
KEYS = "for 10 keys that begin with <Key>"
HASHING = "__stable_key__ or __hash__ of keys of key_of"


@dataclass(frozen=True)
class Named:
    """What is named of a call: the step, the function and what the function was called for."""

    step: str
    function: str
    lost: str = ""
    """If the process ends."""
    now: str = ""
    """If it hangs, or is interrupted; empty: the same."""
    again: str = ""
    """If the process ends a second time; empty: as in a hang."""
    raised: str = ""
    """If it raises, and that is told in other words."""
    interrupted: str = ""
    """If it is interrupted, and more is known than of a hang."""


TABLE = {
    "partitions": Named("numbers", "Numbers.partitions"),
    "open": Named("numbers", "Numbers.open", "for part 'part' at its beginning"),
    "read": Named("numbers", "Numbers.read", f"for part 'part' at position {BAD}"),
    "reader close": Named("numbers", "Numbers.close", f"for part 'part' at position {BAD}"),
    "time": Named("numbers", "time_of", BATCH, RECORD),
    "map": Named("mapped", "map", BATCH, RECORD),
    "filter": Named("filtered", "kept", BATCH, RECORD),
    "flat_map": Named("spread", "several", BATCH, RECORD),
    "map_batches": Named("batched", "many", BATCH, raised="for the record [0, 1, 2,"),
    "key_by": Named("keyed", "key_of", BATCH, RECORD),
    "__stable_key__": Named("keyed", HASHING, TEN, RECORD, raised=f"Key.__stable_key__ raised {RECORD}\n"),
    "__hash__": Named("keyed", HASHING, TEN, RECORD, raised=f"Key.__hash__ raised {RECORD}\n"),
    "on_item": Named("logic", "Logic.on_item", ITEMS, ITEM),
    "initial": Named("logic", "Logic.initial", ITEMS, "for the record Item("),
    "on_timer": Named("logic", "Logic.on_timer", TIMERS, f"for the key Key({BAD}) at time 5000007"),
    "on_end": Named("logic", "Logic.on_end", TIMERS, f"for the key Key({BAD}) at time "),
    "state __reduce__": Named(
        "logic", "pickle of state", "for the key <Key>", raised="the state of key Key("
    ),
    "saved __reduce__": Named(
        "logic", "pickle of state", KEYS,
        again="for the key <Key>", raised="Key(7)", interrupted="for the key Key(7)",
    ),
    "upgrade": Named("logic", "upgraded", " keys that begin with <Key>", "for the key Key(", raised="of key Key("),
    "record __reduce__": Named(
        "keyed", "pickle of records", " records that begin with <Item>",
        again="for the record <Item>", raised=f"a record of key Key({BAD}) cannot be sent",
        interrupted=f"for the record Item({BAD})",
    ),
    "record unpickled": Named("keyed", "unpickle of records", raised=f"Key({BAD})"),
    "sink open": Named("out", "Out.open"),
    "write": Named("out", "Out.write", " items that begin with <Item>", raised="items that begin with Item("),
    "flush": Named("out", "Out.flush"),
    "close": Named("out", "Out.close"),
    "prepare": Named("parcels", "Parcels.prepare"),
    "commit": Named("parcels", "Parcels.commit", "for the token 'parcel 1'"),
    "recover": Named("parcels", "Parcels.recover", "for the token 'parcel 1'"),
}  # fmt: skip
"""By the hook that misbehaves."""


def shown(text: str) -> str:
    """What a breadcrumb shows of a text: of objects of users only their types."""
    return re.sub(r"(Item|Key)\((\d+\))?", r"<\1>", text)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    global act, hook
    saving.clear()
    yield
    act, hook = (lambda: None), ""


def run_all() -> None:
    """Run the flow so that every hook is called: with a snapshot, which is loaded into a later form."""
    disk = SimulatedDisk()
    ending.clear()
    tester = FlowTester(flow_of(), workers=1 if hook == "saved __reduce__" else 2, snapshots=disk)
    tester.settle()
    saving.set()
    tester.snapshot()
    if hook in ("upgrade", "recover"):
        assert tester.world.keeper is not None
        tester.world.keeper.release()
        FlowTester(flow_of(upgraded), workers=1, snapshots=disk).settle()
    ending.set()
    tester.finish()


def told_when(name: str, do: Act) -> BaseException:
    global act, hook
    act, hook = do, name
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - a KeyboardInterrupt too  # noqa: PT011 - a KeyboardInterrupt too
        run_all()
    return caught.value


def check(text: str, step: str, which: str) -> None:
    assert "None" not in text.partition("Traceback")[0]
    assert f"{step!r}" in text
    assert which in text


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("error", [LookupError("no"), SystemExit(3)], ids=["raise", "sys.exit"])
def test_what_user_code_raises_is_named(name: str, error: BaseException) -> None:
    def do() -> None:
        raise error

    named = TABLE[name]
    found = told_when(name, do)
    assert isinstance(found, RailgunError)
    check(str(found), named.step, named.raised or named.now or named.lost)
    if not named.raised:
        assert named.function in str(found)


@pytest.mark.parametrize("name", ["__stable_key__", "__hash__"])
@pytest.mark.parametrize(
    "error",
    [ValueError("boom"), ZeroDivisionError("boom"), StopIteration("boom"), KeyError("boom")],
)
@pytest.mark.parametrize("key", [Key, lambda item: (Key(item), 1)], ids=["alone", "in a tuple"])
def test_what_a_key_raises_is_told_as_itself(
    name: str, error: Exception, key: Callable[[int], Any]
) -> None:
    global act, hook

    def do() -> None:
        raise error

    def keys_of(on_error: Literal["stop", "dead_letter"]) -> FlowTester:
        flow = Flow("keys", dead_letters=Collect())
        made = flow.source(Items(range(10)), name="numbers").key_by(
            key, name="keyed", on_error=on_error
        )
        made.reduce(max).sink(Collect(), name="out")
        return FlowTester(flow)

    act, hook = do, name
    with pytest.raises(StepError) as caught:
        keys_of("stop").finish()
    assert caught.value.__cause__ is error
    assert (caught.value.step, caught.value.function) == ("keyed", f"Key.{name}")
    assert caught.value.record == str(BAD)
    assert "Traceback" in caught.value.cause
    assert "in do" in caught.value.cause
    assert repr(error).partition("(")[0] + ": " in caught.value.cause
    assert "cannot be a key" not in str(caught.value)
    tester = keys_of("dead_letter")
    tester.finish()
    (letter,) = tester.dead_letters
    assert (letter.step, letter.record, letter.error) == ("keyed", BAD, repr(error))
    assert len(tester.collected("out")) == 9


@pytest.mark.parametrize("name", TABLE)
def test_an_interrupt_of_user_code_is_named(name: str) -> None:
    def do() -> None:
        raise KeyboardInterrupt

    named = TABLE[name]
    found = told_when(name, do)
    assert isinstance(found, KeyboardInterrupt)
    which = named.interrupted or named.now or named.lost
    check(shown(str(found)) if "<" in which else str(found), named.step, which)
    assert f"{named.function} raised" in str(found)


class LookedError(Exception):
    """The test has seen what it came for."""


def look_from_elsewhere(seen: list[str]) -> None:
    """Let another thread tell where this one is, as the pulse of a worker does."""
    stuck = threading.get_ident()

    def look() -> None:
        frame = sys._current_frames().get(stuck)
        seen.append(describe_position(frame, calls.running(stuck)))

    looking = threading.Thread(target=look)
    looking.start()
    looking.join()


@pytest.mark.parametrize("name", TABLE)
def test_a_hang_of_user_code_is_named(name: str) -> None:
    seen: list[str] = []

    def do() -> None:
        look_from_elsewhere(seen)
        raise LookedError

    told_when(name, do)
    named, text = TABLE[name], seen[0].partition("\n")[0]
    which = named.now or named.lost
    check(shown(text) if "<" in which else text, named.step, which)
    assert text.startswith(f"it is in step {named.step!r}, function {named.function}")


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("again", [False, True], ids=["lost", "lost again"])
def test_a_process_that_ends_in_user_code_leaves_its_name(
    name: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    crumb = Breadcrumb(SPEC)
    crumb.be_careful(again)
    seen: list[str] = []

    def do() -> None:
        other = Path(crumb.path).name.replace("-3-7-", "-4-8-")
        (tmp_path / other).write_bytes(Path(crumb.path).read_bytes())
        seen.extend(text for _, _, text in left_behind(SPEC))
        raise LookedError

    try:
        told_when(name, do)
    finally:
        crumb.remove()
    named, text = TABLE[name], seen[0]
    check(text, named.step, shown(named.again or named.now or named.lost) if again else named.lost)
    assert named.function in text
    assert text.startswith(f"it was in step {named.step!r}, function ")


# ---------------------------------------------------------------- keys that are looked for, and sent


@dataclass(frozen=True)
class Moment:
    """A moment at which methods of keys are called, and what is named then."""

    method: str
    run: Callable[[], None]
    step: str
    function: str
    lost: str
    now: str
    """If it hangs; empty: the same."""
    again: str
    interrupted: str


def largest_of(workers: int, **options: Any) -> FlowTester:
    flow = Flow("keys")
    nothing: list[Any] = []
    keyed = flow.source(Items(nothing), name="numbers").key_by(Key, name="keyed")
    keyed.reduce(max, name="largest").sink(Collect(), name="out")
    return FlowTester(flow, workers=workers, feed=["numbers"], **options)


def change_twice() -> None:
    """A key changes twice before a snapshot: it is noted both times."""
    largest_of(1, snapshots=True).feed("numbers", [0, 1, BAD, 2, BAD])


def load() -> None:
    """A key is saved twice, and both rows are loaded."""
    disk = SimulatedDisk()
    with quietly():
        tester = largest_of(1, snapshots=disk)
        for number in (BAD, BAD):
            tester.feed("numbers", [0, number])
            tester.snapshot()
        assert tester.world.keeper is not None
        tester.world.keeper.release()
    largest_of(1, snapshots=disk)


def send() -> None:
    """Records are sent to another worker, with their keys."""
    for workers in range(2, 9):  # with one of these the key is on another worker than the source
        largest_of(workers).feed("numbers", range(10))


@contextmanager
def quietly() -> Iterator[None]:
    """Let no hook misbehave meanwhile."""
    global hook
    before, hook = hook, ""
    yield
    hook = before


LOOKING = "__hash__ or __eq__ of keys"
MOMENTS = {
    "noted": Moment(
        "__eq__", change_twice, "largest", LOOKING, "for 5 keys that begin with <Key>",
        f"for the key Key({BAD}) of the record {BAD}", f"for the key <Key> of the record {BAD}",
        f"for the key Key({BAD}) of the record {BAD}",
    ),
    "loaded": Moment(
        "__eq__", load, "largest", LOOKING, "for 2 keys that begin with <Key>",
        "for 2 keys that begin with Key(", "for the key <Key>", f"for the key Key({BAD})",
    ),
    "sent": Moment(
        "key __reduce__", send, "keyed", "pickle of records", " records that begin with ",
        " records that begin with ", f"for the record {BAD}", f"for the record {BAD}",
    ),
}  # fmt: skip


def misbehave(moment: Moment, do: Act) -> BaseException:
    global act, hook
    act, hook = do, moment.method
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - a KeyboardInterrupt too  # noqa: PT011 - a KeyboardInterrupt too
        moment.run()
    return caught.value


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("error", [LookupError("no"), SystemExit(3)], ids=["raise", "sys.exit"])
def test_what_methods_of_keys_raise_is_named(name: str, error: BaseException) -> None:
    def do() -> None:
        raise error

    moment = MOMENTS[name]
    found = misbehave(moment, do)
    assert isinstance(found, RailgunError)
    assert f"{moment.step!r}" in str(found)
    assert f"Key({BAD})" in str(found) or f"record {BAD}" in str(found)


@pytest.mark.parametrize("name", MOMENTS)
def test_an_interrupt_of_methods_of_keys_is_named(name: str) -> None:
    def do() -> None:
        raise KeyboardInterrupt

    moment = MOMENTS[name]
    found = misbehave(moment, do)
    assert isinstance(found, KeyboardInterrupt)
    check(str(found), moment.step, moment.interrupted)
    assert f"{moment.function} raised" in str(found)


@pytest.mark.parametrize("name", MOMENTS)
def test_a_hang_of_methods_of_keys_is_named(name: str) -> None:
    seen: list[str] = []

    def do() -> None:
        look_from_elsewhere(seen)
        raise LookedError

    moment = MOMENTS[name]
    misbehave(moment, do)
    text = seen[0].partition("\n")[0]
    check(text, moment.step, moment.now)
    assert text.startswith(f"it is in step {moment.step!r}, function {moment.function}")


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("again", [False, True], ids=["lost", "lost again"])
def test_a_process_that_ends_in_methods_of_keys_leaves_its_name(
    name: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    crumb = Breadcrumb(SPEC)
    crumb.be_careful(again)
    seen: list[str] = []

    def do() -> None:
        other = Path(crumb.path).name.replace("-3-7-", "-4-8-")
        (tmp_path / other).write_bytes(Path(crumb.path).read_bytes())
        seen.extend(text for _, _, text in left_behind(SPEC))
        raise LookedError

    moment = MOMENTS[name]
    try:
        misbehave(moment, do)
    finally:
        crumb.remove()
    check(seen[0], moment.step, moment.again if again else moment.lost)
    assert seen[0].startswith(f"it was in step {moment.step!r}, function {moment.function}")
