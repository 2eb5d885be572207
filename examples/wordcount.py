"""Count words: a stream of sentences, the count of each word so far, on Spark.

./run railgun run examples/wordcount.py
./run railgun scale wordcount 4 --watch        (in another terminal)
./run railgun status wordcount
./run railgun stop wordcount
"""

from __future__ import annotations

from random import Random

from railgun import Files, Flow, Generate

WORDS = [f"{first}{last}" for first in "bdfglmnprst" for last in ("a", "ew", "im", "ot", "ub", "y")]


def sentence(index: int, random: Random) -> str:
    """A sentence of five words."""
    return " ".join(random.choices(WORDS, k=5))


def count(so_far: int, word: str) -> tuple[int, dict[str, object]]:
    """One more."""
    return so_far + 1, {"word": word, "count": so_far + 1}


flow = Flow("wordcount")
sentences = flow.source(Generate(sentence, rate=2_000, partitions=4), name="sentences")
words = sentences.flat_map(str.split, name="words").key_by(str, name="by word")
words.stateful_map(count, initial=int, name="count").sink(Files("wordcount"), name="counts")
