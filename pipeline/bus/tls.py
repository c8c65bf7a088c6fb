"""TLS options of a Redis URL. Pure."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from diloco.pipeline.errors import UsageError

OPTIONS = {"redis_ca": "ssl_ca_certs", "redis_cert": "ssl_certfile", "redis_key": "ssl_keyfile"}
"""Settings and the options of a rediss:// URL that they stand for."""


def with_tls(url: str, files: Mapping[str, Path | None]) -> str:
    """A Redis URL with certificate files as its options.

    files: by the names of `OPTIONS`.

    Raises:
        UsageError: files for a URL without TLS; never shows the URL.
    """
    given = {OPTIONS[name]: str(path) for name, path in files.items() if path is not None}
    if not given:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # `redis.calls.parse` says what is wrong with it
        return url
    if parts.scheme not in ("rediss", "rediss+sentinel"):
        names = ", ".join(name for name, path in files.items() if path is not None)
        raise UsageError(f"{names}: for TLS only, and the Redis URL does not begin with rediss://")
    options = dict(parse_qsl(parts.query, keep_blank_values=True)) | given
    return urlunsplit(parts._replace(query=urlencode(options)))


def check_files(options: Mapping[str, object]) -> None:
    """Certificate files that connections will read.

    Raises:
        UsageError: one is not there, or a key has no certificate.
    """
    for name in OPTIONS.values():
        path = options.get(name)
        if path is not None and not Path(str(path)).is_file():
            raise UsageError(f"{name}: there is no file {path}")
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise UsageError("a key of a client certificate without the certificate: set DILOCO_REDIS_CERT too")
