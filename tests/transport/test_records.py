"""Record batches: what is built is read, and whatever else is given is a `BatchError`."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railgun.transport.records import (
    HEADER,
    MAX_ID_BYTES,
    BatchError,
    Bytes,
    Records,
    ShortBatchError,
    build,
    check,
    cut,
    head,
    patch,
    split,
)

PAYLOADS = st.lists(st.binary(max_size=60), min_size=1, max_size=30)
IDS = st.one_of(st.none(), st.binary(max_size=8), st.binary(min_size=MAX_ID_BYTES, max_size=255))
HEADERS = st.one_of(st.none(), st.binary(max_size=20))


@st.composite
def messages(
    draw: st.DrawFn,
) -> tuple[list[bytes], list[bytes | None] | None, list[bytes | None] | None]:
    payloads = draw(PAYLOADS)
    size = len(payloads)
    ids = draw(st.none() | st.lists(IDS, min_size=size, max_size=size))
    headers = draw(st.none() | st.lists(HEADERS, min_size=size, max_size=size))
    return payloads, ids, headers


def sealed(batch: bytearray) -> bytearray:
    """With checksums that fit, whatever is inside."""
    struct.pack_into("<I", batch, 12, zlib.crc32(memoryview(batch)[HEADER:]))
    struct.pack_into("<I", batch, 8, zlib.crc32(memoryview(batch)[12:HEADER]))
    return batch


@given(messages(), st.integers(0, 1 << 62), st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 62))
def test_what_is_built_is_read(
    given: tuple[list[bytes], list[bytes | None] | None, list[bytes | None] | None],
    base: int,
    epoch: int,
    time: int,
) -> None:
    payloads, ids, headers = given
    batch = build(payloads, ids, headers)
    patch(batch, base, epoch, time)
    found = check(batch)
    assert (found.base, found.epoch, found.time) == (base, epoch, time)
    assert (found.count, found.end, found.size) == (len(payloads), base + len(payloads), len(batch))
    for form in (bytes(batch), batch, memoryview(batch)):
        records = Records(form)
        expected_ids = [each or None for each in ids or [None] * len(payloads)]
        expected_headers = [each or b"" for each in headers or [None] * len(payloads)]
        assert len(records) == records.count == len(payloads)
        assert records.payloads() == payloads
        assert records.ids() == expected_ids
        assert records.has_ids == any(expected_ids)
        assert records.all_headers() == expected_headers
        assert [records.payload(i) for i in range(len(payloads))] == payloads
        assert [records.id(i) for i in range(len(payloads))] == expected_ids
        assert [records.headers(i) for i in range(len(payloads))] == expected_headers


@given(messages(), st.data())
def test_what_is_cut_is_a_batch_of_those_messages(
    given: tuple[list[bytes], list[bytes | None] | None, list[bytes | None] | None],
    data: st.DataObject,
) -> None:
    batch = build(*given)
    patch(batch, 100, 3, 5)
    first = data.draw(st.integers(0, len(given[0]) - 1))
    end = data.draw(st.integers(first + 1, len(given[0])))
    piece = cut(batch, 100 + first, 100 + end)
    assert check(piece).base == 100 + first
    whole, part = Records(batch), Records(piece)
    assert (part.epoch, part.time, part.end) == (3, 5, 100 + end)
    assert part.payloads() == whole.payloads()[first:end]
    assert part.ids() == whole.ids()[first:end]
    assert part.all_headers() == whole.all_headers()[first:end]


def test_the_whole_is_cut_without_a_copy() -> None:
    batch = build([b"a", b"b"])
    assert cut(batch, 0, 2) is batch


@pytest.mark.parametrize(("first", "end"), [(-1, 1), (0, 0), (1, 1), (2, 1), (0, 3), (2, 3)])
def test_what_is_not_in_a_batch_is_not_cut_from_it(first: int, end: int) -> None:
    with pytest.raises(BatchError, match="cannot be cut from the batch of 0 to 2"):
        cut(build([b"a", b"b"]), first, end)


def everything(data: Bytes) -> None:
    """All that reads a batch."""
    records = Records(data)
    records.payloads()
    records.ids()
    records.all_headers()
    [records.payload(i) + (records.id(i) or b"") + records.headers(i) for i in range(len(records))]
    cut(data, records.base, records.base + 1)
    split(data)


@given(messages(), st.data())
def test_no_bit_of_a_batch_flips_unseen(
    given: tuple[list[bytes], list[bytes | None] | None, list[bytes | None] | None],
    data: st.DataObject,
) -> None:
    batch = build(*given)
    bit = data.draw(st.integers(0, 8 * len(batch) - 1))
    batch[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BatchError):
        check(batch)


def test_no_bit_of_the_header_flips_unseen() -> None:
    whole = build([b"one", b"two"], [b"1", b"2"], [b"{}", b"{}"])
    for bit in range(8 * len(whole)):
        batch = bytearray(whole)
        batch[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BatchError):
            check(batch)


@given(messages(), st.data())
def test_a_cut_batch_is_short(
    given: tuple[list[bytes], list[bytes | None] | None, list[bytes | None] | None],
    data: st.DataObject,
) -> None:
    batch = build(*given)
    size = data.draw(st.integers(0, len(batch) - 1))
    for read in (check, Records, split):
        if read is split and not size:
            continue
        with pytest.raises(ShortBatchError):
            read(batch[:size])
    with pytest.raises(BatchError, match="something follows it"):
        check(batch + b"\0")


@given(st.binary(max_size=200))
def test_garbage_is_a_batch_error(garbage: bytes) -> None:
    for data in (garbage, b"RGB1" + garbage):
        for read in (check, head, Records):
            with pytest.raises(BatchError):
                read(data)


@given(messages(), st.data())
def test_a_liar_with_good_checksums_gets_no_other_error(
    given: tuple[list[bytes], list[bytes | None] | None, list[bytes | None] | None],
    data: st.DataObject,
) -> None:
    batch = build(*given)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(batch) - 1) | st.integers(4, 63))
        batch[at] = data.draw(st.integers(0, 255))
    sealed(batch)
    for read in (check, everything):
        try:
            read(batch)
        except BatchError:
            pass
        else:
            assert len(Records(batch).payloads()) == Records(batch).count


@pytest.mark.parametrize(
    ("field", "form", "value", "told"),
    [
        (40, "<I", 0, "is invalid"),
        (40, "<I", 1 << 31, "is invalid"),
        (16, "<Q", (1 << 64) - 1, "is invalid"),
        (44, "<H", 4, "only nodes set"),
        (44, "<H", 32, "later version"),
        (46, "<H", 1, "later version"),
        (56, "<Q", 1, "later version"),
        (64, "<I", 9, "not in order"),
        (68, "<I", 1, "do not fill"),
    ],
)
def test_a_header_that_cannot_be_is_told(field: int, form: str, value: int, told: str) -> None:
    batch = build([b"abc", b"def"])
    struct.pack_into(form, batch, field, value)
    with pytest.raises(BatchError, match=told):
        check(sealed(batch))


def test_a_batch_too_large_is_told_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railgun.transport.records.LARGEST", 1000)
    assert len(build([bytes(932)])) == 1000
    for payloads in ([bytes(933)], [bytes(1001)], [bytes(1)] * 500):
        with pytest.raises(BatchError, match="build smaller ones"):
            build(payloads)


def test_messages_that_cannot_be_a_batch_are_told() -> None:
    with pytest.raises(BatchError, match="at least one message"):
        build([])
    with pytest.raises(BatchError, match="2 payloads, but 1 IDs"):
        build([b"", b""], ids=[b"a"])
    with pytest.raises(BatchError, match="the ID of message 1 has 256 bytes"):
        build([b"", b""], ids=[b"a", bytes(256)])
    with pytest.raises(BatchError, match="are bytes"):
        build(["text"])  # type: ignore[list-item]
    with pytest.raises(BatchError, match="is not bytes"):
        build([1])  # type: ignore[list-item]
    with pytest.raises(BatchError, match="no batch has base -1"):
        patch(build([b"a"]), -1, 0, 0)
    with pytest.raises(BatchError, match="no message 1"):
        Records(build([b"a"])).payload(1)


def test_batches_one_after_the_other_are_split() -> None:
    batches = [build([b"a"]), build([b"b", b"c"]), build([b""])]
    assert split(b"".join(batches)) == batches
    assert split(b"") == []
    with pytest.raises(BatchError, match="at byte 69"):
        split(batches[0] + b"garbage" * 20)
