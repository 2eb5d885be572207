"""Topics of messages on ephemeral streams, and the matchers by which consumers choose among them.

A topic is words joined by dots: `orders.eu.paid`. A matcher looks the same, but a word of it may be `*`, which stands
for any one word, or `#`, which stands for any number of words, none included. Rules:

1. The empty topic has no words; it is what a message without a topic has. The empty matcher fits that one only; a
   consumer that names no matcher has `#`, which fits all.
2. Words are not empty, and have no spaces and no control characters. They are compared as they are: `A` is not `a`,
   and of two spellings of one accented letter neither is the other.
3. `*` and `#` are whole words of matchers. Beside other characters, or in a topic, they are errors: a matcher `a*`
   could never fit anything, and its author would wait for ever.
4. In a run of wildcards, all `#` are one: `#.#` and `##` are `#`, and `#.*.#` is `*.#`, which is what `#.*` is.
5. A topic or matcher has at most 255 bytes as UTF-8, and a matcher at most two runs with `#`.
6. What is wrong is told by a typed error that says where.

Thousands of matchers are looked up together. `Matchers` is a trie of their words, walked with the set of all places a
topic may have led to: a place is in it once, by however many ways it was reached. So a topic costs at most
its words times the places of the trie, whatever `*` and `#` are in it; there is no backtracking. A place behind a last
`#` has been reached for good and is not carried on, so the many who listen to `orders.#` cost a lookup once.
What was found is remembered for a bounded number of topics, until a matcher comes or goes.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import ClassVar, Final, Generic, TypeVar

from railgun.errors import RailgunError

T = TypeVar("T", bound=Hashable)

ALL: Final = "#"
"""The matcher that fits every topic: what a consumer has that names none."""
MOST_BYTES: Final = 255
MOST_HASHES: Final = 2
MOST_TOPICS: Final = 10_000  # remembered
MOST_FOUND: Final = 1_000_000  # entities remembered for all of them: 8 MB

# Spelled out, because what Python calls printable differs from version to version, and nodes must agree.
_NOT_IN_WORDS: Final = re.compile(
    "[\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ud800-\udfff]"
)
_WILD: Final = re.compile(r"[*#]")


class TopicError(RailgunError, ValueError):
    """A topic that cannot be; `at` is the character of it that is wrong."""

    code: ClassVar[str] = "BAD_TOPIC"

    def __init__(self, message: str, at: int = 0) -> None:
        super().__init__(message)
        self.at = at


class MatcherError(RailgunError, ValueError):
    """A matcher that cannot be; `at` is the character of it that is wrong."""

    code: ClassVar[str] = "BAD_MATCHER"

    def __init__(self, message: str, at: int = 0) -> None:
        super().__init__(message)
        self.at = at


def check_topic(text: str) -> tuple[str, ...]:
    """The words of a topic.

    >>> check_topic("orders.eu.paid")
    ('orders', 'eu', 'paid')
    >>> check_topic("")
    ()
    >>> check_topic("orders..paid")
    Traceback (most recent call last):
    railgun.broker.protocol.topics.TopicError: topic 'orders..paid', character 7: an empty word; ...
    """
    words = _words(text, "topic", TopicError)
    wild = _WILD.search(text)
    if wild is not None:
        what = f"{wild.group()!r} is for matchers; a topic names its words"
        raise TopicError(_told("topic", text, wild.start(), what), wild.start())
    return words


def check_matcher(text: str) -> tuple[str, ...]:
    """The words of a matcher.

    >>> check_matcher("orders.*.#"), check_matcher("#.##"), check_matcher("a.#.*.#.b")
    (('orders', '*', '#'), ('#',), ('a', '*', '#', 'b'))
    >>> check_matcher("orders.e*")
    Traceback (most recent call last):
    railgun.broker.protocol.topics.MatcherError: matcher 'orders.e*', character 8: '*' must be a word of its own
    """
    words = _words(text, "matcher", MatcherError)
    at = hashes = 0
    in_hashes = False  # whether the `#` of this run of wildcards was seen
    found: list[str] = []
    for written in words:
        word = written if written.strip("#") else "#"
        wild = _WILD.search(word) if len(word) > 1 else None
        if wild is not None:
            at += wild.start()
            what = f"{wild.group()!r} must be a word of its own"
            raise MatcherError(_told("matcher", text, at, what), at)
        if word == "#" and not in_hashes:
            in_hashes = True
            hashes += 1
            found.append(word)
        elif word == "*" and in_hashes:
            found.insert(-1, word)  # `#.*` is what `*.#` is
        elif word != "#":
            in_hashes = False
            found.append(word)
        if hashes > MOST_HASHES:
            what = f"more than {MOST_HASHES} '#' with other words between them"
            raise MatcherError(_told("matcher", text, at, what), at)
        at += len(written) + 1
    return tuple(found)


def matches(matcher: str, topic: str) -> bool:
    """Whether a matcher fits a topic.

    >>> matches("orders.*.paid", "orders.eu.paid")
    True
    >>> matches("orders.#", "orders"), matches("orders.*", "orders")
    (True, False)
    """
    pattern, words = check_matcher(matcher), check_topic(topic)
    # Bit i of `reached`: the first i words of the matcher can stand for the words of the topic so far.
    named: dict[str, int] = {}
    for i, word in enumerate(pattern):
        named[word] = named.get(word, 0) | 1 << i
    any_one, any_number = named.pop("*", 0), named.pop("#", 0)
    reached = 1
    for word in words:
        reached = _past_hashes(reached, any_number)
        moves = reached & (named.get(word, 0) | any_one)
        reached = moves << 1 | reached & any_number
    return bool(_past_hashes(reached, any_number) >> len(pattern))


def _past_hashes(reached: int, hashes: int) -> int:
    """A `#` may stand for no word: who is before one is also behind it. No two follow each other."""
    return reached | (reached & hashes) << 1


def _words(text: str, kind: str, error: type[TopicError] | type[MatcherError]) -> tuple[str, ...]:
    """What topics and matchers have in common."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MOST_BYTES:
        at = len(data[:MOST_BYTES].decode("utf-8", "ignore"))
        what = f"it has {len(data)} bytes, and at most {MOST_BYTES} are allowed"
        raise error(_told(kind, text, at, what), at)
    bad = _NOT_IN_WORDS.search(text)
    if bad is not None:
        what = f"{bad.group()!a} is a space or control character"
        raise error(_told(kind, text, bad.start(), what), bad.start())
    if not text:
        return ()
    words = tuple(text.split("."))
    if "" in words:
        at = sum(len(word) + 1 for word in words[: words.index("")])
        raise error(_told(kind, text, at, "an empty word; join words by single dots"), at)
    return words


def _told(kind: str, text: str, at: int, what: str) -> str:
    shown = text if len(text) <= 80 else f"{text[:80]}…"
    return f"{kind} {shown!r}, character {at}: {what}"


class _Place(Generic[T]):
    """A place in the trie: the beginnings of matchers that have these words in common."""

    __slots__ = ("after", "entities", "loops")

    def __init__(self, word: str) -> None:
        self.loops = word == "#"  # any word leads from here to here
        self.after: dict[str, _Place[T]] = {}
        self.entities: dict[T, None] = {}  # whose matcher ends here


class Matchers(Generic[T]):
    """The matchers of many entities, looked up by topic.

    >>> matchers = Matchers[str]()
    >>> for entity, matcher in {"ann": "orders.#", "bob": "#", "cy": "*.eu.paid"}.items():
    ...     _ = matchers.add(matcher, entity)
    >>> matchers.find("orders.eu.paid")
    ('ann', 'bob', 'cy')
    >>> matchers.remove("#", "bob")
    True
    >>> matchers.find("orders.us")
    ('ann',)
    """

    def __init__(self, topics: int = MOST_TOPICS, found: int = MOST_FOUND) -> None:
        self._root: _Place[T] = _Place("")
        self._order: dict[T, tuple[int, int]] = {}  # its turn, and how many matchers it has
        self._next = 0
        self._most_topics = topics
        self._most_found = found
        self._memo: dict[str, tuple[T, ...]] = {}
        self._remembered = 0  # entities in all of `_memo`
        self.work = 0
        """Places looked at by all searches so far: what bounds of the work are shown with."""

    def __len__(self) -> int:
        """How many pairs of matcher and entity there are."""
        return sum(count for _, count in self._order.values())

    def add(self, matcher: str, entity: T) -> bool:
        """From now on it is found by this matcher; False if it was already."""
        place = self._root
        for word in check_matcher(matcher):
            following = place.after.get(word)
            if following is None:
                following = place.after[word] = _Place(word)
            place = following
        if entity in place.entities:
            return False
        place.entities[entity] = None
        turn, count = self._order.get(entity, (self._next, 0))
        self._order[entity] = turn, count + 1
        self._next += count == 0
        self._forget()
        return True

    def remove(self, matcher: str, entity: T) -> bool:
        """It is no longer found by this matcher; False if it was not before."""
        words = check_matcher(matcher)
        path = [self._root]
        for word in words:
            following = path[-1].after.get(word)
            if following is None:
                return False
            path.append(following)
        if entity not in path[-1].entities:
            return False
        del path[-1].entities[entity]
        turn, count = self._order.pop(entity)
        if count > 1:
            self._order[entity] = turn, count - 1
        for before, word in zip(reversed(path[:-1]), reversed(words), strict=True):
            place = before.after[word]
            if place.after or place.entities:
                break
            del before.after[word]
        self._forget()
        return True

    def find(self, topic: str) -> tuple[T, ...]:
        """Who has a matcher that fits, each once, in the order in which they were added."""
        found = self._memo.get(topic)
        if found is None:
            found = self._search(check_topic(topic))
            self._remember(topic, found)
        return found

    def _search(self, words: tuple[str, ...]) -> tuple[T, ...]:
        ended: dict[_Place[T], None] = {}  # behind a last `#`: they fit whatever follows
        here: dict[_Place[T], None] = {}
        _reach(self._root, here, ended)
        for word in words:
            self.work += len(here)
            there: dict[_Place[T], None] = {}
            for place in here:
                if place.loops:
                    _reach(place, there, ended)
                for way in (word, "*"):
                    following = place.after.get(way)
                    if following is not None:
                        _reach(following, there, ended)
            here = there
        self.work += len(here) + len(ended)
        entities = {entity: None for place in (*here, *ended) for entity in place.entities}
        return tuple(sorted(entities, key=self._turn))

    def _turn(self, entity: T) -> int:
        return self._order[entity][0]

    def _remember(self, topic: str, found: tuple[T, ...]) -> None:
        """The oldest are forgotten for it: a topic in use comes back with its next message."""
        if len(found) > self._most_found or not self._most_topics:
            return
        while (
            len(self._memo) >= self._most_topics or self._remembered + len(found) > self._most_found
        ):
            self._remembered -= len(self._memo.pop(next(iter(self._memo))))
        self._memo[topic] = found
        self._remembered += len(found)

    def _forget(self) -> None:
        self._memo.clear()
        self._remembered = 0

    def places(self) -> int:
        """How large the trie is."""
        return len(self._places())

    def _places(self) -> list[_Place[T]]:
        places = [self._root]
        for place in places:
            places.extend(place.after.values())
        return places

    def validate(self) -> None:
        """Nothing useless is kept, and what is remembered is what would be found."""
        counts: dict[T, int] = {}
        for place in self._places():
            assert place is self._root or place.after or place.entities, "a place leads nowhere"
            for entity in place.entities:
                counts[entity] = counts.get(entity, 0) + 1
        assert counts == {entity: count for entity, (_, count) in self._order.items()}
        turns = [turn for turn, _ in self._order.values()]
        assert len(set(turns)) == len(turns), "two entities have one turn"
        assert len(self._memo) <= self._most_topics, "too many topics are remembered"
        assert self._remembered == sum(map(len, self._memo.values())) <= self._most_found
        work = self.work
        for topic, found in self._memo.items():
            assert found == self._search(check_topic(topic)), f"{topic!r} is remembered wrongly"
        self.work = work


def _reach(place: _Place[T], here: dict[_Place[T], None], ended: dict[_Place[T], None]) -> None:
    """This place is reached, and what lies behind a `#` that stands for no word."""
    following: _Place[T] | None = place
    while following is not None and following not in here:
        if following.loops and not following.after:
            ended[following] = None
            return
        here[following] = None
        following = following.after.get("#")
