"""A stand-in for the Hugging Face Hub, with one dataset `me/repo` in memory: what its file system asks for, no more."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "a" * 40


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def log_message(self, *_):
        """Say nothing."""

    def _file(self, name):
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _tree(self, folder, recursive):
        start, found = f"{folder}/" if folder else "", {}
        for name in sorted(name for name in self.files if name.startswith(start)):
            parts = name[len(start) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                place = start + "/".join(parts[:depth])
                found[place] = {"type": "directory", "path": place, "oid": COMMIT, "size": 0}
            if recursive or len(parts) == 1:
                found[name] = self._file(name)
        return list(found.values())

    def _commit(self, lines):
        for line in map(json.loads, lines):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
            else:
                assert line["key"] == "header", line
        place = f"http://{self.headers['Host']}/datasets/me/repo/commit/{COMMIT}"
        return {"success": True, "commitOid": COMMIT, "commitUrl": place}

    def _answer(self, path, query, body):
        """Status and content."""
        if found := re.fullmatch(r"/datasets/me/repo/resolve/[^/]+/(.*)", path):
            return (200, self.files[found[1]]) if found[1] in self.files else (404, b"")
        if not path.startswith("/api/datasets/me/repo"):
            return 404, b""
        kind, _, place = path.removeprefix("/api/datasets/me/repo").lstrip("/").partition("/")
        if kind == "tree":
            tree = self._tree(place.partition("/")[2], query.get("recursive", [""])[0].lower() == "true")
            return (200, tree) if tree else (404, b"")
        if kind == "paths-info":
            asked = parse_qs(body.decode())["paths"] if not body.startswith(b"{") else json.loads(body)["paths"]
            return 200, [self._file(name) for name in asked if name in self.files]
        if kind == "preupload":
            asked = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
        if kind == "commit":
            return 200, self._commit(body.splitlines())
        return 200, {"id": "me/repo", "sha": COMMIT, "siblings": []}

    def _respond(self):
        asked = urlparse(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, content = self._answer(unquote(asked.path), parse_qs(asked.query), body)
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"ETag": '"x"', "X-Repo-Commit": COMMIT}
        if status == 404:
            headers["X-Error-Code"] = "EntryNotFound"
        elif part := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            status, content = 206, content[first : last + 1]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_HEAD = _respond


@contextmanager
def hub():
    """A hub that runs; yields where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"files": {}}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
