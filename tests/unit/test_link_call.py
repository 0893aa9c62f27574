"""One call's view of its events, and the group's inbox."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ErrorCode, RequestError
from common.params import SamplingParams
from common.wire import Accepted, Failed, Finished, Tokens, Usage
from web.link.call import Call, CallGroup, CallSpec, ClientGone

pytestmark = pytest.mark.timeout(30)


class Owner:
    """A registry that only notes what it is asked."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.closed: list[CallGroup] = []

    def cancel_calls(self, calls: list[Call], reason: str) -> None:
        self.cancelled += [call.id for call in calls]

    def close_group(self, group: CallGroup, reason: str) -> None:
        self.closed.append(group)


def make_group(count: int = 1) -> CallGroup:
    spec = CallSpec([1, 2, 3], SamplingParams(), 100)
    return CallGroup(Owner(), [(f"r{index}", spec) for index in range(count)])


def texts(group: CallGroup) -> list[list[int]]:
    """The token ids of each call, from a group whose calls have all ended."""
    out: list[list[int]] = [[] for _ in group.calls]
    for item in group.events():
        if item and isinstance(item[1], Tokens):
            out[item[0]] += item[1].ids
    return out


@given(cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=40))
def test_any_order_of_overlapping_pieces_gives_each_token_once(cuts: list[tuple[int, int]]) -> None:
    """Repeated, overlapping and early pieces must neither repeat nor skip a token; what is early is reported."""
    group, ids = make_group(), list(range(30))
    call = group.calls[0]
    for start, length in cuts:
        piece = ids[start : start + length]
        before = call.num_received
        whole = call.take(Tokens("r0", start, list(piece)))
        assert whole == (start <= before)
        assert call.num_received == (max(before, start + len(piece)) if whole else before)
    call.take(Tokens("r0", call.num_received, ids[call.num_received :]))
    assert call.take(Finished("r0", "length", Usage(3, 30)))
    assert texts(group) == [ids]


def test_the_end_waits_for_missing_tokens() -> None:
    """A terminal event that overtakes lost tokens must not end a truncated answer as if it were whole."""
    group = make_group()
    call = group.calls[0]
    call.take(Tokens("r0", 0, [1, 2]))
    assert not call.take(Finished("r0", "stop", Usage(3, 4)))
    assert not call.done
    assert call.take(Tokens("r0", 2, [3, 4]))
    assert call.take(Finished("r0", "stop", Usage(3, 4)))
    assert texts(group) == [[1, 2, 3, 4]]


def test_one_terminal_event_only() -> None:
    """A repeated end, or another one after it, is not passed on."""
    group = make_group()
    call = group.calls[0]
    call.take(Finished("r0", "stop", Usage(3, 0)))
    call.take(Finished("r0", "stop", Usage(3, 0)))
    call.take(Failed("r0", ErrorCode.INTERNAL_ERROR, "late"))
    assert [event for _, event in group.events()] == [Finished("r0", "stop", Usage(3, 0))]  # type: ignore[misc]


def test_events_that_came_before_accepted_was_asked_for_are_kept() -> None:
    """A request that is over before the route looks has lost nothing."""
    group = make_group()
    call = group.calls[0]
    for event in (Accepted("r0"), Tokens("r0", 0, [7]), Finished("r0", "length", Usage(3, 1))):
        call.take(event)
    group.wait_accepted()
    assert texts(group) == [[7]]


def test_refusal_is_raised_before_anything_is_sent() -> None:
    """A refused call becomes a real status, even when its siblings were accepted."""
    group = make_group(2)
    group.calls[0].take(Accepted("r0"))
    group.calls[1].take(Failed("r1", ErrorCode.QUEUE_FULL, "full"))
    with pytest.raises(RequestError) as caught:
        group.wait_accepted()
    assert caught.value.code == ErrorCode.QUEUE_FULL


def test_slow_reader_costs_one_piece_a_call() -> None:
    """Tokens that nobody takes are merged, so memory follows the tokens and not the number of messages."""
    group = make_group(2)
    for pos in range(1000):
        for call in group.calls:
            call.take(Tokens(call.id, pos, [pos]))
    for call in group.calls:
        call.take(Finished(call.id, "length", Usage(3, 1000)))
    events = list(group.events())
    assert len(events) == 4
    assert [event.ids for _, event in events if isinstance(event, Tokens)] == [list(range(1000))] * 2  # type: ignore[misc]


def test_waiter_wakes_when_the_client_leaves() -> None:
    """A request that waits for its first event ends at once when its client is gone, and everything of it is closed."""
    group = make_group(2)
    threading.Timer(0.05, group.client_gone).start()
    with pytest.raises(ClientGone):
        group.wait_accepted()
    with pytest.raises(ClientGone):
        list(group.events())
    assert group._owner.closed == [group]  # type: ignore[attr-defined]


def test_ping_is_a_none_between_events() -> None:
    """A ping wakes a silent stream and carries nothing; with an event to give it is dropped."""
    group = make_group()
    events = group.events()
    threading.Timer(0.05, group.ping).start()
    assert next(events) is None
    group.calls[0].take(Tokens("r0", 0, [1]))
    group.ping()
    assert next(events) == (0, Tokens("r0", 0, [1]))
    group.calls[0].take(Finished("r0", "stop", Usage(3, 1)))
    assert len(list(events)) == 1


def test_filling_and_taking_at_once_loses_nothing() -> None:
    """The reader fills while the route takes, on two threads, through the same inbox."""
    group = make_group(3)

    def fill() -> None:
        for pos in range(3000):
            for call in group.calls:
                call.take(Tokens(call.id, pos, [pos]))
        for call in group.calls:
            call.take(Finished(call.id, "length", Usage(3, 3000)))

    thread = threading.Thread(target=fill)
    thread.start()
    group.wait_accepted()
    assert texts(group) == [list(range(3000))] * 3
    thread.join(10)
