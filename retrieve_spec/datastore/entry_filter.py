"""Entry filter: decides which files of a folder may enter a store, reads them, and says why the others may not.

`build`, `add`, `sync` and a server's workspace all decide by these rules:

- what git would not commit stays out: ``.gitignore`` of every folder up to the top of the checkout,
  ``.git/info/exclude``, the user's global file, by git's own listing (`git_rules`); ``.ignore`` files count too, and
  folders of tools, caches, environments and build results (where git is not asked) stay out;
- secrets stay out, by name and by content;
- generated and minified files stay out;
- symbolic links and everything they lead to stay out: nothing outside the folder is ever read;
- binaries, large files and texts that are neither UTF-8 nor UTF-16 with a byte order mark stay out;
- with a list of allowed licences, everything under another or an unknown licence stays out (`licences`).

The first three are `PARTS`, each of which can be disabled. The interface has two calls: `EntryFilter.entries` lists the
folder, `EntryFilter.read` reads one of its files. Both return a `Reason` if something may not enter.
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
from itertools import pairwise
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
"""Names of files that show how a secret file looks; their contents are checked all the same."""
_FOLDERS = frozenset(
    ["secrets", ".secrets", "secret", ".secret", "credentials", ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker",
     ".gcloud", "gcloud", ".vault", ".password-store", "private_keys", "private-keys"]
)  # fmt: skip
_CODE = frozenset([".py", ".pyi", ".go", ".rs", ".java", ".kt", ".ts", ".tsx", ".js", ".jsx", ".c", ".h", ".cc", ".cpp",
                   ".hpp", ".cs", ".rb", ".php", ".swift", ".scala", ".md", ".rst"])  # fmt: skip
"""Source code is exempt in folders of secrets: code about secrets is not secret."""
_NAME = re.compile("|".join(fnmatch.translate(pattern) for pattern in _FILES))
_WORD = re.compile(r"(?:credentials|secrets|passwords)\..*")
"""Words in names of secrets, and of modules about secrets."""
_COPY = re.compile(r"(?:\.gz|\.zst|\.bak|\.orig|~)+\Z")
"""Suffixes of compressed files and of copies: the name before the suffix is checked, too."""
_SAMPLE = re.compile("|".join(fnmatch.translate(pattern) for pattern in _SAMPLES))
_GUESSES = frozenset(
    ["ArtifactoryDetector", "BasicAuthDetector", "CloudantDetector", "DiscordBotTokenDetector", "IbmCloudIamDetector",
     "IbmCosHmacDetector", "IPPublicDetector", "PrivateKeyDetector", "SoftlayerDetector", "TelegramBotTokenDetector"]
)  # fmt: skip
"""Detectors that are not used: they look for secrets without a fixed form, which takes several times as long as all
others together, or for what this module checks itself.
"""
_HEX, _ALNUM, _WORDS = "[0-9a-f]", "[A-Za-z0-9]", r"[\w-]"
_PREFIXES = (
    (_HEX, 32, "dapi key- fc- sk_ e2b_ rubygems_ do[opr]_v1_ pul- sbp_ sq[apu]_ bk(?:ua|at|ct)_ glptt- lin_oauth_ crsr_"
               r" key_ CLOJARS_ shippo_(?:live|test)_ sgp_(?:\w{5,16}_)? lsv2_(?:pt|sk)_ live_ sntryu_"),
    (_ALNUM, 14, "rzp_live_"),
    (_ALNUM, 16, "[sr]k_(?:live|test|prod|org_live|org_test)_"),
    (_ALNUM, 20, "LTAI"),
    (_ALNUM, 22, "a[ks]- fw_ re_[A-Za-z0-9]{8}_ rnd_ vc[pirak]_"),
    (_ALNUM, 26, "hf_ api_org_ ATBB NRAK- cio phx_ AKID sk- rpa_ npm_ pn[ub]_ nf[pcoub]_ r8_"),
    (_ALNUM, 40, "gsk_ pplx- csk- xai- ntn_ lin_api_ secret_ oy2 cf[aku]?t_ wandb_v1_ EZ[AT]K napi_ pat_ AKCp cmVmdGtu"
                 " hc[ab]ik_ rdme_ EAA[A-Z]"),
    (_WORDS, 20, "sk-(?:ant|proj|svcacct|admin|or-v1|lf)- gl(?:rtr|wt|ffct)- sb_secret_ hv[sbr][.] ya29[.] xox[a-z]-"
                 r" xoxe[.]xox[bp]- GOCSPX- sq0[a-z]{3}- dckr_(?:pat|oat)_ tskey-[a-z]+-\w+- FLW(?:SEC|PUB)K(?:_TEST)?-"
                 " tvly-"),
    (_WORDS, 32, "github_pat_ AIza AQ[.]Ab8 HRKU- figd_ fo1_ tgp_v1_ vercel_blob_rw_ pscale_(?:tkn|pw|oauth)_ 1//0 AQVN"
                 " CFPAT- polar_[a-z]+_ duffel_(?:live|test)_ tfp_ jina_ pcsk_ nvapi- y[0-3]_ fio-u-"),
    (r"[\w+/=-]", 32, "whsec_ glc_ sntrys_ fm[12][ar]?_ ABSK ops_eyJ IQoJb3JpZ2lu SharedAccessKey= AT(?:ATT|CTT)3"),
    (r"[A-Z0-9]", 58, "AGE-SECRET-KEY-(?:PQ-)?1"),
)  # fmt: skip
"""Tokens with known prefixes: characters, minimum length, and prefixes."""
_FORMS = (
    r"glsa_[A-Za-z0-9]{32}_[0-9A-Fa-f]{8}", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}",
    r"xapp-\d-[A-Z0-9]+-\d+-[0-9a-z]{32,}", r"dp\.(?:ct|pt|sa|scim|st)\.[A-Za-z0-9.]{40,}", r"atlasv1\.[\w=-]{60,}",
    r"v1\.0-[0-9a-f]{24}-[0-9a-f]{146}", r"xkeysib-[0-9a-f]{64}-\w{16}", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}",
    r"[0-9a-f]{32}-[0-9a-f]{8}-[0-9a-f]{8}(?![\w-])", r"sk\.eyJ[\w-]{40,}\.[\w-]{20,}", r"pk_\d{6,9}_[A-Z0-9]{32}",
    r"[12]/\d{15,16}(?:/\d{15,16})?:[0-9a-f]{32}", r"access_token\$production\$[0-9a-z]{16}\$[0-9a-f]{32}",
    r"access-(?:production|development)-[0-9a-f-]{36}", r"dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}",
    r"sl\.(?:u\.)?[\w-]{130,}", r"snyk_[a-z]{3}\.[0-9a-f]{8}\.[\w.-]{40,}",
    r"CCI(?:PAT|PRJ)_[A-Za-z0-9]{22}_[0-9a-f]{40}", r"st\.[0-9a-f-]{24,36}\.[0-9a-f]{32}\.[0-9a-f]{32}",
    r"discord(?:app)?\.com/api/webhooks/\d{17,20}/[\w-]{60,}",
    r"hooks\.slack\.com/(?:workflows|triggers)/[\w/]{40,}",
    r"[\w.~]{3}\dQ~[\w.~-]{31,34}", r"sig=[A-Za-z0-9%]{43,}%3[Dd]",  # Azure
)  # fmt: skip
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    + "|".join([f"(?:{'|'.join(begins.split())}){of}{{{most},}}" for of, most, begins in _PREFIXES] + list(_FORMS))
    + ")"
)
"""Tokens of a known form that detect-secrets does not detect, as described by their issuers and gitleaks."""
_DRAWN = re.compile(
    r"(?<![\w.-])(?:([MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,40})|\d{8,10}:([\w-]{35}))(?![\w.-])"  # Discord, Telegram
)
"""Text that is a token if it is random."""
_LONG = re.compile(r"[\w/+=.~$:%-]{20,}")
"""Places where tokens may occur, a twentieth of ordinary source; only these are searched for all forms."""
_VALUE = re.compile(r"(?:[:=]>?[ \t]*[\"']?|Bearer +)([A-Za-z0-9+/_-]{32,256}={0,2})(?![\w.(\[+/-])")
_NAMED = re.compile(
    r"(?i:(?:secret|(?:api|access|account|auth|azure\w*)[_-]?key|(?:access|auth|api|session)[_-]?token|passw(?:or)?d)"
    r"(?:[_-]?(?:access)?[_-]?(?:key|token|value))?[\"']?[ \t]*\Z)"
)
_NAME_CHARS = 48
"""Values, and names that make a random value a secret if it follows within so many characters."""
_KEY_BLOCK = re.compile(r"BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d: ")
_RANDOM_CHARS, _DIFFERENT, _TURNS = 24, 8, 6
"""Characters at the end of a token, how many different ones are no placeholder, and how often what is drawn turns from
one case of letters, or digits, to another."""
_ADDRESS = re.compile(r"://([^\s:/?#\[\]@\"'`,;]*):([^\s:/?#\[\]@\"'`,;]+)@(\[[^\]\s]*\]|[\w.-]*)")
_NO_HOST = re.compile(
    r"|(?:.*\.)?(?:localhost|test|example|invalid)|(?:.*\.)?example\.(?:com|org|net)|host\.docker\.internal"
    r"|127(?:\.\d+){3}|0\.0\.0\.0|::1?|host(?:name)?"
)
"""Hosts that are the local machine or reserved for examples (RFC 2606, RFC 6761)."""
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
"""Smallest share of blanks for which a long line of prose counts as a paragraph."""


def secret_name(path: str | os.PathLike[str]) -> bool:
    """Whether a file must not be read because of its name or folders (`path` is relative to the top)."""
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
    """Whether a text contains a key, a token (by detect-secrets and newer forms), or a password in an address."""
    long = "\n".join(_LONG.findall(text))
    return (
        any(not _is_example(found) for detector in _detectors() for found in detector.analyze_string(long))
        or any(_is_token(found[0]) for found in _TOKEN.finditer(long))
        or any(_is_drawn(found[found.lastindex or 0]) for found in _DRAWN.finditer(long))
        or any(_is_named_secret(text, found) for found in _VALUE.finditer(text))
        or any(_is_password(*found.groups()) for found in _ADDRESS.finditer(text))
        or _KEY_BLOCK.search(text) is not None
    )


def _is_named_secret(text: str, found: re.Match[str]) -> bool:
    """Whether a value looks like a secret and the text before it names one."""
    name = text[max(0, found.start() - _NAME_CHARS) : found.start()]
    return (found[0].startswith("Bearer") or _NAMED.search(name) is not None) and _is_drawn(found[1])


def _assigns_secret(name: str, text: str) -> bool:
    """Whether a module assigns a password or key to a variable; in most other files, such a match is not a secret."""
    detector = KeywordDetector()
    return any(detector.analyze_line(filename=name, line=line, line_number=0) for line in text.splitlines())


def _is_token(found: str) -> bool:
    """Whether a text that looks like a token is neither a placeholder, such as x's or words, nor a known example."""
    end = found[-_RANDOM_CHARS:]
    digits = sum(character.isdigit() for character in found[-2 * _RANDOM_CHARS :])
    return len(set(end)) >= _DIFFERENT and digits > 0 and not _is_example(found)


def _is_example(found: str) -> bool:
    """Whether a token is a known example from documentation."""
    return "EXAMPLE" in found.upper()


def _is_drawn(value: str) -> bool:
    """Whether a value looks random, that is, often alternates between lower case, upper case and digits."""
    kinds = [(c.isdigit(), c.isupper()) for c in value[-_RANDOM_CHARS:] if c.isalnum()]
    return _is_token(value) and sum(kind != after for kind, after in pairwise(kinds)) >= _TURNS


def _is_password(user: str, password: str, host: str) -> bool:
    """Whether an address contains a real password: neither a placeholder nor for the local machine."""
    place = host.lower().strip("[]").removesuffix(".")
    here = _NO_HOST.fullmatch(place) is not None
    shown = password.lower() in {user.lower(), *_NO_PASSWORDS} or _PLACEHOLDER.fullmatch(password) is not None
    return not (here or shown)


@cache
def _detectors() -> tuple[RegexBasedDetector, ...]:
    kinds: Any = get_mapping_from_secret_type_to_class().values()
    return tuple(kind() for kind in kinds if issubclass(kind, RegexBasedDetector) and kind.__name__ not in _GUESSES)


def generated_name(name: str) -> bool:
    """Whether files of this name, or copies of them, are generated by programs."""
    return _GENERATED_NAMES.match(_COPY.sub("", name.lower())) is not None


def generated_text(name: str, text: str) -> bool:
    """Whether a text says that it is generated, or has lines too long to be written by hand, except in prose."""
    prose = name.lower().endswith(_PROSE) and text.count(" ") >= _PROSE_SPACES * len(text)
    minified = len(text) > max(_MINIFIED_CHARS, _MINIFIED_LINE * (text.count("\n") + 1))
    return (minified and not prose) or _GENERATED_TEXT.search(text[:_HEAD_CHARS]) is not None


PARTS = ("ignored", "generated", "secrets")
"""Parts of the filter that can be disabled."""
RULES = f"{__version__} 7"
"""Version of these rules; it changes when other files may enter, which invalidates earlier results."""
MAX_BYTES = 256 << 10


def disabled_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Return the disabled parts of the filter from names, each of which may be several separated by commas.

    Raises
    ------
    BuildError
        A name is none of `PARTS`.
    """
    found = {name.strip() for given in names for name in given.split(",")} - {""}
    if unknown := sorted(found.difference(PARTS)):
        raise BuildError(f"parts of the filter, of {', '.join(PARTS)}", ", ".join(unknown), "Name some of these.")
    return tuple(sorted(found))


class EntryFilter:
    """Decides which files of a folder may enter a store.

    No state is kept between two calls, since ignore files may change at any time.

    Parameters
    ----------
    root
        The folder, resolved.
    max_bytes
        Larger files stay out.
    admit
        Disabled `PARTS`: git's rules, generated files or secrets.
    store
        Folder of a store that is being made, which is left out.
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
        """Yield the files below the folder, in no order: relative path, and its status or the reason to leave it out.

        A folder that is left out as a whole, marked by a slash at its end, stands for all its contents. Datastores in
        the folder are not listed.
        """
        start = len(os.path.join(self.root, ""))
        for name, reason in look_through(self.root, everything="ignored" in self._admit):
            if self._store is None or not name.startswith(self._store):
                yield name[start:], reason or self.status_of(name)

    def read(self, path: Path, compression: str = "") -> str | Reason:
        """Return the text of a file that `entries` accepted, with LF line ends and no byte order mark; never empty."""
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
        """Return why a text's content may not enter, None if it may; `name` is its file's name, "" for a record.

        Records are not files, so none counts as generated or minified.
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

    def status_of(self, name: str) -> os.stat_result | Reason:
        """Return the status of a file below the folder, or why its kind, name or size leave it out."""
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
"""Exceptions raised by reading a damaged or unreadable file."""


@contextmanager
def open_packed(path: str | Path, compression: str) -> Iterator[Any]:
    """Open a listed file by `open_listed` and, for `"gz"` and `"zst"`, decompress it."""
    with open_listed(path) as raw:
        if compression == "gz":
            yield gzip.GzipFile(fileobj=raw)
        elif compression == "zst":
            yield zstd.ZstdFile(raw)
        else:
            yield raw


def reason_of(error: Exception) -> Reason:
    """Return the reason for leaving out a file whose reading raised an error."""
    if not isinstance(error, OSError) or error.errno is None:  # raised by decompression
        return Reason.DAMAGED
    return Reason.LINK if error.errno == errno.ELOOP else Reason.UNREADABLE


def decoded(data: bytes) -> str | Reason:
    """Decode a file without its byte order mark, or return why it is not text."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide and b"\0" in data[:8192]:
        return Reason.BINARY
    try:
        return data.decode("utf-16" if wide else "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return Reason.ENCODING
