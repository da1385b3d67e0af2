"""A model hub on this machine: the few answers the hub's client asks for, from a folder.

Which files were asked for is kept, so that a test can say what was not downloaded.
"""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class SmallHub:
    """Its address, and the files whose content was sent."""

    address: str
    sent: list[str] = field(default_factory=list)


def _entry(file: pathlib.Path) -> dict[str, object]:
    content = file.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": file.name, "size": len(content), "oid": oid}


@contextlib.contextmanager
def small_hub(name: str, folder: pathlib.Path) -> Iterator[SmallHub]:
    """Serve a folder as the model `name`, at its only commit."""
    hub = SmallHub(address="")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{name}/tree/"):
                self._send(json.dumps([_entry(file) for file in folder.iterdir()]).encode(), True)
                return
            if path.startswith(f"/api/models/{name}"):
                self._send(json.dumps({"id": name, "sha": COMMIT}).encode(), has_body)
                return
            file = folder / path.rpartition("/")[2]
            if not path.startswith(f"/{name}/resolve/") or not file.is_file():
                self.send_error(404)
                return
            if has_body:
                hub.sent.append(file.name)
            self._send(file.read_bytes(), has_body)

        def _send(self, content: bytes, has_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if has_body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Tests print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
