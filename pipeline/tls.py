"""TLS options of a Redis URL. Pure."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from diloco.pipeline.errors import UsageError

# Setting -> the option of a rediss:// URL that it sets.
OPTIONS = {"redis_ca": "ssl_ca_certs", "redis_cert": "ssl_certfile", "redis_key": "ssl_keyfile"}


def with_tls(url: str, files: Mapping[str, Path | None]) -> str:
    """Add certificate files to a Redis URL, as options.

    files: setting (a key of `OPTIONS`) -> file, or None.

    Raises:
        UsageError: files are given for a URL without TLS; the message does not show the URL.
    """
    given = {OPTIONS[name]: str(path) for name, path in files.items() if path is not None}
    if not given:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # `redis_url.parse` reports what is wrong with it
        return url
    if parts.scheme not in ("rediss", "rediss+sentinel"):
        names = ", ".join(name for name, path in files.items() if path is not None)
        raise UsageError(f"{names}: only used with TLS, but the Redis URL does not begin with rediss://")
    options = dict(parse_qsl(parts.query, keep_blank_values=True)) | given
    return urlunsplit(parts._replace(query=urlencode(options)))


def check_files(options: Mapping[str, object]) -> None:
    """Check the certificate files that connections will read.

    Raises:
        UsageError: a file does not exist, or a key is given without a certificate.
    """
    for name in OPTIONS.values():
        path = options.get(name)
        if path is not None and not Path(str(path)).is_file():
            raise UsageError(f"{name}: no such file: {path}")
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise UsageError("the key of a client certificate is set, but not the certificate: set DILOCO_REDIS_CERT too")
