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
_SAMPLE = re.compile("|".join(fnmatch.translate(pattern) for pattern in _SAMPLES))

_MORE = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"
    r"|\bgithub_pat_[A-Za-z0-9_]{22,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgl(?:pat|dt|rt|ptt|soat|oas)-[A-Za-z0-9_-]{20,}"
    r"|\bhf_[A-Za-z0-9]{30,}"
    r"|\bnpm_[A-Za-z0-9]{36}"
    r"|\bpypi-[A-Za-z0-9_-]{50,}"
    r"|\b[sr]k_(?:live|test)_[A-Za-z0-9]{20,}|\bwhsec_[A-Za-z0-9]{24,}"
    r"|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bxapp-\d-[A-Za-z0-9-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{32,}"
    r"|\bAIza[0-9A-Za-z_-]{35}|\bya29\.[0-9A-Za-z_-]{20,}|\bGOCSPX-[0-9A-Za-z_-]{20,}"
    r"|\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b"
    r"|\b[A-Za-z0-9_~.-]{3}8Q~[A-Za-z0-9_~.-]{31,34}"  # Azure application secrets
    r"|\b(?:AccountKey|SharedAccessKey)=[A-Za-z0-9+/]{40,}={0,2}|[?&]sig=[A-Za-z0-9%]{43,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"  # JSON Web Tokens
    r"|\bdop_v1_[a-f0-9]{64}|\bdckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}|\bATATT3[A-Za-z0-9_=-]{50,}"
    r"|\bhvs\.[A-Za-z0-9_-]{24,}|\bshp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}|\bsntrys_[A-Za-z0-9_=+/-]{40,}"
    r"|\blin_api_[A-Za-z0-9]{32,}|\bntn_[A-Za-z0-9]{40,}|\bdapi[a-f0-9]{32}\b|\bPMAK-[A-Fa-f0-9]{24}-[A-Fa-f0-9]{34}"
    r"|\bAGE-SECRET-KEY-1[A-Z0-9]{50,}|\bSG\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{40,}"
)
_AWS_SECRET = re.compile(
    r"aws.{0,20}?(?:secret|key).{0,20}?[=:]\s*[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])", re.IGNORECASE
)


def secret_name(path: str | os.PathLike[str]) -> bool:
    """Whether a file must not be read, by its name and the folders it lies in (a path relative to the top)."""
    *folders, name = os.fspath(path).lower().split(os.sep)
    if _SAMPLE.match(name):
        return False
    if not _FOLDERS.isdisjoint(folders) and os.path.splitext(name)[1] not in _CODE:
        return True
    return bool(_NAME.match(name))


def secret_text(text: str) -> bool:
    """Whether a text holds a key or token."""
    if _MORE.search(text) or _AWS_SECRET.search(text):
        return True
    lowered: str | None = None
    for needle, expression in _detectors():
        if needle:
            lowered = text.lower() if lowered is None else lowered
            if needle not in lowered:
                continue
        if expression.search(text):
            return True
    return False


_KINDS = {
    "": (
        "aws.AWSKeyDetector", "azure_storage_key.AzureStorageKeyDetector", "discord.DiscordBotTokenDetector",
        "github_token.GitHubTokenDetector", "gitlab_token.GitLabTokenDetector", "npm.NpmDetector",
        "openai.OpenAIDetector", "pypi_token.PypiTokenDetector", "sendgrid.SendGridDetector", "slack.SlackDetector",
        "square_oauth.SquareOAuthDetector", "stripe.StripeDetector", "telegram_token.TelegramBotTokenDetector",
        "twilio.TwilioKeyDetector",
    ),
    "cloudant": ("cloudant.CloudantDetector",),
    "softlayer": ("softlayer.SoftlayerDetector",),
    "ibm": ("ibm_cloud_iam.IbmCloudIamDetector",),
    "hmac": ("ibm_cos_hmac.IbmCosHmacDetector",),
    "-us": ("mailchimp.MailchimpDetector",),
}  # fmt: skip
"""Kinds of detect-secrets, slow ones below a word that must occur. Its guesses by entropy and keyword are left out."""


@lru_cache(maxsize=1)
def _detectors() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(word that must occur, expression for whole texts) of every kind."""
    found = []
    for needle, names in _KINDS.items():
        for module, _, name in (kind.partition(".") for kind in names):
            detector: Any = getattr(import_module(f"detect_secrets.plugins.{module}"), name)
            found += [(needle, re.compile(e.pattern, e.flags | re.MULTILINE)) for e in detector.denylist]
    return tuple(found)
