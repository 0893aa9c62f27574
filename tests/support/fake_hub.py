"""A model hub on loopback, as far as huggingface_hub asks it: a repository's files, ranges, and the ways it says no."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {"owner/missing": (401, "RepoNotFound"), "owner/gated": (403, "GatedRepo")}


@dataclass
class FakeHub:
    """repositories: name → file → content. cut: files whose first download breaks off half-way. fetched: GETs."""

    repositories: dict[str, dict[str, bytes]]
    cut: set[str] = field(default_factory=set)
    fetched: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub while the context lasts; `hub.url` says where."""

    class Handler(_Handler):
        served = hub

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(http.server.BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/(\w+/[\w-]+)(?:/revision/\w+)?", path):
            self._info(match[1])
        elif match := re.fullmatch(r"/api/models/(\w+/[\w-]+)/tree/\w+", path):
            self._tree(match[1])
        elif match := re.fullmatch(r"/(\w+/[\w-]+)/resolve/\w+/(.+)", path):
            self._file(match[1], match[2])
        else:
            self._send(404, b"")

    def _refused(self, repo: str) -> bool:
        if repo in self.served.repositories:
            return False
        status, code = REFUSALS[repo]
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": f"{code} for {repo}"})
        return True

    def _info(self, repo: str) -> None:
        if not self._refused(repo):
            siblings = [{"rfilename": name} for name in self.served.repositories[repo]]
            self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})

    def _tree(self, repo: str) -> None:
        if not self._refused(repo):
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.served.repositories[repo].items()
                ]
            )

    def _file(self, repo: str, name: str) -> None:
        if self._refused(repo):
            return
        data = self.served.repositories[repo].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self._send(200, data, headers)
            return
        wanted = self.headers.get("Range", "")
        self.served.fetched.append((name, wanted))
        if name in self.served.cut:
            self.served.cut.discard(name)
            self._send(200, data, headers, sent=len(data) // 2)
        elif match := re.fullmatch(r"bytes=(\d+)-", wanted):
            start = int(match[1])
            content_range = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], {**headers, "Content-Range": content_range})
        else:
            self._send(200, data, headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        if sent is not None:
            self.close_connection = True
