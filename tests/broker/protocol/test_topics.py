"""Topics and matchers: rows ES of the design, against two references that know nothing of tries or bits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from itertools import groupby
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from railgun.broker.protocol import topics
from railgun.broker.protocol.topics import (
    ALL,
    MAX_BYTES,
    MatcherError,
    Matchers,
    TopicError,
    check_matcher,
    check_topic,
    matches,
)
from railgun.errors import RailgunError

FEW = settings(deadline=None, max_examples=100)


# --- The references -------------------------------------------------------------------------------


def by_regex(matcher: str, topic: str) -> bool:
    """Every word is followed by a dot; a matcher is a regular expression over that."""
    parts = {"*": r"[^.]+\.", "#": r"(?:[^.]+\.)*"}
    words = matcher.split(".") if matcher else []
    pattern = "".join(parts.get(word, re.escape(word) + r"\.") for word in words)
    return re.fullmatch(pattern, f"{topic}." if topic else "") is not None


def by_table(matcher: str, topic: str) -> bool:
    """Whether the first i words of the one stand for the first j of the other, for all i and j."""
    pattern = matcher.split(".") if matcher else []
    words = topic.split(".") if topic else []
    row = [True] + [False] * len(words)
    for part in pattern:
        below = [part == "#" and row[0]]
        for j, word in enumerate(words, 1):
            if part == "#":
                below.append(row[j] or below[j - 1])
            else:
                below.append(row[j - 1] and part in ("*", word))
        row = below
    return row[-1]


WORDS = ["a", "b", "c", "aa", "ü"]
words = st.sampled_from(WORDS)
topic_texts = st.lists(words, max_size=7).map(".".join)


@st.composite
def matcher_texts(draw: st.DrawFn) -> str:
    parts = draw(st.lists(words | st.just("*"), max_size=6))
    for _ in range(draw(st.integers(0, 2))):
        parts.insert(draw(st.integers(0, len(parts))), "#")
    return ".".join(parts)


def drawn_topic(chance: Random) -> str:
    return ".".join(chance.choices(WORDS[:3], k=chance.randrange(8)))


def drawn_matcher(chance: Random) -> str:
    parts = chance.choices(["a", "b", "*"], k=chance.randrange(6))
    for _ in range(chance.randrange(3)):
        parts.insert(chance.randint(0, len(parts)), "#")
    return ".".join(parts)


# --- One matcher, one topic -----------------------------------------------------------------------


@FEW
@given(matcher_texts(), topic_texts)
@example("", "")
@example("#.#", "")
@example("#.a.#", "a")
@example("*.#", "")
def test_es_a_matcher_fits_what_the_references_say(matcher: str, topic: str) -> None:
    assert by_regex(matcher, topic) == by_table(matcher, topic)
    assert matches(matcher, topic) == by_table(matcher, topic)


def test_es_a_matcher_fits_what_the_references_say_twenty_thousand_times() -> None:
    chance = Random(1)
    fitting = 0
    for _ in range(20_000):
        matcher, topic = drawn_matcher(chance), drawn_topic(chance)
        fits = matches(matcher, topic)
        assert fits == by_table(matcher, topic), (matcher, topic)
        assert fits == by_regex(matcher, topic), (matcher, topic)
        fitting += fits
    assert 2_000 < fitting < 18_000


@pytest.mark.parametrize("matcher", ["#.a.#", "#.a.*.a.#", "#.a.a.b", "#.b.#", "*.#.a.#.*", "#.#"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 127, 128])
def test_es_long_topics_of_one_word(matcher: str, count: int) -> None:
    topic = ".".join(["a"] * count)
    assert matches(matcher, topic) == by_table(matcher, topic)


def test_es_star_is_one_word_and_hash_is_any_number() -> None:
    assert [matches("a.*", t) for t in ("a", "a.b", "a.b.c")] == [False, True, False]
    assert [matches("a.#", t) for t in ("a", "a.b", "a.b.c", "b")] == [True, True, True, False]


def test_es_the_default_topic_is_empty_and_the_default_matcher_fits_all() -> None:
    assert check_topic("") == ()
    assert [matches(ALL, topic) for topic in ("", "a", "a.b")] == [True, True, True]
    assert [matches("", topic) for topic in ("", "a")] == [True, False]
    assert not matches("*", "")


# --- Errors ---------------------------------------------------------------------------------------

BOTH: dict[str, tuple[str, int]] = {
    "empty word in the middle": ("a..b", 2),
    "empty word at the end": ("a.", 2),
    "empty word at the beginning": (".a", 0),
    "only a dot": (".", 0),
    "space": ("a.b c", 3),
    "space at the end": ("a ", 1),
    "line feed at the end": ("a\n", 1),
    "control character": ("a.\x00", 2),
    "delete": ("\x7f", 0),
    "no-break space": ("a\u00a0b", 1),
    "ideographic space": ("ab\u3000", 2),
    "line separator": ("a\u2028", 1),
    "half a character": ("a\ud800", 1),
    "too long": ("a" * 256, 255),
    "too long in bytes": ("ü" * 128, 127),
}


@pytest.mark.parametrize(("text", "at"), BOTH.values(), ids=BOTH.keys())
def test_es_bad_topics_and_matchers_are_typed_errors(text: str, at: int) -> None:
    with pytest.raises(TopicError, match=f"character {at}:") as of_topic:
        check_topic(text)
    with pytest.raises(MatcherError, match=f"character {at}:") as of_matcher:
        check_matcher(text)
    assert of_topic.value.at == of_matcher.value.at == at
    assert (of_topic.value.code, of_matcher.value.code) == ("BAD_TOPIC", "BAD_MATCHER")
    assert isinstance(of_topic.value, RailgunError)
    of_topic.value.args[0].encode()  # can be sent, whatever the topic was


@pytest.mark.parametrize(("text", "at"), [("*", 0), ("a.#", 2), ("a.b*c", 3)])
def test_es_wildcards_in_topics_are_errors(text: str, at: int) -> None:
    with pytest.raises(TopicError) as caught:
        check_topic(text)
    assert caught.value.at == at


@pytest.mark.parametrize(
    ("text", "at"),
    [("a.b*", 3), ("##a", 0), ("##.**", 3), ("#a", 0), ("a.#.b.#.c.#", 10), ("#.a.#.#.a.#", 10)],
)
def test_es_matchers_that_could_not_be_meant_are_errors(text: str, at: int) -> None:
    with pytest.raises(MatcherError) as caught:
        check_matcher(text)
    assert caught.value.at == at


def test_es_the_longest_ones_are_good() -> None:
    assert check_topic("ü" * 127 + "a") == ("ü" * 127 + "a",)
    assert len(check_topic(".".join("a" * 128))) == 128
    assert len(check_matcher(".".join(["#", *["*"] * 126, "#"]))) == 127


@pytest.mark.parametrize(
    ("matcher", "same"),
    [
        ("#.#", "#"), ("##", "#"), ("a.###.##.b.##", "a.#.b.#"), ("#.#.#.#", "#"), ("a.#.#.b.#.#.#", "a.#.b.#"),
        ("#.*", "*.#"), ("*.#.*", "*.*.#"),
        ("#.*.#.*.#", "*.*.#"), ("a.#.*.#.b", "a.*.#.b"),
    ],
)  # fmt: skip
def test_es_all_hashes_of_a_run_of_wildcards_are_one(matcher: str, same: str) -> None:
    assert check_matcher(matcher) == check_matcher(same) == tuple(same.split("."))
    matchers = Matchers[str]()
    assert matchers.add(matcher, "x")
    assert not matchers.add(same, "x")
    for topic in ("", "a", "a.b", "a.c.b", "a.c.d.b", "x.y.z.b.c", "b"):
        assert matches(matcher, topic) == (matchers.find(topic) == ("x",)) == matches(same, topic)
    assert [matches("#.*", topic) for topic in ("", "a", "a.b")] == [False, True, True]
    assert matchers.remove(same, "x")
    assert not matchers.places() - 1


def collapsed(matcher: str) -> str:
    """A matcher with each run of wildcards as short as may be: its `*`, and one `#` behind them."""
    words = [word if word.strip("#") else "#" for word in matcher.split(".")] if matcher else []
    found: list[str] = []
    for is_wild, run in groupby(words, lambda word: word in ("*", "#")):
        some = list(run)
        stars, hashes = ["*"] * some.count("*"), ["#"] * ("#" in some)
        found += [*stars, *hashes] if is_wild else some
    return ".".join(found)


@FEW
@given(st.text(max_size=20) | st.text("ab.*# \n", max_size=8))
@example("#.*")
def test_es_any_text_is_words_or_a_typed_error(text: str) -> None:
    for check, error in ((check_topic, TopicError), (check_matcher, MatcherError)):
        try:
            found = check(text)
        except error as wrong:
            places = range(len(text) + 1)
            assert wrong.at in places  # noqa: PT017 - whether it is raised is the question
        else:
            assert ".".join(found) == (collapsed(text) if check is check_matcher else text)
            assert all(found)
            assert len(text.encode()) <= MAX_BYTES


# --- Many matchers --------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove"]), matcher_texts(), st.integers(0, 5))
    | st.tuples(st.just("find"), topic_texts, st.just(0)),
    max_size=40,
)


def canonical(matcher: str) -> str:
    """The one spelling of all matchers that differ only in a run of wildcards."""
    pieces: list[str] = []
    for is_wild, words in itertools.groupby(matcher.split("."), lambda word: word in ("*", "#")):
        run_of = list(words)
        stars = [word for word in run_of if word == "*"]
        pieces += [*stars, *["#"] * ("#" in run_of)] if is_wild else run_of
    return ".".join(pieces)


def check_history(history: list[tuple[str, str, int]], make: Callable[[], Matchers[int]]) -> None:
    """Against a list of pairs in which every pair is tried."""
    matchers = make()
    pairs: list[tuple[str, int]] = []
    arrivals: list[int] = []  # of entities, in the order in which they were added
    for what, said, entity in history:
        text = said if what == "find" else canonical(said)
        if what == "add":
            assert matchers.add(said, entity) == ((text, entity) not in pairs)
            if (text, entity) not in pairs:
                pairs.append((text, entity))
            if entity not in arrivals:
                arrivals.append(entity)
        elif what == "remove":
            assert matchers.remove(said, entity) == ((text, entity) in pairs)
            pairs = [pair for pair in pairs if pair != (text, entity)]
            arrivals = [e for e in arrivals if any(e == other for _, other in pairs)]
        else:
            fitting = {e for matcher, e in pairs if by_table(matcher, text)}
            expected = tuple(e for e in arrivals if e in fitting)
            assert matchers.find(text) == expected
            assert matchers.find(text) == expected  # from memory
        matchers.validate()
        assert len(matchers) == len(pairs)


@FEW
@given(steps, st.sampled_from([(0, 10), (1, 3), (3, 5), (100, 100)]))
def test_es_whoever_fits_is_found_once_in_order(
    history: list[tuple[str, str, int]], memory: tuple[int, int]
) -> None:
    check_history(history, lambda: Matchers(*memory))


def test_es_thousands_of_matchers_in_one_trie() -> None:
    chance = Random(2)
    patterns = [drawn_matcher(chance) for _ in range(1500)]
    matchers = Matchers[int]()
    for entity, pattern in enumerate(patterns):
        matchers.add(pattern, entity)
    for _ in range(60):
        text = drawn_topic(chance)
        expected = tuple(e for e, pattern in enumerate(patterns) if by_table(pattern, text))
        assert matchers.find(text) == expected


def test_es_a_trie_of_which_all_is_removed_is_empty() -> None:
    matchers = Matchers[int]()
    for entity in range(300):
        matchers.add(f"a.{entity % 7}.#.x{entity}.#", entity)
    for entity in range(300):
        assert matchers.remove(f"a.{entity % 7}.#.x{entity}.#", entity)
        matchers.validate()
    assert (matchers.places(), len(matchers)) == (1, 0)


def test_es_what_is_bad_changes_nothing() -> None:
    matchers = Matchers[str]()
    matchers.add("a.*", "ann")
    for change in (matchers.add, matchers.remove):
        with pytest.raises(MatcherError):
            change("a..b", "bob")
    with pytest.raises(TopicError):
        matchers.find("a.*")
    assert matchers.find("a.b") == ("ann",)
    assert not matchers.remove("a", "ann")
    assert not matchers.remove("a.b.c", "ann")
    matchers.validate()


# --- Bounds of the work ---------------------------------------------------------------------------


def pathological() -> list[str]:
    """Five thousand matchers that fit in as many ways as can be."""
    found = []
    for i in range(50):
        for j in range(50):
            middle = ["*" if (i >> bit) & 1 else "a" for bit in range(6)]
            tail = ["*" if (j >> bit) & 1 else "a" for bit in range(6)]
            found.append(".".join(["#", *middle, "#", *tail, f"x{i}"]))
            found.append(".".join(["#", *middle, "#", *tail]))
    return found


def test_es_the_work_is_at_most_words_times_places() -> None:
    matchers = Matchers[int]()
    patterns = pathological()
    for entity, pattern in enumerate(patterns):
        matchers.add(pattern, entity)
    places = matchers.places()
    for count in (8, 16, 32, 64, 128):
        before = matchers.work
        topic = ".".join(["a"] * count)
        found = set(matchers.find(topic))
        assert matchers.work - before <= (count + 1) * places
        for entity in range(0, len(patterns), 17):
            assert (entity in found) == by_table(patterns[entity], topic)


def test_es_a_topic_twice_as_long_is_twice_the_work() -> None:
    matchers = Matchers[int]()
    for entity, pattern in enumerate(pathological()):
        matchers.add(pattern, entity)
    work = []
    for count in (32, 64, 128):
        before = matchers.work
        matchers.find(".".join(["a"] * count))
        work.append(matchers.work - before)
    assert work[1] <= 2.5 * work[0]
    assert work[2] <= 2.5 * work[1]


def test_es_those_who_take_all_cost_nothing_per_word() -> None:
    matchers = Matchers[int]()
    for entity in range(3000):
        matchers.add(("#", "a.#", "a.a.#", f"b.w{entity}.#")[entity % 4], entity)
    assert len(matchers.find(".".join(["a"] * 128))) == 2250
    assert matchers.work < 128


def test_es_who_cannot_fit_costs_nothing() -> None:
    matchers = Matchers[int]()
    for entity in range(5000):
        matchers.add(f"orders.c{entity}.*.#", entity)
    assert matchers.find("orders.c77.new.eu") == (77,)
    assert matchers.work < 10


def test_es_a_topic_is_searched_once_until_matchers_change() -> None:
    matchers = Matchers[int]()
    matchers.add("a.*.c", 1)
    matchers.find("a.b.c")
    work = matchers.work
    for _ in range(100):
        assert matchers.find("a.b.c") == (1,)
    assert matchers.work == work
    matchers.add("#.c", 2)
    assert matchers.find("a.b.c") == (1, 2)
    assert matchers.work > work


def test_es_memory_of_topics_is_bounded() -> None:
    matchers = Matchers[int](topics=10, entities=25)
    for entity in range(4):
        matchers.add("#", entity)
    for number in range(100):
        assert matchers.find(f"t{number}") == (0, 1, 2, 3)
        matchers.validate()


# --- Mutants: every rule is guarded ---------------------------------------------------------------


def hunt(make: Callable[[], Matchers[int]]) -> None:
    """Looks for a history in which it is wrong."""
    for seed in range(150):
        chance = Random(seed)
        history = []
        for _ in range(40):
            what = chance.choice(["add", "add", "remove", "find", "find"])
            text = drawn_topic(chance) if what == "find" else drawn_matcher(chance)
            history.append((what, text, chance.randrange(5)))
            if what == "remove":  # rarely by chance one that is there
                what, text, entity = chance.choice(history)
                history[-1] = "remove" if what != "find" else what, text, entity
        check_history(history, make)


class Forgetless(Matchers[int]):
    """Remembers what it found when matchers change."""

    def _clear_cache(self) -> None:
        pass


class Unordered(Matchers[int]):
    """Orders entities by name."""

    def _turn(self, entity: int) -> int:
        return entity


def test_the_hunt_finds_nothing_in_the_real_one() -> None:
    hunt(Matchers)


@pytest.mark.parametrize("mutant", [Forgetless, Unordered])
def test_mutants_of_the_trie_are_caught(mutant: type[Matchers[int]]) -> None:
    with pytest.raises(AssertionError):
        hunt(mutant)


def test_a_hash_that_stands_for_a_word_at_least_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(place: object, here: dict[object, None], ended: dict[object, None]) -> None:
        here[place] = None

    monkeypatch.setattr(topics, "_reach", reach)
    with pytest.raises(AssertionError):
        hunt(Matchers)


@pytest.mark.parametrize("times", [0])
def test_a_matcher_that_skips_fewer_hashes_is_caught(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    def past(reached: int, hashes: int) -> int:
        for _ in range(times):
            reached |= (reached & hashes) << 1
        return reached

    monkeypatch.setattr(topics, "_past_hashes", past)
    with pytest.raises(AssertionError):
        test_es_a_matcher_fits_what_the_references_say_twenty_thousand_times()
