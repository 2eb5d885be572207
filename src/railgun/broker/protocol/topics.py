"""Topics of messages on ephemeral streams, and the matchers by which consumers choose among them.

A topic is words joined by dots: `orders.eu.paid`. A matcher looks the same, but a word of it may be `*`, which stands
for exactly one word, or `#`, which stands for any number of words, including none. Rules:

1. The empty topic has no words; a message without a topic has it. The empty matcher matches only that topic; a consumer
   that names no matcher has `#`, which matches all.
2. Words are not empty, and have no spaces and no control characters. They are compared exactly: `A` is not `a`, and two
   different encodings of one accented letter are different.
3. `*` and `#` are whole words of matchers. Beside other characters, or in a topic, they are errors: a matcher `a*`
   could never match, and its author would wait for ever.
4. In a run of wildcards, all `#` are one: `#.#` and `##` are `#`, and `#.*.#` is `*.#`, which equals `#.*`.
5. A topic or matcher has at most 255 bytes as UTF-8, and a matcher at most two runs with `#`.
6. An invalid topic or matcher is reported by a typed error that names the position.

Thousands of matchers are looked up together. `Matchers` is a trie of their words, walked with the set of all nodes that
a topic may have led to: a node is in it once, however many paths lead to it. So a topic costs at most its words times
the nodes of the trie, whatever `*` and `#` are in it; there is no backtracking. A node behind a last `#` matches
whatever follows and is not carried on, so many listeners to `orders.#` cost one lookup. Results are cached for a
bounded number of topics, until a matcher is added or removed.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import ClassVar, Final, Generic, TypeVar

from railgun.errors import RailgunError

T = TypeVar("T", bound=Hashable)

ALL: Final = "#"
"""The matcher that matches every topic: the default of a consumer."""
MAX_BYTES: Final = 255
MAX_HASHES: Final = 2
MAX_CACHED_TOPICS: Final = 10_000
MAX_CACHED_ENTITIES: Final = 1_000_000  # for all cached topics together: 8 MB

# Spelled out, because what Python calls printable differs from version to version, and nodes must agree.
_NOT_IN_WORDS: Final = re.compile(
    "[\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ud800-\udfff]"
)
_WILD: Final = re.compile(r"[*#]")


class TopicError(RailgunError, ValueError):
    """An invalid topic; `at` is the index of the invalid character."""

    code: ClassVar[str] = "BAD_TOPIC"

    def __init__(self, message: str, at: int = 0) -> None:
        super().__init__(message)
        self.at = at


class MatcherError(RailgunError, ValueError):
    """An invalid matcher; `at` is the index of the invalid character."""

    code: ClassVar[str] = "BAD_MATCHER"

    def __init__(self, message: str, at: int = 0) -> None:
        super().__init__(message)
        self.at = at


def check_topic(text: str) -> tuple[str, ...]:
    """Return the words of a topic. Raises `TopicError`.

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
        problem = f"{wild.group()!r} is for matchers; a topic names its words"
        raise TopicError(_error_text("topic", text, wild.start(), problem), wild.start())
    return words


def check_matcher(text: str) -> tuple[str, ...]:
    """Return the words of a matcher in normal form (rule 4). Raises `MatcherError`.

    >>> check_matcher("orders.*.#"), check_matcher("#.##"), check_matcher("a.#.*.#.b")
    (('orders', '*', '#'), ('#',), ('a', '*', '#', 'b'))
    >>> check_matcher("orders.e*")
    Traceback (most recent call last):
    railgun.broker.protocol.topics.MatcherError: matcher 'orders.e*', character 8: '*' must be a word of its own
    """
    words = _words(text, "matcher", MatcherError)
    at = hashes = 0
    in_hashes = False  # whether this run of wildcards already has its `#`
    normal: list[str] = []
    for written in words:
        word = written if written.strip("#") else "#"
        wild = _WILD.search(word) if len(word) > 1 else None
        if wild is not None:
            at += wild.start()
            problem = f"{wild.group()!r} must be a word of its own"
            raise MatcherError(_error_text("matcher", text, at, problem), at)
        if word == "#" and not in_hashes:
            in_hashes = True
            hashes += 1
            normal.append(word)
        elif word == "*" and in_hashes:
            normal.insert(-1, word)  # `#.*` equals `*.#`
        elif word != "#":
            in_hashes = False
            normal.append(word)
        if hashes > MAX_HASHES:
            problem = f"more than {MAX_HASHES} '#' with other words between them"
            raise MatcherError(_error_text("matcher", text, at, problem), at)
        at += len(written) + 1
    return tuple(normal)


def matches(matcher: str, topic: str) -> bool:
    """Return whether a matcher matches a topic.

    >>> matches("orders.*.paid", "orders.eu.paid")
    True
    >>> matches("orders.#", "orders"), matches("orders.*", "orders")
    (True, False)
    """
    pattern, words = check_matcher(matcher), check_topic(topic)
    # Bit i of `reached`: the first i words of the matcher can match the words of the topic so far.
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
    """Return `reached` with the positions behind each `#`, which may match no word. No two `#` follow each other."""
    return reached | (reached & hashes) << 1


def _words(text: str, kind: str, error: type[TopicError] | type[MatcherError]) -> tuple[str, ...]:
    """Check the rules that topics and matchers share; return the words of `text`."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MAX_BYTES:
        at = len(data[:MAX_BYTES].decode("utf-8", "ignore"))
        problem = f"it has {len(data)} bytes, and at most {MAX_BYTES} are allowed"
        raise error(_error_text(kind, text, at, problem), at)
    bad = _NOT_IN_WORDS.search(text)
    if bad is not None:
        problem = f"{bad.group()!a} is a space or control character"
        raise error(_error_text(kind, text, bad.start(), problem), bad.start())
    if not text:
        return ()
    words = tuple(text.split("."))
    if "" in words:
        at = sum(len(word) + 1 for word in words[: words.index("")])
        raise error(_error_text(kind, text, at, "an empty word; join words by single dots"), at)
    return words


def _error_text(kind: str, text: str, at: int, problem: str) -> str:
    shown = text if len(text) <= 80 else f"{text[:80]}…"
    return f"{kind} {shown!r}, character {at}: {problem}"


class _Place(Generic[T]):
    """A node of the trie: the matchers that begin with the same words."""

    __slots__ = ("after", "entities", "loops")

    def __init__(self, word: str) -> None:
        self.loops = word == "#"  # any word leads from this node to itself
        self.after: dict[str, _Place[T]] = {}
        self.entities: dict[T, None] = {}  # those with a matcher that ends here


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

    def __init__(
        self, topics: int = MAX_CACHED_TOPICS, entities: int = MAX_CACHED_ENTITIES
    ) -> None:
        self._root: _Place[T] = _Place("")
        self._order: dict[T, tuple[int, int]] = {}  # position, and number of matchers
        self._next = 0
        self._max_cached_topics = topics
        self._max_cached_entities = entities
        self._cache: dict[str, tuple[T, ...]] = {}
        self._cached_entities = 0  # in all entries of `_cache`
        self.work = 0
        """Trie nodes visited by all searches so far: tests check the bounds of the work with it."""

    def __len__(self) -> int:
        """Return the number of pairs of matcher and entity."""
        return sum(count for _, count in self._order.values())

    def add(self, matcher: str, entity: T) -> bool:
        """Add a matcher of an entity. Return False if the entity had it already."""
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
        self._clear_cache()
        return True

    def remove(self, matcher: str, entity: T) -> bool:
        """Remove a matcher of an entity. Return False if the entity did not have it."""
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
        self._clear_cache()
        return True

    def find(self, topic: str) -> tuple[T, ...]:
        """Return the entities with a matcher for this topic, each once, in the order in which they were added."""
        entities = self._cache.get(topic)
        if entities is None:
            entities = self._search(check_topic(topic))
            self._store(topic, entities)
        return entities

    def _search(self, words: tuple[str, ...]) -> tuple[T, ...]:
        ended: dict[_Place[T], None] = {}  # behind a last `#`: matches whatever follows
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

    def _store(self, topic: str, entities: tuple[T, ...]) -> None:
        """Cache the result for a topic; the oldest results make room, as a topic in use is soon cached again."""
        if len(entities) > self._max_cached_entities or not self._max_cached_topics:
            return
        while (
            len(self._cache) >= self._max_cached_topics
            or self._cached_entities + len(entities) > self._max_cached_entities
        ):
            self._cached_entities -= len(self._cache.pop(next(iter(self._cache))))
        self._cache[topic] = entities
        self._cached_entities += len(entities)

    def _clear_cache(self) -> None:
        self._cache.clear()
        self._cached_entities = 0

    def places(self) -> int:
        """Return the number of nodes in the trie."""
        return len(self._places())

    def _places(self) -> list[_Place[T]]:
        places = [self._root]
        for place in places:
            places.extend(place.after.values())
        return places

    def validate(self) -> None:
        """Assert that the trie has no useless node, and that the cache is right."""
        counts: dict[T, int] = {}
        for place in self._places():
            assert place is self._root or place.after or place.entities, "a place leads nowhere"
            for entity in place.entities:
                counts[entity] = counts.get(entity, 0) + 1
        assert counts == {entity: count for entity, (_, count) in self._order.items()}
        turns = [turn for turn, _ in self._order.values()]
        assert len(set(turns)) == len(turns), "two entities have one turn"
        assert len(self._cache) <= self._max_cached_topics, "too many topics are cached"
        assert (
            self._cached_entities
            == sum(map(len, self._cache.values()))
            <= self._max_cached_entities
        )
        work = self.work
        for topic, entities in self._cache.items():
            assert entities == self._search(check_topic(topic)), f"the cache is wrong for {topic!r}"
        self.work = work


def _reach(place: _Place[T], here: dict[_Place[T], None], ended: dict[_Place[T], None]) -> None:
    """Add a node to those reached, and the nodes behind it that a `#` for no word leads to."""
    following: _Place[T] | None = place
    while following is not None and following not in here:
        if following.loops and not following.after:
            ended[following] = None
            return
        here[following] = None
        following = following.after.get("#")
