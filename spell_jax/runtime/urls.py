"""Errors of URLs, and secrets in them: no field may hold one, as configs are written to logs."""

from __future__ import annotations

import re

# The part before the host: a name and a password in any URL or address, a mere token in HTTP's.
# A password may have a slash, a "?" or a "#"; then the text before that character is no port.
_PASSWORD = re.compile(
    r"(?:^(?://)?|:/{1,3})[^/?#\s@:]*:[^/?#\s@]*@(?=[^/])"
    r"|://[^/?#\s@:\[]*:(?!\d+(?:[/?#]|$))[^\s@]*@"
)
_TOKEN = re.compile(r"^(?:https?|ftp)://[^/?#\s]*@")
# A parameter of the query or the fragment with a name that marks its value as a secret.
_PARAMETER = re.compile(
    r"[?&#;](key|code|hapikey|session(?:[-_]?id)?|(?:[\w.%-]*[-_.])?"
    r"(?:(?:api|access|secret|auth|private|aws|subscription)+[-_]?key(?:[-_]?id)?|\w*token|sig"
    r"|signature|secret|passw(?:or)?d|pwd|auth|authorization|credentials?|jwt|AWSAccessKeyId))"
    r"=[^&#]",
    re.IGNORECASE,
)


class FetchError(OSError):
    """A URL cannot be fetched; the message has the URL, what failed and the remedy."""


def check_secret(field: str, value: object) -> None:
    """Raise ValueError, without the secret, if a text has an address with a password or a key.

    `field` is the name of the field or flag in the message.
    """
    if not isinstance(value, str) or ("://" not in value and "@" not in value):
        return
    if _PASSWORD.search(value) or _TOKEN.match(value):
        secret = "a name or a password before its host"
    elif "://" in value and (parameter := _PARAMETER.search(value)):
        secret = f"a secret in its parameter {parameter[1]!r}"
    else:
        return
    raise ValueError(
        f"{field} = {hide_secrets(value)!r}: has {secret}, and would be written to disk; leave it "
        "out. Keys of APIs belong into environment variables: SPELL_JUDGE_KEY of a judge, "
        "SPELL_ENDPOINT_KEY of an evaluated model, SPELL_TEACHER_KEY of a teacher; the access "
        "to data into those of its protocol, such as GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE "
        'or FSSPEC_HTTPS=\'{"client_kwargs": {"headers": {"Authorization": "..."}}}\''
    )


def hide_secrets(value: str) -> str:
    """Replace the secrets that `check_secret` refuses by dots."""
    # fsspec chains URLs with ::, such as zip://a::https://host/b, and each part may have a secret.
    parts = (re.sub(r"^(.*?://)?.*@", r"\1...@", part) for part in value.split("::"))
    return "::".join(re.sub(r"[?#].*", "?...", part, flags=re.DOTALL) for part in parts)
