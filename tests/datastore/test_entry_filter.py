"""What may enter a store: git's rules, secrets, links, generated files, encodings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import write

from retrieve_spec.datastore import entry_filter, git_rules
from retrieve_spec.datastore.entry_filter import EntryFilter, secret_name, secret_text
from retrieve_spec.datastore.git_rules import Reason


def git(folder, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments], cwd=folder, check=True, capture_output=True
    )


pytestmark = pytest.mark.usefixtures("home")


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


def entering(root):
    """Files that may enter from a folder, each listed once."""
    found = [name for name, said in EntryFilter(root).entries() if not isinstance(said, Reason)]
    assert len(found) == len(set(found))
    return set(found)


def test_what_git_ignores_stays_out_through_any_of_its_files(checkout):
    # `in.log` is no business of the outer checkout's rules
    assert entering(checkout) == ENTERS | {"inner/in.log"}


def test_where_git_cannot_be_asked_its_files_are_read(checkout, monkeypatch):
    monkeypatch.setattr(git_rules, "_git", lambda *_: None)
    # without git nobody knows what is tracked: fewer files enter, none more
    assert entering(checkout) == (ENTERS | {"inner/in.log"}) - {"tracked.log", "build/kept.py", "build/made.py"}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_checkout_cannot_make_git_run_its_programs(checkout, tmp_path):
    ran, program = tmp_path / "ran", tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    git(checkout, "config", "core.fsmonitor", str(program))
    assert "a.py" in entering(checkout)
    assert not ran.exists()


def test_variables_of_a_hook_do_not_lead_elsewhere(checkout, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert "a.py" in entering(checkout)


def test_nothing_behind_a_link_enters(tmp_path):
    root, elsewhere = tmp_path.resolve() / "root", tmp_path / "elsewhere"
    write(tmp_path, {"root/a.py": "a = 1\n", "root/folder/b.py": "b = 1\n", "elsewhere/secret.py": "c = 1\n"})
    links = {"out": elsewhere, "in": root / "folder", "file.py": elsewhere / "secret.py", "loop": "loop"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    filter = EntryFilter(root)
    assert entering(root) == {"a.py", "folder/b.py"}
    assert {name for name in links if (name, Reason.LINK) in filter.entries()} == {*links}
    for name in ("out/secret.py", "in/b.py", "file.py", "../elsewhere/secret.py"):
        assert filter.read(root / name) is Reason.LINK


@pytest.mark.parametrize("outer", ["checkout", "folder"])
def test_a_checkout_inside_of_a_folder_is_under_its_rules(tmp_path, outer):
    root = tmp_path.resolve() / "root"
    inner = ["fine/dep", "private/dep", "apart/dep", "build/dep", "environment", "other_store", "fine/dep/build/deep"]
    write(root, {".gitignore": "private/\n", ".ignore": "apart/\n", "a.py": "a = 1\n"})
    write(root, {f"{name}/own.py": "own = 1\n" for name in inner})
    write(root, {"environment/pyvenv.cfg": "", "other_store/manifest.json": "{}", "other_store/segments/x": "y"})
    for folder in [*inner, "."] if outer == "checkout" else inner:
        git(root / folder, "init", "-q")
    expected = {".gitignore", ".ignore", "a.py", "fine/dep/own.py", "fine/dep/build/deep/own.py"}
    assert entering(root) == expected | ({"build/dep/own.py"} if outer == "checkout" else set())


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
    assert secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "environment.py", ".env.example", ".env.example.gz", "environment.py.gz", "secrets/manager.py", "tokenizer.py",
        "keys.py", "history.md", "a/secretary.txt",
    ],
)  # fmt: skip
def test_names_that_are_no_secrets(name):
    assert not secret_name(name)


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
    filter = EntryFilter(tmp_path)
    assert filter.read(filter.root / "settings.py") is Reason.SECRET_TEXT


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
    filter = EntryFilter(tmp_path)
    assert filter.read(filter.root / name) == expected


def test_a_file_that_changes_while_it_is_read_is_left_for_later(tmp_path, monkeypatch):
    write(tmp_path, {"a.py": "a = 1\n"})
    path = tmp_path.resolve() / "a.py"
    real = os.fstat

    def touched(handle):
        status = real(handle)
        write(tmp_path, {"a.py": f"a = {status.st_mtime_ns}\n" + "x" * (status.st_size % 7)})
        os.utime(path, ns=(0, status.st_mtime_ns + 1_000_000))
        return status

    monkeypatch.setattr(entry_filter.os, "fstat", touched)
    assert EntryFilter(tmp_path).read(path) is Reason.CHANGING
    monkeypatch.undo()
    assert EntryFilter(tmp_path).read(path).startswith("a = ")


@pytest.mark.parametrize("line", ["!", "\\", "a\\", "[z-a]"])
def test_lines_that_are_no_rule_count_for_nothing(line, tmp_path):
    write(tmp_path, {".gitignore": f"{line}\nb.py\n", "a.py": "a = 1\n", "b.py": "b = 1\n"})
    assert entering(tmp_path) == {".gitignore", "a.py"}
