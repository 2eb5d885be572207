"""Response streams across nodes: names, answers, and keepers that die or come."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.cluster.linked import cluster
from tests.broker.running import DEADLINE, Raw, nothing, refused, run, take, until

from railgun.broker.cluster import responding as responding_module
from railgun.broker.protocol.response_names import keeper_of
from railgun.client.subscription import Subscription
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build


def kept_by(keeper: str, nodes: str = "abc", count: int = 1) -> str:
    """The name of a response that this node keeps."""
    names = (f"r{at}" for at in range(1000))
    return [name for name in names if keeper_of(name, nodes) == keeper][count - 1]


def ask(raw: Raw, name: str, request: int = 1, timeout: float = DEADLINE) -> None:
    told = p.Publish(request=request, stream="news", response=name, timeout=int(timeout * 1e6))
    raw.connection.send(b"".join(encode(told, [build([b"what?"])])))


def answers(raw: Raw) -> list[bytes]:
    return [bytes(f.blob) for f in raw.frames if isinstance(f.command, p.Response) and f.blob]


@pytest.mark.parametrize("keeper", ["a", "b", "c"])
def test_rs_answered_at_another_node_and_the_first_wins(tmp_path: Path, keeper: str) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b, c = await nodes["b"].client(), await nodes["c"].client()
            subs = [await client.subscribe("news") for client in (b, c)]
            await nodes.know(2)
            raw = await Raw.dial(nodes["a"].running)
            name = kept_by(keeper)
            ask(raw, name)
            one, two = [await sub.next(DEADLINE) for sub in subs]
            assert one.response == two.response == name
            await one.respond(b"this")
            await refused("RS_GONE", two.respond(b"that"))
            await refused("RS_GONE", one.respond(b"again"))
            await until(lambda: bool(answers(raw)))
            assert len(answers(raw)) == 1
            assert b"this" in answers(raw)[0]
            names = nodes[keeper].events.responding.names
            await until(lambda: not len(names))  # it is released
            ask(raw, name, request=2)  # so the name may be used again
            await (await subs[1].next(DEADLINE)).respond(b"once more", confirm=False)
            await until(lambda: len(answers(raw)) == 2)
            raw.connection.close()

    run(main())


@pytest.mark.parametrize("keeper", ["a", "b", "c"])
def test_rs_a_name_is_unique_in_the_cluster(tmp_path: Path, keeper: str) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            c = await nodes["c"].client()
            sub = await c.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "ab"]
            name = kept_by(keeper)
            ask(raws[0], name)
            question = await sub.next(DEADLINE)
            ask(raws[1], name)
            await until(lambda: raws[1].codes() == ["RS_EXISTS"])
            ask(raws[0], name, request=2)
            await until(lambda: raws[0].codes() == ["RS_EXISTS"])
            await nothing(sub)
            await question.respond(b"this")
            await until(lambda: bool(answers(raws[0])))
            ask(raws[1], name, request=3)
            await (await sub.next(DEADLINE)).respond(b"that")
            await until(lambda: bool(answers(raws[1])))
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_of_two_who_ask_at_once_one_gets_the_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            c = await nodes["c"].client()
            sub = await c.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "abc"]
            for at in range(1, 10):
                name = kept_by("abc"[at % 3], count=at)
                for raw in raws:
                    ask(raw, name, request=at)
                await (await sub.next(DEADLINE)).respond(b"this")
                await until(lambda at=at: sum(len(r.frames) for r in raws) == 3 * at)  # type: ignore[misc]
                assert sum(len(answers(raw)) for raw in raws) == at
                codes = [code for raw in raws for code in raw.codes() if code]
                assert codes == ["RS_EXISTS"] * 2 * at
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_nobody_or_nobody_with_credit_is_told_at_once_and_a_timeout_by_the_node(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            await refused("NO_CONSUMERS", a.request("news", b"what?"))
            sub = await b.subscribe("news", prefetch=1)
            await nodes.know(1)
            await refused("RS_TIMEOUT", a.request("news", b"what?", timeout=0.1))
            await until(lambda: nodes["a"].believes() == [0])
            await refused("CONSUMERS_BUSY", a.request("news", b"what?"))
            await refused("RS_GONE", (await sub.next(DEADLINE)).respond(b"late"))
            for member in nodes.members.values():
                assert not member.events.responding._awaited
                await until(lambda member=member: not len(member.events.responding.names))  # type: ignore[misc]

    run(main())


def test_rs_ends_with_who_asked_wherever_it_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raw = await Raw.dial(nodes["a"].running)
            for at, keeper in enumerate("abc"):
                ask(raw, kept_by(keeper), request=at + 1)
            questions = await take(sub, 3)
            assert len(nodes["c"].events.responding.names) == 1
            raw.connection.close()
            await until(lambda: not nodes["a"].events.responding._awaited)
            for question in questions:
                await refused("RS_GONE", question.respond(b"this"))
            await until(lambda: not len(nodes["c"].events.responding.names))

    run(main())


def test_rs_many_requests_over_all_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            clients = [await nodes[name].client() for name in "abc"]
            subs = [await client.subscribe("news", group="g") for client in clients]
            await nodes.know(3)

            async def serve(sub: Subscription) -> None:
                async for message in sub:
                    await message.respond(message.payload.upper(), confirm=False)

            serving = [asyncio.create_task(serve(sub)) for sub in subs]
            asked = [f"{at}-{n}" for n in range(100) for at in range(3)]
            found = await asyncio.gather(
                *(clients[int(one[0])].request("news", f"q{one}") for one in asked)
            )
            assert found == [f"Q{one}".encode() for one in asked]
            for task in serving:
                task.cancel()

    run(main())


@pytest.mark.parametrize("keeper", ["a", "b", "c"])
def test_rs_answered_through_a_node_that_never_heard_the_request(
    tmp_path: Path, keeper: str
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b, c = await nodes["b"].client(), await nodes["c"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by(keeper))
            question = await sub.next(DEADLINE)
            await c.respond(question.response, b"from elsewhere")
            await until(lambda: bool(answers(raw)))
            await refused("RS_GONE", c.respond(question.response, b"again"))
            await refused("RS_GONE", question.respond(b"too late"))
            await refused("RS_GONE", c.respond("nobody-asked", b"x"))
            raw.connection.close()

    run(main())


def test_rs_a_keeper_that_dies_is_replaced_while_the_name_is_reserved(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            nodes["c"].deaf.add("Reserve")
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by("c"))
            await until(lambda: nodes["c"].heard["Reserve"] == 1)
            await nodes.lose("c")
            await (await sub.next(DEADLINE)).respond(b"this")
            await until(lambda: bool(answers(raw)))
            raw.connection.close()

    run(main())


def test_rs_a_keeper_that_dies_leaves_its_names_to_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "ab"]
            names = [
                name for at in range(1, 9) if keeper_of(name := kept_by("c", count=at), "ab") == "b"
            ]
            ask(raws[0], names[0])
            question = await sub.next(DEADLINE)
            await nodes.lose("c")
            await until(lambda: nodes["b"].events.responding.names.home(names[0]) == "a")
            ask(raws[1], names[0])
            await until(lambda: raws[1].codes() == ["RS_EXISTS"])
            await question.respond(b"this")
            await until(lambda: bool(answers(raws[0])))
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_a_keeper_that_comes_hears_of_the_names_that_are_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "ab"]
            ask(raws[0], kept_by("c"))
            question = await sub.next(DEADLINE)
            names = nodes["c"].events.responding.names
            for one, other in ("ca", "ac"):
                await nodes[one].cut(other)
                if one == "c":
                    await until(lambda: names.home(question.response) is None)
                await nodes.whole()
                await until(lambda: names.home(question.response) == "a")
            ask(raws[1], kept_by("c"))
            await until(lambda: raws[1].codes() == ["RS_EXISTS"])
            await question.respond(b"this")
            await until(lambda: bool(answers(raws[0])) and not len(names))
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_a_keeper_that_does_not_answer_refuses_the_request_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding_module, "ANSWER_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            nodes["c"].deaf |= {"Reserve", "Reply"}
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by("c"))
            ask(raw, kept_by("a"), request=2)  # others go on
            question = await sub.next(DEADLINE)
            assert question.response == kept_by("a")
            await until(lambda: raw.codes() == ["UNREACHABLE"])
            assert nodes["a"].node.refused["UNREACHABLE"] == 1
            assert kept_by("c") not in nodes["a"].node.responses
            await refused("UNREACHABLE", b.respond(kept_by("c"), b"x"))
            await question.respond(b"this")
            await until(lambda: bool(answers(raw)))
            raw.connection.close()

    run(main())


def test_rs_who_leaves_while_the_name_is_reserved_asks_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            nodes["a"].deaf.add("Reserved")
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by("c"))
            await until(lambda: nodes["a"].heard["Reserved"] == 1)
            raw.connection.close()
            await until(lambda: not len(nodes["c"].events.responding.names))
            await nodes["a"].cut("c")  # by which it would choose again
            await nodes.whole()
            await nothing(sub)

    run(main())


def test_rs_an_answer_for_a_node_that_is_gone_is_not_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raw = await Raw.dial(nodes["a"].running)
            for at, keeper in enumerate("bc"):
                ask(raw, kept_by(keeper), request=at + 1)
            questions = await take(sub, 2)
            nodes["a"].deaf.add("Reply")
            answer = asyncio.create_task(questions[0].respond(b"this"))
            await until(lambda: nodes["a"].heard["Reply"] == 1)
            await nodes.lose("a")
            await refused("UNREACHABLE", answer)  # it may have come
            await nodes.know(1)
            await refused("RS_GONE", questions[1].respond(b"that"))

    run(main())
