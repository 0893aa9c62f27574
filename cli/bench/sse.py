"""Server-sent events, parsed from bytes as they arrive.

Owns the line and event framing of one stream; pure, no I/O, no clock. Never interprets what an event says.
Follows "Parsing an event stream" of the WHATWG HTML standard: lines end with LF, CR or CRLF, a line that starts with a
colon is a comment, several `data:` lines join with LF, an empty line ends the event, and an event that the end of the
stream cuts off is never delivered.
"""

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class SSEEvent(NamedTuple):
    """One complete event: its `event:` name ("" when it has none) and its joined `data:` lines."""

    name: str
    data: str


class SSEParser:
    """Turns the bytes of one stream into events; a line, a CRLF or a character may be split over any two reads."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []
        self._name = ""
        self._at_start = True

    def feed(self, data: bytes) -> list[SSEEvent]:
        """Return the events that `data` completes, in order."""
        self._buffer += data
        if self._at_start:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []
            self._buffer = self._buffer.removeprefix(_BOM)
            self._at_start = False
        return [event for line in self._take_lines() if (event := self._read_line(line)) is not None]

    @property
    def truncated(self) -> bool:
        """True when the stream, if it ended now, would cut an event in two."""
        return bool(self._data or self._buffer.strip(b"\r\n"))

    def _take_lines(self) -> list[bytes]:
        """Cut every complete line from the buffer. A CR at its very end waits: the next read may start with its LF."""
        lines, start = [], 0
        for match in _LINE_END.finditer(self._buffer):
            if match.group() == b"\r" and match.end() == len(self._buffer):
                break
            lines.append(self._buffer[start : match.start()])
            start = match.end()
        self._buffer = self._buffer[start:]
        return lines

    def _read_line(self, raw: bytes) -> SSEEvent | None:
        if not raw:
            return self._dispatch()
        field, _, value = raw.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None

    def _dispatch(self) -> SSEEvent | None:
        name, data = self._name, self._data
        self._name, self._data = "", []
        return SSEEvent(name, "\n".join(data)) if data else None
