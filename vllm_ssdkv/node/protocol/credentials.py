"""Keys of nodes and engines: certificates of one authority, for TLS 1.3 on both sides.

The authority signs once and its key is thrown away: keys of a pool are made together, and new ones
take the place of all.
"""

from __future__ import annotations

import datetime
import os
import ssl
from pathlib import Path
from typing import Literal, TypeAlias

from vllm_ssdkv.base.errors import CredentialsError

Side: TypeAlias = Literal["node", "engine"]

AUTHORITY_FILE = "authority.pem"


class Credentials:
    """Certificate and private key of one side, and the authority that signed those of both.

    Immutable; any thread.

    Example:
        credentials = Credentials.load(Path("/etc/ssdkv/keys"), "engine")
    """

    def __init__(self, contexts: dict[bool, ssl.SSLContext]) -> None:
        self._contexts = contexts

    @classmethod
    def load(cls, directory: Path, side: Side) -> Credentials:
        """Read the keys of one side from a directory of ``ssdkv node keys``.

        Raises:
            CredentialsError: a file is missing, readable by every user, or no key.
        """
        authority = directory / AUTHORITY_FILE
        certificate, key = directory / f"{side}.pem", directory / f"{side}-key.pem"
        for file in (authority, certificate, key):
            _check_readable(file)
        if key.stat().st_mode & 0o007:
            raise CredentialsError(f"every user may use {key}; run `chmod 600 {key}`")
        contexts = {}
        for server in (True, False):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
            # Names say nothing here: whoever has a certificate of the authority is taken, in the
            # role that it was made for.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_verify_locations(authority)
                context.load_cert_chain(certificate, key)
                if server:
                    # A resumed session would not show its certificate again.
                    context.num_tickets = 0
            except (OSError, ValueError) as error:
                raise CredentialsError(
                    f"{certificate} and {key} are no keys of {authority} ({error}); make new ones "
                    "with `ssdkv node keys DIR`"
                ) from error
            contexts[server] = context
        return cls(contexts)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS context of a listener, or of a side that connects."""
        return self._contexts[server]


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise CredentialsError(
            f"cannot read {file} ({error.strerror}); make keys with `ssdkv node keys DIR`"
        ) from error


def make_keys(directory: Path, days: int) -> list[Path]:
    """Make an authority, and keys for nodes and for engines, in a directory that has none.

    Args:
        directory: Made if it is not there, for its owner only.
        days: How long the certificates hold.

    Returns:
        Files that were made, each readable by its owner only.

    Raises:
        CredentialsError: the directory cannot be written or has keys, or the package
            ``cryptography`` is missing.
    """
    try:
        from cryptography import x509  # noqa: F401
    except ImportError:
        raise CredentialsError(
            "making keys needs the package cryptography: pip install 'vllm-ssdkv[node]'"
        ) from None
    from vllm_ssdkv.node.protocol.certificates import certificates

    now = datetime.datetime.now(datetime.UTC)
    files = certificates(now, now + datetime.timedelta(days=days))
    made: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            path = directory / name
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                made.append(path)
                file.write(content)
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise CredentialsError(
                f"{error.filename} is there already; keys are never overwritten: choose another "
                "directory"
            ) from None
        raise CredentialsError(f"cannot write keys to {directory} ({error})") from error
    return made
