"""Which receive took which send, from the events of a run. It draws nothing by itself."""

from ..results import Event


def messages(events: tuple[Event, ...]) -> list[tuple[Event, Event]]:
    """The sends with the receives that took them: same pair, tag and count."""
    receives: dict[tuple, Event] = {
        (e.group, e.peer, e.rank, e.tag, e.seq): e for e in events if e.op == "recv" and e.peer is not None
    }
    pairs = []
    for event in events:
        if event.op == "send":
            taken = receives.get((event.group, event.rank, event.peer, event.tag, event.seq))
            if taken is not None:
                pairs.append((event, taken))
    return pairs
