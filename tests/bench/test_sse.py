from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measures import RequestRecord
from bench.sse import ChunkedDecoder, Segment, SseDecoder, StreamError, measure_stream
from tests.bench.sse_server import chunk, event, token_event, usage_event

DONE = event("[DONE]")


def measured(segments: list[Segment], *, chat: bool = False) -> RequestRecord:
    record = RequestRecord(start_s=0.0, n_input=1, n_expected=1)
    measure_stream(record, segments, chat=chat)
    return record


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(i % (len(data) + 1) for i in at)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_events_do_not_depend_on_packet_edges(at: list[int]) -> None:
    chunks, sse = ChunkedDecoder(), SseDecoder()
    framed = b"".join(chunk(token_event(f"é{i}")) for i in range(5)) + chunk(b": ping\n\n" + DONE)
    payloads = [p for piece in cut(framed, at) for p in sse.feed(chunks.feed(piece))]
    assert len(payloads) == 6
    assert payloads[-1] == b"[DONE]"


def test_crlf_events_and_multi_line_data() -> None:
    assert SseDecoder().feed(b"event: x\r\ndata: a\r\ndata:b\r\n\r\n") == [b"a\nb"]


def test_bad_chunk_length() -> None:
    with pytest.raises(StreamError, match="bad chunk length"):
        ChunkedDecoder().feed(b"zz\r\n")


def test_an_event_arrives_with_its_last_byte() -> None:
    first = token_event("a")
    record = measured([(1.0, first[:9]), (2.0, first[9:] + token_event("b")), (3.0, usage_event(2) + DONE)])
    assert record.ok
    assert record.event_s == [2.0, 2.0]
    assert record.n_output == 2


def test_usage_wins_over_the_number_of_events() -> None:
    record = measured([(1.0, token_event("ab") + usage_event(7, n_cached=3) + DONE)])
    assert (record.n_output, record.n_cached, record.counted_events) == (7, 3, False)


def test_without_usage_events_are_counted() -> None:
    record = measured([(1.0, token_event("a") + token_event("") + DONE)])
    assert (record.n_output, record.counted_events) == (2, True)


def test_the_opening_role_of_a_chat_is_no_token() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    word = event({"choices": [{"delta": {"content": "hi"}}]})
    assert measured([(1.0, role), (2.0, word + DONE)], chat=True).event_s == [2.0]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (event({"error": {"message": "replica lost"}}), "replica lost"),
        (token_event("a"), "without \\[DONE\\]"),
        (DONE, "no token"),
        (b"data: {oops\n\n", "unreadable"),
    ],
)
def test_broken_streams_are_errors(body: bytes, why: str) -> None:
    record = measured([(1.0, body)])
    assert not record.ok
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(record.error)
