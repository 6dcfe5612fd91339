"""A stand-in for the Hugging Face Hub, with one dataset `me/repo` in memory: what its file system asks for, no more."""

import base64
import hashlib
import json
import threading
from io import BytesIO
from pathlib import PurePosixPath

import pytest
from huggingface_hub import HfFileSystem, constants

COMMIT = "a" * 40
API = "/api/datasets/me/repo"


def hub_of(files):
    """The application, over files by name."""
    flask = pytest.importorskip("flask", reason="flask is not installed")
    app = flask.Flask("hub")

    def about(place):
        if place not in files:
            return {"type": "directory", "path": place, "size": 0, "oid": COMMIT}
        content = files[place]
        return {"type": "file", "path": place, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    @app.get("/datasets/me/repo/resolve/<_>/<path:name>")
    def resolve(_, name):
        if name not in files:
            return "", 404, {"X-Error-Code": "EntryNotFound"}
        answer = flask.send_file(BytesIO(files[name]), "application/octet-stream", etag="x")  # ranges of it, too
        answer.headers["X-Repo-Commit"] = COMMIT
        return answer

    @app.get(f"{API}/tree/<_>", defaults={"folder": ""})
    @app.get(f"{API}/tree/<_>/<path:folder>")
    def tree(_, folder):
        top, deep = PurePosixPath(folder), flask.request.args.get("recursive", "").lower() == "true"
        places = {place for name in map(PurePosixPath, files) for place in (name, *name.parents)}
        found = [place for place in sorted(places) if top in place.parents and (deep or place.parent == top)]
        return [about(str(place)) for place in found] if found else ("", 404, {"X-Error-Code": "EntryNotFound"})

    @app.post(f"{API}/paths-info/<_>")
    def paths_info(_):
        asked = flask.request.form.getlist("paths") or flask.request.get_json()["paths"]
        return [about(name) for name in asked if name in files]

    @app.post(f"{API}/preupload/<_>")
    def preupload(_):
        asked = flask.request.get_json()["files"]
        return {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]}

    @app.post(f"{API}/commit/<_>")
    def commit(_):
        for line in map(json.loads, flask.request.data.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        return {
            "success": True,
            "commitOid": COMMIT,
            "commitUrl": f"{flask.request.host_url}datasets/me/repo/commit/{COMMIT}",
        }

    @app.get(API)
    @app.get(f"{API}/revision/<_>")
    def dataset(_=None):
        return {"id": "me/repo", "sha": COMMIT, "siblings": []}

    return app


@pytest.fixture
def hub(monkeypatch):
    """Address of a folder on a Hub that runs."""
    serving = pytest.importorskip("werkzeug.serving", reason="flask is not installed")
    server = serving.make_server("127.0.0.1", 0, hub_of({}), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, place)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", place)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "nobody's")
    HfFileSystem.clear_instance_cache()
    yield "hf://datasets/me/repo/store"
    HfFileSystem.clear_instance_cache()
    server.shutdown()
