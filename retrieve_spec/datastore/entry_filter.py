"""Entry filter: decides which files of a folder may enter a store, reads them, and says why the others may not.

The one place where this is decided, for `build`, `add` and `sync` as for a server's workspace:

- what git would not commit stays out: ``.gitignore`` of every folder up to the top of the checkout,
  ``.git/info/exclude``, the user's global file, by git's own listing (`git_rules`); ``.ignore`` files count too, and
  folders of tools, caches, environments and build results (where git is not asked) stay out;
- secrets stay out, by name and by content;
- generated and minified files stay out;
- symbolic links stay out, and so does everything behind one: nothing outside the folder is ever read;
- binaries, large files and texts that are neither UTF-8 nor UTF-16 with a byte order mark stay out;
- with a list of allowed licences, so does everything under another one, or under none that is known (`licences`).

The first three are `PARTS`, which can be switched off each. Two calls are the whole door: `EntryFilter.entries` goes
through the folder, `EntryFilter.read` opens a file of it. Both answer with a `Reason` where the answer is no.
"""

from __future__ import annotations

import codecs
import errno
import fnmatch
import gzip
import os
import re
import stat
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.keyword import KeywordDetector

from retrieve_spec._version import __version__
from retrieve_spec.datastore.files import open_listed
from retrieve_spec.datastore.git_rules import Reason, look_through
from retrieve_spec.errors import BuildError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_FILES = (
    ".env", ".env.*", "*.env", ".envrc", ".env-*", "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.ppk", "*.jks",
    "*.keystore", "*.kdb", "*.kdbx", "*.asc", "*.gpg", "*.pgp", "*.age", "*.ovpn", "*.pkcs12", "id_rsa*", "id_dsa*",
    "id_ecdsa*", "id_ed25519*", "authorized_keys", "known_hosts", "secring.*", ".netrc", "_netrc", ".npmrc", ".pypirc",
    ".htpasswd", ".htdigest", ".pgpass", ".my.cnf", ".mylogin.cnf", ".git-credentials", ".dockercfg",
    ".dockerconfigjson", ".boto", ".s3cfg", ".vault-token", ".vault_pass*", ".terraformrc", "terraform.rc",
    "credentials", "credential", "secret", "secrets", ".secrets*", "*secret*.y*ml",
    "*secret*.json", "*secret*.toml", "*secret*.ini", "*credential*.json", "*password*.txt",
    "kubeconfig", "*.kubeconfig", "*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", "service-account*.json",
    "service_account*.json", "gha-creds-*.json", "application_default_credentials.json", "google-services.json",
    "googleservice-info.plist", "auth.json", "*.mobileprovision", "wp-config.php", "database.yml", ".msmtprc",
    ".fetchmailrc", ".muttrc", ".mutt_secrets", ".pass", ".bash_history", ".zsh_history", ".sh_history", ".history",
    ".ash_history", "fish_history", ".python_history", ".node_repl_history", ".psql_history", ".mysql_history",
    ".sqlite_history", ".rediscli_history", ".mongo_history", ".irb_history", ".pry_history", ".lesshst", ".viminfo",
    "*_history",
)  # fmt: skip
_SAMPLES = ("*.example", "*.sample", "*.template", "*.dist")
"""Files that show what a secret file looks like; what is inside still counts."""
_FOLDERS = frozenset(
    ["secrets", ".secrets", "secret", ".secret", "credentials", ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker",
     ".gcloud", "gcloud", ".vault", ".password-store", "private_keys", "private-keys"]
)  # fmt: skip
_CODE = frozenset([".py", ".pyi", ".go", ".rs", ".java", ".kt", ".ts", ".tsx", ".js", ".jsx", ".c", ".h", ".cc", ".cpp",
                   ".hpp", ".cs", ".rb", ".php", ".swift", ".scala", ".md", ".rst"])  # fmt: skip
"""Source about secrets is no secret: only other kinds of files count in a folder of secrets."""
_NAME = re.compile("|".join(fnmatch.translate(pattern) for pattern in _FILES))
_WORD = re.compile(r"(?:credentials|secrets|passwords)\..*")
"""Names of secrets, or of modules about them."""
_COPY = re.compile(r"(?:\.gz|\.zst|\.bak|\.orig|~)+\Z")
"""Ends of names of compressed files and of copies: the name before it counts, too."""
_SAMPLE = re.compile("|".join(fnmatch.translate(pattern) for pattern in _SAMPLES))
_GUESSES = frozenset(
    ["ArtifactoryDetector", "BasicAuthDetector", "CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector",
     "IPPublicDetector", "SoftlayerDetector"]
)  # fmt: skip
"""Detectors of what has no form of its own, which take several times as long as all others together, and of
passwords in addresses, which are looked at here."""
_TOKEN = re.compile(
    "|".join(
        (
            r"github_pat_\w{36,}",
            r"sk-(?:ant|proj|svcacct|admin|or-v1)-[\w-]{20,}",
            r"hf_[A-Za-z0-9]{30,}", r"api_org_[A-Za-z0-9]{30,}",
            r"AIza[\w-]{35}", r"GOCSPX-[\w-]{28}", r"ya29\.[\w-]{20,}",  # Google
            r"gsk_[A-Za-z0-9]{48,}", r"xai-[A-Za-z0-9]{64,}", r"pplx-[A-Za-z0-9]{40,}", r"r8_[A-Za-z0-9]{37}",
            r"nvapi-[\w-]{60,}", r"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}",
            r"[sr]k_(?:live|test|prod)_[0-9A-Za-z]{16,}", r"whsec_[0-9A-Za-z+/]{32,}",  # Stripe
            r"npm_[A-Za-z0-9]{36}", r"rubygems_[0-9a-f]{48}", r"dckr_(?:pat|oat)_[\w-]{27,}",
            r"xapp-\d-[A-Z0-9]+-\d+-[0-9a-z]{32,}", r"xox[a-z]-[\w-]{24,}",  # Slack
            r"do[opr]_v1_[0-9a-f]{64}", r"dapi[0-9a-f]{32}", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
            r"hv[sbr]\.[\w-]{24,}", r"dp\.(?:ct|pt|sa|scim|st)\.[A-Za-z0-9.]{40,}", r"pul-[0-9a-f]{40}",
            r"gl(?:c_[A-Za-z0-9+/=]{32,}|sa_[A-Za-z0-9]{32}_[0-9A-Fa-f]{8})", r"NRAK-[A-Z0-9]{27}",
            r"sntry[su]_[\w+/=-]{40,}", r"lin_api_[A-Za-z0-9]{40}", r"ntn_[A-Za-z0-9]{40,}", r"figd_[\w-]{40}",
            r"ATATT3[\w=-]{100,}", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}",
            r"sbp_[0-9a-f]{40}", r"sb_secret_[\w-]{22,}", r"tskey-[a-z]+-\w+-\w{20,}", r"HRKU-[\w-]{36,}",
            r"AGE-SECRET-KEY-1[0-9A-Z]{58}", r"SharedAccessKey=[A-Za-z0-9+/]{40,}",
            r"BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
        )
    )
)  # fmt: skip
"""Tokens and keys with a form of their own that detect-secrets does not know, as their makers and gitleaks describe."""
_RANDOM_CHARS, _DIFFERENT = 24, 8
"""Characters at the end of a token, and how many different ones are no placeholder."""
_ADDRESS = re.compile(r"://([^\s:/?#\[\]@\"'`,;]+):([^\s:/?#\[\]@\"'`,;]+)@(\[[^\]\s]*\]|[\w.-]*)")
_NO_HOST = re.compile(
    r"|(?:.*\.)?(?:localhost|test|example|invalid)|(?:.*\.)?example\.(?:com|org|net)|host\.docker\.internal"
    r"|127(?:\.\d+){3}|0\.0\.0\.0|::1?|host(?:name)?"
)
"""Hosts that are this machine, or none at all (RFC 2606, RFC 6761)."""
_PLACEHOLDER = re.compile(r"[<{$%].*|[\WxX_]+")
_NO_PASSWORDS = ("password", "passwd", "passw0rd", "pass", "pwd", "pw", "secret", "changeme", "token", "key", "apikey")

_GENERATED_NAMES = re.compile(
    "|".join(
        fnmatch.translate(pattern)
        for pattern in (
            "*.min.js", "*.min.mjs", "*.min.css", "*.bundle.js", "*.chunk.js", "*.map", "*.lock", "*-lock.json",
            "*-lock.yaml", "npm-shrinkwrap.json", "go.sum", "go.work.sum", "*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py",
            "*.pb.go", "*.pb.cc", "*.pb.h", "*.g.dart", "*.freezed.dart", "*.designer.cs", "*.snap", "*.pyc",
        )
    )
)  # fmt: skip
_GENERATED_TEXT = re.compile(
    r"@generated\b|\b(?:auto-?generated|automatically generated|generated by|code generated)\b.{0,120}"
    r"\bdo not (?:edit|modify)\b",
    re.IGNORECASE | re.DOTALL,
)
_POINTERS = ("version https://git-lfs.github.com/spec/v1\n", "/annex/objects/")
_HEAD_CHARS = 1000
_MINIFIED_CHARS = 2000
_MINIFIED_LINE = 400
_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex")
_PROSE_SPACES = 0.08
"""Share of blanks from which a long line of prose is a paragraph."""


def secret_name(path: str | os.PathLike[str]) -> bool:
    """Whether a file must not be read, by its name and the folders it lies in (a path relative to the top)."""
    *folders, name = os.fspath(path).lower().split(os.sep)
    plain = _COPY.sub("", name)
    if _SAMPLE.match(plain):
        return False
    if not _FOLDERS.isdisjoint(folders) and os.path.splitext(name)[1] not in _CODE:
        return True
    if os.path.splitext(plain)[1] not in _CODE and _WORD.match(plain):
        return True
    return bool(_NAME.match(name) or _NAME.match(plain))


def secret_text(text: str) -> bool:
    """Whether a text holds a key or token: those that detect-secrets knows, newer ones, and passwords in addresses."""
    return (
        any(True for detector in _detectors() for _ in detector.analyze_string(text))
        or any(_is_token(text, found) for found in _TOKEN.finditer(text))
        or any(_is_password(*found.groups()) for found in _ADDRESS.finditer(text))
    )


def _assigns_secret(name: str, text: str) -> bool:
    """Whether a module assigns a password or key to a variable; in most other files, what is found so is none."""
    detector = KeywordDetector()
    return any(detector.analyze_line(filename=name, line=line, line_number=0) for line in text.splitlines())


def _is_token(text: str, found: re.Match[str]) -> bool:
    """Whether what looks like a token begins a word, and is no placeholder such as one of x alone."""
    inside = found.start() > 0 and (text[found.start() - 1].isalnum() or text[found.start() - 1] == "_")
    return not inside and len(set(found[0][-_RANDOM_CHARS:])) >= _DIFFERENT


def _is_password(user: str, password: str, host: str) -> bool:
    """Whether an address lets somebody in who reads it: not at this machine, not by what only shows the form."""
    place = host.lower().strip("[]").removesuffix(".")
    here = _NO_HOST.fullmatch(place) is not None
    shown = password.lower() in {user.lower(), *_NO_PASSWORDS} or _PLACEHOLDER.fullmatch(password) is not None
    return not (here or shown)


@cache
def _detectors() -> tuple[RegexBasedDetector, ...]:
    kinds: Any = get_mapping_from_secret_type_to_class().values()
    return tuple(kind() for kind in kinds if issubclass(kind, RegexBasedDetector) and kind.__name__ not in _GUESSES)


def generated_name(name: str) -> bool:
    """Whether a file of this name, or a copy of one, is made by a program."""
    return _GENERATED_NAMES.match(_COPY.sub("", name.lower())) is not None


def generated_text(name: str, text: str) -> bool:
    """Whether a text says of itself that a program wrote it, or has lines that nobody writes; long ones of prose may be
    paragraphs."""
    prose = name.lower().endswith(_PROSE) and text.count(" ") >= _PROSE_SPACES * len(text)
    minified = len(text) > max(_MINIFIED_CHARS, _MINIFIED_LINE * (text.count("\n") + 1))
    return (minified and not prose) or _GENERATED_TEXT.search(text[:_HEAD_CHARS]) is not None


PARTS = ("ignored", "generated", "secrets")
"""Parts of the filter that can be switched off."""
RULES = f"{__version__} 6"
"""Name of these rules; the number changes with what they let in: nothing said under others counts."""
MAX_BYTES = 256 << 10


def admitted_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Parts of the filter that do not count, from names that may hold several with commas between.

    Raises
    ------
    BuildError
        When a name is none of `PARTS`.
    """
    found = {name.strip() for given in names for name in given.split(",")} - {""}
    if unknown := sorted(found.difference(PARTS)):
        raise BuildError(f"parts of the filter, of {', '.join(PARTS)}", ", ".join(unknown), "Name some of these.")
    return tuple(sorted(found))


class EntryFilter:
    """What of a folder may enter a store.

    Nothing is kept between two calls but the folder: ignore files may change at any time.

    Parameters
    ----------
    root
        The folder, which is resolved.
    max_bytes
        Larger files stay out.
    admit
        `PARTS` that do not count: what git ignores enters, or generated files, or secrets.
    store
        Folder of a store that is being made, which is no part of the folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int = MAX_BYTES,
        admit: Collection[str] = (),
        store: Path | None = None,
    ) -> None:
        self.root = root.resolve()
        self.max_bytes = max_bytes
        self._admit = frozenset(admit)
        self._store = None if store is None else os.path.join(store.resolve(), "")

    def entries(self) -> Iterator[tuple[str, os.stat_result | Reason]]:
        """All that lies below the folder, by its path there, in no order, with what its name, kind and size say.

        A folder that is left out as a whole, told by a slash at its end, stands for all that is in it; a datastore is
        no part of its folder.
        """
        start = len(os.path.join(self.root, ""))
        for name, reason in look_through(self.root, everything="ignored" in self._admit):
            if self._store is None or not name.startswith(self._store):
                yield name[start:], reason or self.look(name)

    def read(self, path: Path, compression: str = "") -> str | Reason:
        """Text of a file that `entries` let pass, with LF lines and no byte order mark; never empty."""
        try:
            with open_packed(path, compression) as file:
                data = file.read(self.max_bytes + 1)
        except READ_ERRORS as error:
            return reason_of(error)
        if len(data) > self.max_bytes:
            return Reason.LARGE
        text = decoded(data)
        if isinstance(text, Reason):
            return text
        return self.content(path.stem if compression else path.name, text) or text

    def content(self, name: str, text: str) -> Reason | None:
        """Why a text may not enter for what it says, None if it may; the name is that of its file, "" for a record.

        Records of a collection are not files: none is generated or minified by its looks.
        """
        if not text.strip():
            return Reason.EMPTY
        if "\0" in text:
            return Reason.BINARY
        if text.startswith(_POINTERS):
            return Reason.POINTER
        if "secrets" not in self._admit and (secret_text(text) or (_WORD.match(name) and _assigns_secret(name, text))):
            return Reason.SECRET_TEXT
        generated = name and "generated" not in self._admit and generated_text(name, text)
        return Reason.GENERATED if generated else None

    def look(self, name: str) -> os.stat_result | Reason:
        """What kind, name and size of a file below the folder say."""
        try:
            status = os.lstat(name)
        except OSError as error:
            return reason_of(error)
        if stat.S_ISLNK(status.st_mode):
            return Reason.LINK
        if "secrets" not in self._admit and secret_name(os.path.relpath(name, self.root)):
            return Reason.SECRET_NAME
        if "generated" not in self._admit and generated_name(os.path.basename(name)):
            return Reason.GENERATED
        if not stat.S_ISREG(status.st_mode):
            return Reason.SPECIAL
        if status.st_size > self.max_bytes:
            return Reason.LARGE
        return status


READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib.error, zstd.ZstdError)
"""What reading a file raises that is damaged, or cannot be read."""


@contextmanager
def open_packed(path: str | Path, compression: str) -> Iterator[Any]:
    """Open a file that was listed, by `open_listed`, to read what it holds: of `"gz"` and `"zst"` what is packed."""
    with open_listed(path) as raw:
        if compression == "gz":
            yield gzip.GzipFile(fileobj=raw)
        elif compression == "zst":
            yield zstd.ZstdFile(raw)
        else:
            yield raw


def reason_of(error: Exception) -> Reason:
    """Why a file is left out whose reading raised an error."""
    if not isinstance(error, OSError) or error.errno is None:  # of what unpacks it
        return Reason.DAMAGED
    return Reason.LINK if error.errno == errno.ELOOP else Reason.UNREADABLE


def decoded(data: bytes) -> str | Reason:
    """Text of a file, without a byte order mark, or why it has none."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide and b"\0" in data[:8192]:
        return Reason.BINARY
    try:
        return data.decode("utf-16" if wide else "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return Reason.ENCODING
