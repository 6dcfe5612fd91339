"""Random changes of a folder: a store that followed each says what one says that reads everything afresh."""

import os
import random
import shutil
import subprocess

import pytest

from retrieve_spec.datastore import sync
from retrieve_spec.datastore.entry_filter import EntryFilter
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import FOLLOWED_BYTES, scan_folder, sync_datastore

ROUNDS = int(os.environ.get("RETRIEVE_SPEC_ROUNDS", "15"))
NAMES = ["a.txt", "b.py", "c.log", "d.jsonl", ".env", "odd\udcff.txt", "a#part1"]
FOLDERS = ["", "s", "s/t", "u/v", "build", "node_modules"]
TEXTS = ["one", "two", "three", "def f(x):\n    return x\n", "ghp_0123456789abcdefghijABCDEFGHIJ012345", "  ", "\0"]
RULES = ["*.log\n", "a.txt\n", "!a.txt\n", "s/\n", "*.py\n!b.py\n", "", "*\n"]


class Folder:
    """A folder that changes at random; files are old, and no two changes have one time."""

    def __init__(self, place, seed, git):
        self.random, self.place, self.root = random.Random(seed), place, place / "repo" / "f"
        self.root.mkdir(parents=True)
        self.top = {"no": None, "own": self.root, "above": self.root.parent}[git]
        self.now = 10**18
        if self.top:
            self.git("init", "-q")
        (self.root / "stays").write_text("this one stays")

    def git(self, *words, folder=None):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a", "-C", str(folder or self.top), *words]
        subprocess.run(command, capture_output=True)

    def some(self, *, folders=False):
        inside = [path for path in sorted(self.root.rglob("*")) if ".git" not in path.parts and path.name != "stays"]
        found = [path for path in inside if (path.is_dir() and not path.is_symlink()) == folders]
        return self.random.choice([self.root, *found] if folders else found or [self.root / "nothing"])

    def age(self, path):
        self.now += self.random.choice([1, 1000, 10**9])
        os.utime(path, ns=(self.now, self.now), follow_symlinks=False)

    def write(self):
        path = self.root / self.random.choice(FOLDERS) / self.random.choice(NAMES)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{self.random.choice(TEXTS)} {self.random.randrange(20)}"
        path.write_text(f'{{"text": "{self.random.randrange(20)}"}}\n' * 2 if path.suffix == ".jsonl" else text)
        self.age(path)

    def overwrite(self):
        path = self.some()
        path.write_bytes(path.read_bytes()[:-1] + self.random.choice([b"x", b"y", b"z"]))
        if self.random.random() < 0.7:
            self.age(path)

    def delete(self):
        self.some().unlink()

    def move(self):
        os.replace(self.some(), self.some(folders=True) / self.random.choice(NAMES))

    def rename_folder(self):
        self.some(folders=True).rename(
            self.some(folders=True) / self.random.choice(["s", "w", "build", "node_modules"])
        )

    def link(self):
        path = self.some()
        path.unlink()
        path.symlink_to(self.random.choice([self.root / "stays", self.place, "nowhere", path.name]))

    def link_folder(self):
        folder, moved = self.some(folders=True), self.place / f"moved-{self.now}"
        if folder != self.root:
            folder.rename(moved)
            folder.symlink_to(moved)

    def ignore(self):
        path = self.some(folders=True) / self.random.choice([".gitignore", ".ignore"])
        path.write_text(self.random.choice(RULES))
        self.age(path)

    def track(self):
        if self.top:
            self.git(*self.random.choice([("add", "-A"), ("add", "-f", "."), ("rm", "-rq", "--cached", ".")]))

    def nest(self):
        folder = self.some(folders=True)
        if (folder / ".git").exists() and folder != self.root:
            shutil.rmtree(folder / ".git")
        else:
            self.git("init", "-q", folder=folder)

    def close(self):
        place = self.some(folders=True) / "pyvenv.cfg"
        if place.parent != self.root:
            place.unlink() if place.exists() else place.touch()

    def change(self):
        kinds = [self.write, self.overwrite, self.delete, self.move, self.rename_folder, self.link, self.link_folder]
        kinds += [self.ignore, self.track, self.nest, self.close]
        for kind in self.random.choices(kinds, [8, 5, 4, 5, 4, 2, 1, 2, 2, 2, 2], k=4):
            try:
                kind()
            except (OSError, RuntimeError, StopIteration, IndexError, shutil.Error):
                continue


@pytest.mark.parametrize("git", ["no", "own", "above"])
def test_a_store_that_followed_every_change_says_what_there_is(tokenizer, tmp_path, monkeypatch, git):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder, store = Folder(tmp_path, ROUNDS, git), tmp_path / "s"
    for _ in range(8):
        folder.write()
    sync_datastore(store, [folder.root], tokenizer, workers=1)
    read = []
    text_hash = sync.text_hash
    for number in range(ROUNDS):
        folder.change()
        monkeypatch.setattr(sync, "text_hash", lambda text: read.append(text) or text_hash(text))
        report = sync_datastore(store, [folder.root], workers=1)
        monkeypatch.setattr(sync, "text_hash", text_hash)
        afresh = scan_folder(Source(str(folder.root), max_bytes=FOLLOWED_BYTES), {}, store)
        said = [(file.path + behind, *rest) for file, one in afresh.items() for behind, *rest in one[3]]
        listed = [name for name, _ in EntryFilter(folder.root).entries()]
        assert len(listed) == len(set(listed)), number
        texts = {name: digest for name, digest, _, _ in said if digest}
        held = {document.path: document.sha256 for document in open_datastore(store).documents()}
        assert len(read_manifest(store).segments) <= sync.MOST_SMALL
        assert set(held.values()) == set(texts.values()) and len(held) == len(set(held.values())), number
        assert held.items() <= texts.items(), number
        left_out = {(name, reason) for name, digest, reason, _ in said if not digest}
        assert {(name, reason) for name, _, reason in report.skipped if reason != "duplicate"} == left_out, number
    assert len(read) < 3 * 4 * ROUNDS  # what did not change is not read
    verify_datastore(store)
