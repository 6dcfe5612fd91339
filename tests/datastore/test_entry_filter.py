"""What may enter a store: git's rules, secrets, links, generated files, encodings; the same for build, add and sync."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import write
from test_build import contents

from retrieve_spec.datastore import git_rules
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.entry_filter import EntryFilter, secret_name, secret_text
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.sync import sync_datastore


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


@pytest.mark.parametrize("asked", [True, False])
def test_a_second_worktree_of_a_checkout_does_not_enter_beside_it(tmp_path, monkeypatch, asked):
    home = tmp_path.resolve() / "code"
    main = home / "main"
    write(main, {"a.py": "a = 1\n"})
    git(main, "init", "-q")
    git(main, "add", ".")
    git(main, "commit", "-qm", "first")
    for place in (main / "wt" / "inside", home / "beside"):
        git(main, "worktree", "add", "-q", "--detach", str(place))
    if not asked:
        monkeypatch.setattr(git_rules, "_git", lambda *_: None)
    assert entering(main) == {"a.py"}
    assert ("wt/inside/", Reason.WORKTREE) in EntryFilter(main).entries()
    assert entering(home) == {"main/a.py"}
    assert entering(home / "beside") == entering(main / "wt" / "inside") == {"a.py"}, "who names one wants it"
    (home / "beside").rename(tmp_path / "elsewhere")
    assert entering(tmp_path / "elsewhere") == {"a.py"}


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
        "secrets.json", "credentials.xml", "passwords.csv", "secrets",
        "prod.env.gz", "my-secret.yaml.gz", "kubeconfig.zst", "x.tfvars.bak.gz", ".netrc.gz", ".npmrc~", "secrets.orig",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    assert secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "environment.py", ".env.example", ".env.example.gz", "environment.py.gz", "secrets/manager.py", "tokenizer.py",
        "keys.py", "history.md", "a/secretary.txt", "secrets.py", "Secrets.go", "credentials.ts", "passwords.py.gz",
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
    "url of an address": "https://" + "deploy:hunter2!@" + "10.0.0.7/repository.git",
    "github, fine-grained": "github_pat_" + A[:22] + "_" + (A * 3)[:59],
    "anthropic": "sk-ant-api03-" + (A * 4)[:93] + "AA",
    "openai project": "sk-proj-" + (A + "_-" + A * 3)[:120],
    "openai service": "sk-svcacct-" + A + "-" + A,
    "openrouter": "sk-or-v1-" + H,
    "hugging face": "hf_" + (A * 2)[:34],
    "google": "AIza" + (A + "_-" + A)[:35],
    "google oauth": "GOCSPX-" + (A * 2)[:28],
    "groq": "gsk_" + (A * 2)[:52],
    "xai": "xai-" + (A * 3)[:80],
    "replicate": "r8_" + (A * 2)[:37],
    "npm": "npm_" + (A * 2)[:36],
    "stripe, tests": "sk_test_" + A[:24],
    "slack app": "xapp-1-A0123456789-1234567890123-" + H,
    "digital ocean": "dop_v1_" + H,
    "databricks": "dapi" + H[:32],
    "shopify": "shpat_" + H[:32],
    "vault": "hvs." + (A * 2)[:40],
    "grafana": "glsa_" + (A * 2)[:32] + "_" + H[:8],
    "linear": "lin_api_" + (A * 2)[:40],
    "docker": "dckr_pat_" + A[:27],
    "postman": "PMAK-" + H[:24] + "-" + H[:34],
    "age": "AGE-SECRET-KEY-1" + ("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" * 2)[:58],
    "encrypted key": "-----BEGIN ENCRYPTED " + "PRIVATE KEY-----",
    "notion": "ntn_" + (A * 2)[:46],
    "notion, older": "secret_" + (A * 2)[:43],
    "discord hook": "https://discord.com/api/webhooks/123456789012345678/" + (A * 3)[:68],
    "slack trigger": "https://hooks.slack.com/triggers/T00000000/1234567890123/" + H[:32],
    "slack configuration": "xoxe.xoxp-1-" + A * 5,
    "redis without a user": "redis://:" + "s3cr3tHunter@cache.internal:6379/0",
    "amqp without a user": "amqps://:" + "s3cr3tHunter@mq.internal",
    "aws bedrock": "ABSK" + A * 4,
    "aws session": "IQoJb3JpZ2luX2Vj" + A * 8,
    "gitlab runner": "glrtr-" + A[:20],
    "gitlab workspace": "glwt-" + A[:20],
    "openai, bare": "sk-" + (A * 2)[:48],
    "deepseek": "sk-" + H[:32],
    "langfuse": "sk-lf-01234567-89ab-cdef-0123-456789abcdef",
    "stripe organisation": "sk_org_live_" + A,
    "stripe restricted": "rk_live_" + A * 3,
    "linear oauth": "lin_oauth_" + H,
    "vercel": "vercel_blob_rw_" + A[:16] + "_" + A,
    "vercel token": "vcp_" + A * 2,
    "mailgun": "key-" + H[:32],
    "mailgun, newer": f"{H[:32]}-{H[:8]}-{H[:8]}",
    "azure client": "aB3" + "8Q~" + (A * 2)[:34],
    "azure shared access": "sv=2022-11-02&sig=" + (A * 2)[:43] + "%3D",
    "age, post-quantum": "AGE-SECRET-KEY-PQ-1" + ("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" * 2)[:58],
    "putty": "PuTTY-User-Key-File-3: ssh-ed25519",
    "cerebras": "csk-" + (A * 2)[:48].lower(),
    "fireworks": "fw_" + A[:24],
    "together": "tgp_v1_" + (A * 2)[:43],
    "tavily": "tvly-dev-" + A,
    "firecrawl": "fc-" + H[:32],
    "jina": "jina_" + (A * 3)[:60],
    "e2b": "e2b_" + H[:40],
    "weights and biases": "wandb_v1_" + A * 3,
    "pinecone": "pcsk_" + A * 2,
    "elevenlabs": "sk_" + H[:48],
    "cloudflare origin": f"v1.0-{H[:24]}-" + (H * 3)[:146],
    "cloudflare": "cfut_" + A + A,
    "fly": "fm2_" + A * 6,
    "render": "rnd_" + A,
    "netlify": "nfp_" + (A * 2)[:40],
    "planetscale": "pscale_tkn_" + (A * 2)[:43],
    "resend": f"re_{A[:8]}_{A[:24]}",
    "brevo": f"xkeysib-{H}-{A[:16]}",
    "mapbox": f"sk.eyJ{A * 2}.{A}",
    "bitbucket": "ATBB" + (A * 2)[:32],
    "asana": f"2/1234567890123456/1234567890123456:{H[:32]}",
    "clickup": "pk_12345678_" + (A * 2)[:32].upper(),
    "square": "sq0atp-" + A[:22],
    "paypal": f"access_token$production${H[:16]}${H[:32]}",
    "plaid": "access-production-01234567-89ab-cdef-0123-456789abcdef",
    "dropbox": "sl.u." + A * 6,
    "dynatrace": "dt0c01." + A[:24].upper() + "." + (A * 3)[:64].upper(),
    "sonar": "squ_" + H[:40],
    "snyk": f"snyk_uat.{H[:8]}.{A * 2}",
    "circleci": f"CCIPAT_{A[:22]}_{H[:40]}",
    "buildkite": "bkua_" + H[:40],
    "terraform": f"{A[:14]}.atlasv1.{A * 3}",
    "1password": "ops_eyJ" + A * 10,
    "nuget": "oy2" + (A * 2)[:43].lower(),
    "crates": "cio" + (A * 2)[:32],
    "artifactory": "AKCp" + (A * 3)[:69],
    "alibaba": "LTAI5t" + A[:18],
    "easypost": "EZAK" + (A * 2)[:54],
    "posthog": "phx_" + (A * 2)[:43],
    "sourcegraph": f"sgp_{H[:16]}_{H[:40]}",
    "gemini, newer": "AQ.Ab8" + (A * 2)[:45],
    "aws, in a configuration": "aws_secret_access_key = " + (A * 2)[:40],
    "aws, in an environment": "export AWS_SECRET_ACCESS_KEY=" + (A * 2)[:38] + "/+",
    "by its name": "MISTRAL_API_KEY=" + (A * 2)[:32],
    "azure, by its name": "AZURE_OPENAI_KEY=" + "3f9a0b7c1d8e2f6a4b5c9d0e1f7a8b3c",
    "a header": "Authorization: Bearer " + A * 2,
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
        "postgres://app:s3cr3tHunter@localhost:5432/x", "redis://:s3cr3tHunter@127.0.0.1", "amqp://a:s3cr3t@[::1]/",
        "https://user:password@git.acme.org/x", "https://me:me@git.acme.org/x", "https://me:<token>@git.acme.org/x",
        "https://joe:s3cr3t@example.com", "hf_" + "x" * 34, "sk-ant-api03-" + "x" * 40, "github_pat_" + "X" * 82,
        "my_sk-" + "ant-colony-of-the-whole-department-of-works", "AIza and hf_hub_download_to_some_folder",
        "OPENAI_API_KEY=YOUR_KEY_HERE", "OPENAI_API_KEY=sk-" + "x" * 48,
        "key: sk-your-key-goes-here-and-nowhere-else-12",
        "AKIAIOSFODNN7" + "EXAMPLE", "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY",
        "https://user:password@example.com", "numpy==2.0 --hash=sha256:" + H, '"sha512": "' + "Ab3/x9Zk" * 11 + '"',
        "12345678:" + H[:40], "MetaWithAVeryLongNameIndeed.module.a_function_with_a_long_name",
        "password_hash_of_the_administrator = compute_the_hash_of_the_password_of(administrator)",
        "auth_token = self.configuration_of_the_service_token", "token-of-the-whole-department-of-works-and-more",
        '"access_token": "the-access-token-that-the-service-returned-last"', "sk_" + "a" * 48,
        "api_key=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "secret_name_of_the_whole_department_of_works_and_more",
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
        ("secrets.py", b"import os\nDB_PASSWORD = 'hunter2hunter2'\n", Reason.SECRET_TEXT),
        ("secrets.ts", b"export const apiKey = load('key');\n", "export const apiKey = load('key');\n"),
        ("other.py", b"DB_PASSWORD = 'hunter2hunter2'\n", "DB_PASSWORD = 'hunter2hunter2'\n"),
        ("large.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", Reason.POINTER),
        (
            "about.md",
            b"A pointer begins so: version https://git-lfs.github.com/spec/v1\n",
            "A pointer begins so: version https://git-lfs.github.com/spec/v1\n",
        ),
    ],
)
def test_texts(tmp_path, name, data, expected):
    write(tmp_path, {name: data})
    filter = EntryFilter(tmp_path)
    assert filter.read(filter.root / name) == expected


@pytest.mark.parametrize("line", ["!", "\\", "a\\", "[z-a]"])
def test_lines_that_are_no_rule_count_for_nothing(line, tmp_path):
    write(tmp_path, {".gitignore": f"{line}\nb.py\n", "a.py": "a = 1\n", "b.py": "b = 1\n"})
    assert entering(tmp_path) == {".gitignore", "a.py"}


TOKEN = "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7aB3dE6gH9"
OF_FOLDER = {".gitignore", "a.py", "new.py", "sub/b.md", "sub/long.md", "forced.log", "venv/__init__.py"}
LEFT_OUT = {
    "noise.log": Reason.IGNORED,
    "private/": Reason.IGNORED,
    "node_modules/": Reason.TOOLS,
    "environment/": Reason.TOOLS,
    ".env": Reason.SECRET_NAME,
    "settings.py": Reason.SECRET_TEXT,
    "app.min.js": Reason.GENERATED,
    "made.go": Reason.GENERATED,
    "squeezed.js": Reason.GENERATED,
    "data.bin": Reason.BINARY,
    "link.py": Reason.LINK,
}
PART = {
    "ignored": {"noise.log", "private/p.py", "node_modules/x.js", "environment/e.py"},
    "generated": {"app.min.js", "made.go", "squeezed.js"},
    "secrets": {".env", "settings.py"},
}


@pytest.fixture(params=["checkout", "folder"])
def folder(tmp_path, request):
    """A folder with something of every kind, in a checkout and in none."""
    root = tmp_path.resolve() / "project"
    write(
        root,
        {
            ".gitignore": "*.log\nprivate/\n",
            "a.py": "a = 1\n",
            "new.py": "new = 2\n",
            "sub/b.md": "some prose\n",
            "sub/long.md": ("a paragraph of prose that nobody wrapped, as many do; " * 60 + "\n\n") * 2,
            "forced.log" if request.param == "checkout" else "sub/c.txt": "added by force\n",
            "venv/__init__.py": "a module of this name is no environment\n",
            "noise.log": "noise\n",
            "private/p.py": "p = 1\n",
            "node_modules/x.js": "x\n",
            "environment/pyvenv.cfg": "home = /usr/bin\n",
            "environment/e.py": "e = 1\n",
            "other_store/manifest.json": "{}",
            "other_store/segments/x": "y",
            ".env": "PASSWORD=hunter2hunter2\n",
            "settings.py": f"token = '{TOKEN}'\n",
            "app.min.js": "var a\n",
            "made.go": "// Code generated by a tool. DO NOT EDIT.\npackage x\n",
            "squeezed.js": "a=1;" * 2000,
            "data.bin": b"a\0b",
        },
    )
    (root / "link.py").symlink_to(root / "a.py")
    if request.param == "checkout":
        git(root, "init", "-q")
        git(root, "add", "-f", "a.py", "forced.log")
    return root


def expected_of(root):
    return OF_FOLDER if (root / ".git").exists() else OF_FOLDER - {"forced.log"} | {"sub/c.txt"}


def left_out(report):
    return {path: reason for path, _, reason in report.skipped}


def test_build_and_sync_agree(folder, tokenizer, tmp_path):
    built = build_datastore(tmp_path / "built", str(folder), tokenizer)
    assert set(contents(tmp_path / "built")) == expected_of(folder)
    assert left_out(built) == LEFT_OUT
    synced = sync_datastore(tmp_path / "synced", [folder], tokenizer)
    assert set(contents(tmp_path / "synced")) == expected_of(folder)
    assert built.skipped_by_reason == synced.skipped_by_reason
    again = sync_datastore(tmp_path / "synced", [folder])
    assert again.skipped_by_reason == built.skipped_by_reason
    assert read_manifest(tmp_path / "built").history[-1]["skipped"] == built.skipped_by_reason


@pytest.mark.parametrize("part", PART)
def test_every_part_can_be_switched_off(folder, tokenizer, tmp_path, part):
    expected = expected_of(folder) | PART[part]
    build_datastore(tmp_path / "built", Source(str(folder), admit=(part,)), tokenizer)
    found = set(contents(tmp_path / "built"))
    assert found - {"environment/pyvenv.cfg"} == expected
    sync_datastore(tmp_path / "synced", [folder], tokenizer)
    sync_datastore(tmp_path / "synced", [folder], admit=[part])
    assert set(contents(tmp_path / "synced")) == found
    sync_datastore(tmp_path / "synced", [folder])
    assert set(contents(tmp_path / "synced")) == expected_of(folder)


def test_named_files_enter_but_for_their_secrets(folder, tokenizer, tmp_path):
    named = ["noise.log", "node_modules/x.js", "made.go", "app.min.js", "settings.py", ".env", "link.py"]
    report = build_datastore(tmp_path / "s", [str(folder / name) for name in named], tokenizer)
    assert set(contents(tmp_path / "s")) == {"noise.log", "x.js", "made.go", "app.min.js", "link.py"}
    assert left_out(report) == {"settings.py": Reason.SECRET_TEXT, ".env": Reason.SECRET_NAME}
    add_documents(tmp_path / "s", [Source(str(folder / name), admit=("secrets",)) for name in named])
    assert {"settings.py", ".env"} <= set(contents(tmp_path / "s"))


def test_compressed_secrets_and_links_to_secrets_stay_out(tokenizer, tmp_path):
    packed = gzip.compress(b"password: hunter2hunter2\n")
    write(tmp_path / "f", {".env": "a=1\n", "prod.env.gz": packed, "kubeconfig.gz": packed, "notes.txt.gz": packed})
    write(tmp_path / "secrets", {"config": "a = 1\n"})
    (tmp_path / "notes").symlink_to(tmp_path / "f" / ".env")
    (tmp_path / "config").symlink_to(tmp_path / "secrets" / "config")
    named = [str(tmp_path / name) for name in ("f", "notes", "config")]
    report = build_datastore(tmp_path / "s", named, tokenizer)
    assert set(contents(tmp_path / "s")) == {"notes.txt.gz"}
    assert left_out(report) == dict.fromkeys(
        [".env", "prod.env.gz", "kubeconfig.gz", "notes", "config"], Reason.SECRET_NAME
    )


def test_a_named_folder_that_git_ignores_is_looked_into(tokenizer, tmp_path):
    top = tmp_path.resolve() / "top"
    write(top, {".gitignore": "lib/\n*.tmp\n", "lib/pkg/a.py": "a = 1\n", "lib/pkg/b.tmp": "b\n", "c.py": "c = 1\n"})
    git(top, "init", "-q")
    build_datastore(tmp_path / "s", str(top / "lib" / "pkg"), tokenizer)
    assert set(contents(tmp_path / "s")) == {"a.py", "b.tmp"}  # the rules are of the checkout, which has left it out


def test_records_with_secrets_stay_out(tokenizer, tmp_path):
    rows = [{"text": "fine"}, {"text": f"token = {TOKEN}"}, {"text": "an answer in one line " * 200}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write(tmp_path, {"data/r.jsonl": lines, "data/t.txt.gz": gzip.compress(f"x={TOKEN}\n".encode())})
    for source in ("data", "data/r.jsonl"):
        store = tmp_path / source.replace("/", "-")
        report = build_datastore(store.with_suffix(".store"), str(tmp_path / source), tokenizer)
        assert set(contents(store.with_suffix(".store"))) == {"r.jsonl#1", "r.jsonl#3"}
        assert report.skipped_by_reason[Reason.SECRET_TEXT] == (2 if source == "data" else 1)


def test_command(folder, command, tmp_path):
    out = command("build", tmp_path / "s", folder, "--tokenizer", "reference", "-q", "--left-out")[1]
    assert "holds a key or token; --admit secrets" in out and "\n    settings.py" in out
    added = command("add", tmp_path / "s", folder, "--admit", "secrets,generated", "-q", "--json")[1]
    assert json.loads(added)["documents"] == 5
    code, _, err = command("add", tmp_path / "s", folder, "--admit", "everything", "-q")
    assert code == 1 and "ignored, generated, secrets" in err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="who may do everything reads everything")
def test_a_folder_that_cannot_be_read_is_listed(tokenizer, tmp_path):
    write(tmp_path, {"f/a.py": "a = 1\n", "f/closed/b.py": "b = 1\n"})
    (tmp_path / "f" / "closed").chmod(0)
    report = build_datastore(tmp_path / "s", str(tmp_path / "f"), tokenizer)
    (tmp_path / "f" / "closed").chmod(0o700)
    assert [(path, reason) for path, _, reason in report.skipped] == [("closed/", Reason.UNREADABLE)]
