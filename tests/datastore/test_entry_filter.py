"""What may enter a store: git's rules, secrets, links, generated files, encodings."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

from retrieve_spec.datastore import git_rules
from retrieve_spec.datastore.entry_filter import EntryFilter, secret_name, secret_text
from retrieve_spec.datastore.git_rules import Reason


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def git(folder, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments], cwd=folder, check=True, capture_output=True
    )


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A user of its own, whose global ignore file names `*.mine`."""
    home = tmp_path_factory.mktemp("home")
    write(home, {".config/git/ignore": "*.mine\n"})
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with rules of every kind; its folder `work` is what is opened."""
    top = tmp_path.resolve() / "top"
    write(
        top,
        {
            ".gitignore": "*.log\n/work/private/\n",
            "work/a.py": "a = 1\n",
            "work/new.py": "new = 1\n",
            "work/noise.log": "noise\n",
            "work/tracked.log": "tracked\n",
            "work/private/b.py": "b = 1\n",
            "work/excluded.py": "c = 1\n",
            "work/global.mine": "d = 1\n",
            "work/build/kept.py": "tracked = 1\n",
            "work/build/made.py": "made = 1\n",
            "work/sub/.gitignore": "local.py\n!loud.log\n",
            "work/sub/local.py": "e = 1\n",
            "work/sub/loud.log": "f\n",
            "work/ignored_by_rg.py": "g = 1\n",
            "work/.ignore": "ignored_by_rg.py\n",
            "work/node_modules/x.js": "x\n",
            "outside.py": "h = 1\n",
        },
    )
    git(top, "init", "-q")
    write(top, {".git/info/exclude": "excluded.py\n"})
    git(top, "add", "-f", "work/a.py", "work/tracked.log", "work/build/kept.py")
    inner = top / "work" / "inner"
    write(inner, {"in.py": "i = 1\n", "in.log": "j\n", ".gitignore": "hidden.py\n", "hidden.py": "k = 1\n"})
    git(inner, "init", "-q")
    return top / "work"


ENTERS = {
    "a.py", "new.py", "tracked.log", "build/kept.py", "build/made.py", "sub/.gitignore", "sub/loud.log", ".ignore",
    "inner/in.py", "inner/.gitignore",
}  # fmt: skip


def listed(filter):
    return {Path(name): said for name, said in filter.entries()}


def passed(found):
    return {path for path, said in found.items() if not isinstance(said, Reason)}


def entering(filter):
    return {str(path.relative_to(filter.roots[0])) for path in passed(listed(filter))}


def test_what_git_ignores_stays_out_through_any_of_its_files(checkout):
    filter = EntryFilter([checkout])
    # `in.log` is no business of the outer checkout's rules
    assert entering(filter) == ENTERS | {"inner/in.log"}


def test_where_git_cannot_be_asked_its_files_are_read(checkout, monkeypatch):
    monkeypatch.setattr(git_rules, "_git", lambda *_: None)
    filter = EntryFilter([checkout])
    # without git nobody knows what is tracked: fewer files enter, none more
    assert entering(filter) == (ENTERS | {"inner/in.log"}) - {"tracked.log", "build/kept.py", "build/made.py"}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_checkout_cannot_make_git_run_its_programs(checkout, tmp_path):
    ran = tmp_path / "ran"
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    git(checkout, "config", "core.fsmonitor", str(program))
    assert "a.py" in entering(EntryFilter([checkout]))
    assert not ran.exists()


def test_variables_of_a_hook_do_not_lead_elsewhere(checkout, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert "a.py" in entering(EntryFilter([checkout]))


def test_nothing_behind_a_link_enters(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    write(root, {"a.py": "a = 1\n", "folder/b.py": "b = 1\n"})
    write(elsewhere, {"secret.py": "c = 1\n"})
    (root / "out").symlink_to(elsewhere)
    (root / "in").symlink_to(root / "folder")
    (root / "file.py").symlink_to(elsewhere / "secret.py")
    (root / "loop").symlink_to("loop")
    filter = EntryFilter([root])
    assert entering(filter) == {"a.py", "folder/b.py"}
    assert [path.name for path, said in listed(filter).items() if said is Reason.LINK] == [
        "file.py",
        "in",
        "loop",
        "out",
    ]
    for name in ("out/secret.py", "in/b.py", "file.py"):
        assert filter.read(root / name) is Reason.LINK
    assert filter.read(root / "../elsewhere/secret.py") is Reason.LINK


def listed_once(filter):
    """Files that a filter lists, each once."""
    found = [Path(name) for name, verdict in filter.entries() if not isinstance(verdict, Reason)]
    assert len(found) == len(set(found))
    return {path.relative_to(filter.roots[0]).as_posix() for path in found}


@pytest.mark.parametrize("outer", ["checkout", "folder"])
def test_a_checkout_inside_of_a_folder_is_under_its_rules(tmp_path, outer):
    root = tmp_path.resolve() / "root"
    inner = ["fine/dep", "private/dep", "apart/dep", "build/dep", "environment", "other_store", "fine/dep/build/deep"]
    write(root, {".gitignore": "private/\n", ".ignore": "apart/\n", "a.py": "a = 1\n"})
    write(root, {f"{name}/own.py": "own = 1\n" for name in inner})
    write(root, {"environment/pyvenv.cfg": "", "other_store/manifest.json": "{}", "other_store/segments/x": "y"})
    for folder in [*inner, "."] if outer == "checkout" else inner:
        git(root / folder, "init", "-q")
    entering = {".gitignore", ".ignore", "a.py", "fine/dep/own.py", "fine/dep/build/deep/own.py"}
    assert listed_once(EntryFilter([root])) == entering | ({"build/dep/own.py"} if outer == "checkout" else set())


def grow(folder, random, tracked, depth=0):
    """Files, rules and checkouts by chance below a folder."""
    rules = ["*.txt\n", "*\n!a.py\n", "in/\n", "/build/*\n"]
    for name in random.sample(["in", "build", "x y", "[q]", "node_modules"], 3):
        below = folder / name
        write(below, dict.fromkeys(random.sample(["a.py", "b.txt", "*.py", "-c.md"], 2), "x = 1\n"))
        if depth == 0 or (depth == 1 and random.random() < 0.5):
            grow(below, random, tracked, depth + 1)
        for name, chance in ((".gitignore", 0.2), (".ignore", 0.2), ("pyvenv.cfg", 0.1)):
            if random.random() < chance:
                write(below, {name: random.choice(rules)})
        if random.random() < 0.3:
            git(below, "init", "-q")
            if tracked:
                git(below, "add", "-A")
                git(below, "commit", "-qm", "x", "--allow-empty")


@pytest.mark.parametrize("seed", range(6))
def test_what_is_listed_is_what_changes_let_in(tmp_path, seed):
    random = Random(seed)
    root = tmp_path.resolve() / "root"
    grow(root, random, seed % 2)
    if seed % 3:
        git(root, "init", "-q")
        if seed % 2:
            git(root, "add", "-A")
        write(root, {".gitignore": random.choice(["build\n", "*.md\n"])})
    listed_once(EntryFilter([root]))
    listed_once(
        EntryFilter(
            [root / random.choice([path.name for path in root.iterdir() if path.is_dir() and path.name != ".git"])]
        )
    )
    write(root, {"kept/manifest.json": "{}", "kept/segments/a.txt": "x\n", "a/__pycache__/b.txt": "y\n"})
    listed_once(EntryFilter([root], admit=("ignored",)))


@pytest.mark.parametrize(
    "name",
    [
        ".env", ".env.local", ".envrc", "prod.env", "a/terraform.tfstate", "terraform.tfstate.backup",
        "terraform.tfstate.1700000000.backup", "secrets/prod.yaml", "config/secrets/db", "app/.secrets/x.json",
        ".bash_history", ".zsh_history", ".python_history", ".psql_history", "fish_history", ".node_repl_history",
        "server.pem", "id_ed25519", "x/id_rsa.pub", "credentials", ".npmrc", ".pypirc", ".netrc", ".git-credentials",
        "AuthKey_X.p8", "vpn.ovpn", "putty.ppk", "client_secret_123.json", "application_default_credentials.json",
        "kubeconfig", ".kube/config", ".aws/config", ".docker/config.json", "wp-config.php", ".vault-token",
        "prod.auto.tfvars", "SECRETS.YAML", "My.Key",
        "prod.env.gz", "my-secret.yaml.gz", "kubeconfig.zst", "x.tfvars.bak.gz", ".netrc.gz", ".npmrc~", "secrets.orig",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    assert secret_name(Path(name))


@pytest.mark.parametrize(
    "name",
    [
        "environment.py",
        ".env.example",
        ".env.example.gz",
        "environment.py.gz",
        "secrets/manager.py",
        "tokenizer.py",
        "keys.py",
        "history.md",
        "a/secretary.txt",
    ],
)
def test_names_that_are_no_secrets(name):
    assert not secret_name(Path(name))


A, D, H = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7", "0123456789", "0123456789abcdef" * 4
TOKENS = {
    "github": "ghp_" + (A * 2)[:36],
    "gitlab": "glpat-" + A[:20],
    "pypi": "pypi-AgEIcHlwaS5vcmc" + A * 4,
    "stripe": "sk_live_" + A[:24],
    "slack": "xoxb-123456789012-" + A[:24].lower(),
    "slack hook": "https://hooks.slack.com/services/T00000000/B00000000/" + A[:24],
    "openai": "sk-" + A[:20] + "T3BlbkFJ" + A[:20],
    "aws id": "AKIA" + "ABCDEFGHIJKLMNOP",
    "aws secret": 'AWS_SECRET_KEY: "' + (A * 2)[:40] + '"',
    "azure storage": "AccountKey=" + (A * 4)[:86] + "==",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0." + A,
    "private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "twilio": "SK" + H[:32],
    "sendgrid": "SG." + A[:22] + "." + (A * 2)[:43],
    "telegram": "123456789:" + (A * 2)[:35],
    "discord": "M" + A[:24] + ".aB3dE6." + A[:27],
    "mailchimp": H[:32] + "-us12",
    "url": "postgres://" + "app:s3cr3tHunter@" + "db.internal:5432/x",
}


@pytest.mark.parametrize("kind", TOKENS)
def test_tokens_in_a_text(kind, tmp_path):
    text = f"import os\n\nvalue = '{TOKENS[kind]}'\nprint(value)\n"
    assert secret_text(text)
    assert secret_text(f"x={TOKENS[kind]}\r\n")
    write(tmp_path, {"settings.py": text})
    filter = EntryFilter([tmp_path])
    assert filter.read(filter.roots[0] / "settings.py") is Reason.SECRET_TEXT


@pytest.mark.parametrize(
    "text",
    [
        "see http://host:8080/a@b", "redis://:@localhost", "ssh://git@host:22/x", "https://u:***@host",
        "mysql://root:$PASSWORD@db", "https://a.b/c:d@2x.png", "task-management-of-the-whole-department-of-works",
    ],
)  # fmt: skip
def test_texts_that_are_no_secrets(text):
    assert not secret_text(text)


def test_ordinary_sources_hold_no_secrets():
    import retrieve_spec

    for path in Path(retrieve_spec.__file__).parent.rglob("*.py"):
        assert not secret_text(path.read_text("utf-8")), path


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("bom.py", b"\xef\xbb\xbfa = 1\n", "a = 1\n"),
        ("wide.py", "ä = 1\n".encode("utf-16"), "ä = 1\n"),
        ("latin.py", b"# \xe9t\xe9\n", Reason.ENCODING),
        ("empty.py", b"", Reason.EMPTY),
        ("only_bom.py", b"\xef\xbb\xbf", Reason.EMPTY),
        ("zero.bin", b"a\0b", Reason.BINARY),
        ("late.bin", b"a" * 9000 + b"\0", Reason.BINARY),
        ("large.py", b"x = 1\n" * 50_000, Reason.LARGE),
        ("min.js", b"a=1;" * 2000, Reason.GENERATED),
        ("made.go", b"// Code generated by protoc-gen-go. DO NOT EDIT.\npackage x\n", Reason.GENERATED),
        ("made.py", b"# @generated by a tool\nx = 1\n", Reason.GENERATED),
    ],
)
def test_texts(tmp_path, name, data, expected):
    write(tmp_path, {name: data})
    filter = EntryFilter([tmp_path])
    assert filter.read(filter.roots[0] / name) == expected


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    filter = EntryFilter([tmp_path])
    assert listed(filter) == {filter.roots[0] / "pipe": Reason.NOT_A_FILE}
    answers = []
    reader = threading.Thread(target=lambda: answers.append(filter.read(filter.roots[0] / "pipe")), daemon=True)
    reader.start()
    reader.join(30)
    assert answers == [Reason.NOT_A_FILE]


def test_a_file_that_changes_while_it_is_read_is_left_for_later(tmp_path, monkeypatch):
    from retrieve_spec.datastore import entry_filter

    write(tmp_path, {"a.py": "a = 1\n"})
    path = tmp_path.resolve() / "a.py"
    real = os.fstat

    def touched(handle):
        status = real(handle)
        write(tmp_path, {"a.py": f"a = {status.st_mtime_ns}\n" + "x" * (status.st_size % 7)})
        os.utime(path, ns=(0, status.st_mtime_ns + 1_000_000))
        return status

    monkeypatch.setattr(entry_filter.os, "fstat", touched)
    assert EntryFilter([tmp_path]).read(path) is Reason.CHANGING
    monkeypatch.undo()
    assert EntryFilter([tmp_path]).read(path).startswith("a = ")


@pytest.mark.parametrize("line", ["!", "\\", "a\\", "[z-a]"])
def test_lines_that_are_no_rule_count_for_nothing(line, tmp_path):
    write(tmp_path, {".gitignore": f"{line}\nb.py\n", "a.py": "a = 1\n", "b.py": "b = 1\n"})
    assert listed_once(EntryFilter([tmp_path])) == {".gitignore", "a.py"}
