"""Secret rules: files that hold them, known by their names or by the keys and tokens inside.

Tokens are found by the expressions of detect-secrets, and by a few for kinds it does not know.
"""

from __future__ import annotations

import fnmatch
import os
import re
from functools import lru_cache
from importlib import import_module
from typing import Any

_FILES = (
    ".env", ".env.*", "*.env", ".envrc", ".env-*", "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.ppk", "*.jks",
    "*.keystore", "*.kdb", "*.kdbx", "*.asc", "*.gpg", "*.pgp", "*.age", "*.ovpn", "*.pkcs12", "id_rsa*", "id_dsa*",
    "id_ecdsa*", "id_ed25519*", "authorized_keys", "known_hosts", "secring.*", ".netrc", "_netrc", ".npmrc", ".pypirc",
    ".htpasswd", ".htdigest", ".pgpass", ".my.cnf", ".mylogin.cnf", ".git-credentials", ".dockercfg",
    ".dockerconfigjson", ".boto", ".s3cfg", ".vault-token", ".vault_pass*", ".terraformrc", "terraform.rc",
    "credentials", "credentials.*", "credential", "secret", "secrets", "secrets.*", ".secrets*", "*secret*.y*ml",
    "*secret*.json", "*secret*.toml", "*secret*.ini", "*credential*.json", "*password*.txt", "passwords.*",
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
_COPY = re.compile(r"(?:\.gz|\.zst|\.bak|\.orig|~)+\Z")
"""Ends of names of compressed files and of copies: the name before it counts, too."""
_SAMPLE = re.compile("|".join(fnmatch.translate(pattern) for pattern in _SAMPLES))

_MORE = (
    ("-----BEGIN ", r"[A-Z0-9 ]*PRIVATE KEY"),
    ("github_pat_", r"[A-Za-z0-9_]{22,}"),
    ("ghp_ gho_ ghu_ ghs_ ghr_", r"[A-Za-z0-9]{30,}"),
    ("glpat- gldt- glrt- glptt- glsoat- gloas-", r"[A-Za-z0-9_-]{20,}"),
    ("hf_", r"[A-Za-z0-9]{30,}"),
    ("npm_", r"[A-Za-z0-9]{36}"),
    ("pypi-", r"[A-Za-z0-9_-]{50,}"),
    ("sk_live_ sk_test_ rk_live_ rk_test_", r"[A-Za-z0-9]{20,}"),
    ("whsec_", r"[A-Za-z0-9]{24,}"),
    ("xox", r"[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("xapp-", r"\d-[A-Za-z0-9-]{20,}"),
    ("sk-", r"[A-Za-z0-9_-]{32,}"),
    ("AIza", r"[0-9A-Za-z_-]{35}"),
    ("ya29. GOCSPX-", r"[0-9A-Za-z_-]{20,}"),
    ("AKIA ASIA ABIA ACCA", r"[0-9A-Z]{16}\b"),
    ("8Q~", r"(?<=\b[A-Za-z0-9_~.-]{3}8Q~)[A-Za-z0-9_~.-]{31,34}"),  # Azure application secrets
    ("AccountKey= SharedAccessKey=", r"[A-Za-z0-9+/]{40,}={0,2}"),
    ("?sig= &sig=", r"[A-Za-z0-9%]{43,}"),
    ("eyJ", r"[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),  # JSON Web Tokens
    ("dop_v1_", r"[a-f0-9]{64}"),
    ("dckr_pat_ dckr_oat_", r"[A-Za-z0-9_-]{20,}"),
    ("ATATT3", r"[A-Za-z0-9_=-]{50,}"),
    ("hvs.", r"[A-Za-z0-9_-]{24,}"),
    ("shpat_ shpca_ shppa_ shpss_", r"[a-fA-F0-9]{32}"),
    ("sntrys_", r"[A-Za-z0-9_=+/-]{40,}"),
    ("lin_api_", r"[A-Za-z0-9]{32,}"),
    ("ntn_", r"[A-Za-z0-9]{40,}"),
    ("dapi", r"[a-f0-9]{32}\b"),
    ("PMAK-", r"[A-Fa-f0-9]{24}-[A-Fa-f0-9]{34}"),
    ("AGE-SECRET-KEY-1", r"[A-Z0-9]{50,}"),
    ("SG.", r"[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{40,}"),
)
"""(how tokens begin, what follows). Expressions that begin with a text are found some hundred times faster than those
that begin with a boundary or with a choice."""
_URL_PASSWORD = re.compile(
    r"://[^\s:/?#\[\]@'\"`<>(){}$*|\\]{1,64}:"
    r"(?!(?i:pass(?:word|wd|phrase)?\d*|pw|pwd|secret|token|user(?:name)?|key|x+|\.+|-+|(?:my|your|some|any|the)[-_\w]*|\w*"
    r"(?:example|placeholder|redacted|changeme)\w*|\w)@)"
    r"[^\s:/?#\[\]@'\"`<>(){}$*|\\]{2,128}@[A-Za-z0-9]"
)
"""A URL with a password that is no placeholder."""
_AWS_SECRET = re.compile(
    r"aws.{0,20}?(?:secret|key).{0,20}?[=:]\s*[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])", re.IGNORECASE
)


def secret_name(path: str | os.PathLike[str]) -> bool:
    """Whether a file must not be read, by its name and the folders it lies in (a path relative to the top)."""
    *folders, name = os.fspath(path).lower().split(os.sep)
    plain = _COPY.sub("", name)
    if _SAMPLE.match(plain):
        return False
    if not _FOLDERS.isdisjoint(folders) and os.path.splitext(name)[1] not in _CODE:
        return True
    return bool(_NAME.match(name) or _NAME.match(plain))


def secret_text(text: str) -> bool:
    """Whether a text holds a key or token."""
    lowered = text.lower()
    return any(expression.search(text) for needles, expression in _expressions() if _any_in(needles, lowered))


def _any_in(needles: tuple[str, ...], text: str) -> bool:
    return not needles or any(needle in text for needle in needles)


_KINDS = {
    "aws akia asia abia acca a3t": ("aws.AWSKeyDetector",),
    "": (
        "azure_storage_key.AzureStorageKeyDetector", "discord.DiscordBotTokenDetector",
        "github_token.GitHubTokenDetector", "gitlab_token.GitLabTokenDetector", "npm.NpmDetector",
        "openai.OpenAIDetector", "pypi_token.PypiTokenDetector", "sendgrid.SendGridDetector",
        "square_oauth.SquareOAuthDetector", "telegram_token.TelegramBotTokenDetector", "twilio.TwilioKeyDetector",
    ),
    "xox hooks.slack.com": ("slack.SlackDetector",),
    "k_live_": ("stripe.StripeDetector",),
    "cloudant": ("cloudant.CloudantDetector",),
    "softlayer": ("softlayer.SoftlayerDetector",),
    "ibm": ("ibm_cloud_iam.IbmCloudIamDetector",),
    "hmac": ("ibm_cos_hmac.IbmCosHmacDetector",),
    "-us": ("mailchimp.MailchimpDetector",),
}  # fmt: skip
"""Kinds of detect-secrets, slow ones below words of which one must occur. Its guesses by entropy and keyword are left
out."""


@lru_cache(maxsize=1)
def _expressions() -> tuple[tuple[tuple[str, ...], re.Pattern[str]], ...]:
    """(words of which one must occur in lower case, expression for whole texts) of every kind."""
    found: list[tuple[tuple[str, ...], re.Pattern[str]]] = []
    for beginnings, rest in _MORE:
        for begin in beginnings.split(" ") if beginnings[-1] != " " else [beginnings]:
            bound = rf"(?<!\w{re.escape(begin)})" if begin[0].isalpha() else ""
            found.append(((), re.compile(re.escape(begin) + bound + rest)))
    found += [((), _URL_PASSWORD), (("aws",), _AWS_SECRET)]
    for needles, names in _KINDS.items():
        for module, _, name in (kind.partition(".") for kind in names):
            detector: Any = getattr(import_module(f"detect_secrets.plugins.{module}"), name)
            expressions = (re.compile(e.pattern, e.flags | re.MULTILINE) for e in detector.denylist)
            found += [(tuple(needles.split()), expression) for expression in expressions]
    return tuple(found)
