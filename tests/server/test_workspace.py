from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.server.provenance import Provenance
from retrieve_spec.server.workspace import Workspace, forget_workspace, memory_folder
from retrieve_spec.server.workspace_files import looks_secret
from retrieve_spec.server.workspace_store import WorkspaceStore, held_documents

CODE = "def compute_total(items):\n    return sum(item.price for item in items)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "w"
    files = {
        "a.py": CODE,
        "sub/b.py": "x = 1\n",
        "sub/.gitignore": "!keep.log\nlocal.py\n",
        "sub/keep.log": "kept\n",
        "sub/local.py": "ignored = 1\n",
        ".gitignore": "*.log\nbuilt/\n",
        "c.log": "ignored\n",
        "built/d.py": "ignored\n",
        "node_modules/e.js": "ignored\n",
        ".env": "PASSWORD=1\n",
        "id_rsa": "x\n",
        "settings.py": "KEY = '-----BEGIN RSA PRIVATE KEY-----'\n",
        "binary.bin": "a\0b",
        "large.py": "x" * 300_000,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "link.py").symlink_to("/etc/hostname")
    return root.resolve()


def names(workspace):
    return {str(path.relative_to(workspace.roots[0])) for path in workspace.texts}


def test_what_counts(folder):
    workspace = Workspace([folder], ServeConfig())
    workspace.scan()
    assert names(workspace) == {"a.py", "sub/b.py", "sub/.gitignore", "sub/keep.log", ".gitignore"}


@pytest.mark.parametrize(
    "name", [".env", ".env.local", "server.pem", "id_ed25519", "credentials", "x.tfstate", ".npmrc"]
)
def test_secret_names(name):
    assert looks_secret(Path(name))


def test_secret_contents():
    assert looks_secret(Path("a.py"), "token = 'ghp_" + "a" * 36 + "'")
    assert looks_secret(Path("a.py"), "AKIA" + "A" * 16)
    assert not looks_secret(Path("environment.py"), "token = read_token()\n")


def test_changes_are_followed(folder):
    workspace = Workspace([folder], ServeConfig())
    workspace.scan()
    (folder / "a.py").write_text("def other_name(items):\n    pass\n")
    assert workspace.update([folder / "a.py"])
    assert not workspace.update([folder / "a.py"])
    assert workspace.find("def compute_tot", 4) == []
    assert workspace.find("def other_na", 4)[0].text.startswith("me(items)")
    (folder / "a.py").unlink()
    assert workspace.update([folder / "a.py"])
    assert "a.py" not in names(workspace)
    (folder / ".env").write_text("PASSWORD=2\n")
    assert not workspace.update([folder / ".env", folder / "sub/local.py", folder.parent / "elsewhere.py"])
    (folder / ".gitignore").write_text("sub/\n")
    workspace.update([folder / ".gitignore"])
    assert names(workspace) == {".gitignore", "c.log"} | ({"built/d.py"} & names(workspace))


def test_bounds(folder):
    workspace = Workspace([folder], ServeConfig(workspace_chars=len(CODE)))
    workspace.scan()
    assert workspace.chars <= len(CODE)
    few = Workspace([folder], ServeConfig(workspace_files=2))
    few.scan()
    assert len(few.texts) <= 2


def test_watching(folder):
    workspace = Workspace([folder], ServeConfig())
    workspace.start()
    try:
        assert workspace.indexed.wait(60)
        time.sleep(0.3)
        limit = time.monotonic() + 60
        while "new.py" not in names(workspace):
            (folder / "new.py").write_text(f"fresh_name = {time.monotonic()}\n")
            time.sleep(0.2)
            assert time.monotonic() < limit, "the new file was not noticed"
    finally:
        workspace.close()


def test_a_workspace_must_be_a_folder(tmp_path):
    with pytest.raises(ServeError, match="folder"):
        Workspace([tmp_path / "nowhere"], ServeConfig())


def test_store_follows_and_is_forgotten(folder, tokenizer):
    attached = []
    workspace = Workspace([folder], ServeConfig())
    workspace.scan()
    store = WorkspaceStore(workspace, tokenizer, attached.append, every_s=0.0)
    assert store.follow(workspace)
    assert {Path(p).name for p in held_documents(attached[-1])} == {"a.py", "b.py", ".gitignore", "keep.log"}
    assert memory_folder([folder]).stat().st_mode & 0o077 == 0
    (folder / "a.py").write_text("something_else = 1\n" * 5)
    (folder / "sub/b.py").unlink()
    workspace.update([folder / "a.py", folder / "sub/b.py"])
    store.follow(workspace)
    assert {Path(p).name for p in held_documents(attached[-1])} == {"a.py", ".gitignore", "keep.log"}
    again = WorkspaceStore(workspace, tokenizer, attached.append)
    again.sync()
    assert attached[-1].manifest.documents == attached[-2].manifest.documents
    workspace.forget()
    store.follow(workspace)
    assert attached[-1] is None
    assert not memory_folder([folder]).exists()


def test_forget_from_outside(folder, tokenizer):
    workspace = Workspace([folder], ServeConfig())
    workspace.scan()
    WorkspaceStore(workspace, tokenizer, lambda store: None).sync()
    assert forget_workspace([folder])
    assert not forget_workspace([folder])


def test_an_interrupted_store_is_built_again(folder, tokenizer):
    attached = []
    workspace = Workspace([folder], ServeConfig())
    workspace.scan()
    memory_folder([folder]).mkdir(parents=True)
    (memory_folder([folder]) / "manifest.json").write_text("{")
    WorkspaceStore(workspace, tokenizer, attached.append).sync()
    assert attached[-1].manifest.documents > 0


def test_provenance_names_file_line_and_licence(folder, tokenizer):
    from retrieve_spec.server.jobs import Completion
    from retrieve_spec.server.schemas import InfillRequest

    (folder / "LICENSE").write_text("MIT License\n\nCopyright\n")
    attached = []
    workspace = Workspace([folder], ServeConfig())
    workspace.scan()
    WorkspaceStore(workspace, tokenizer, attached.append).sync()
    request = InfillRequest(input_prefix="", input_suffix="", provenance=True)
    done = Completion(text="    return sum(item.price for item in items)\n    unheard_of_line_of_code()\n")
    found = Provenance([], workspace).of(request, done)["provenance"]
    place = {"file": str(folder / "a.py"), "line": 2, "licence": "MIT License", "source": "workspace"}
    assert found[0] == {"line": 1, "text": "return sum(item.price for item in items)", "places": [place]}
    assert found[1]["places"] == []
    (place,) = Provenance(attached).of(request, done)["provenance"][0]["places"]
    assert place["file"] == "a.py"
    assert Provenance([], workspace).of(InfillRequest(input_prefix="", input_suffix=""), done) == {}


def test_what_is_found_does_not_depend_on_how_the_files_are_grouped(tmp_path, monkeypatch):
    rng = random.Random(5)
    words = ["alpha", "beta", "gamma(", "delta", ")", " = ", "\n", "    ", "if "]
    for i in range(30):
        (tmp_path / f"f{i}.py").write_text("".join(rng.choices(words, k=60)))
    lefts = ["".join(rng.choices(words, k=5)) for _ in range(200)]
    found = []
    for chars in (100, 1_000, 10_000_000):
        monkeypatch.setattr("retrieve_spec.server.workspace._SEGMENT_CHARS", chars)
        workspace = Workspace([tmp_path], ServeConfig())
        workspace.scan()
        found.append([[max((h.matched for h in workspace.find(left, k)), default=0) for k in (1, 4)] for left in lefts])
    assert found[0] == found[1] == found[2]
    assert all(one == four for one, four in found[0])
    assert sum(one > 0 for one, _ in found[0]) > 100
