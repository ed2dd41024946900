"""Certificates that expire while a server or a client runs: named days before, once a day, with what to do."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from personafl.core.errors import UserError
from personafl.deployment.flower import keys
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.settings import Client, split_address

WARN_DAYS = 30
DAY = datetime.timedelta(days=1)
HANDSHAKE_SECONDS = 5.0
_HAS_EXPIRED = 10  # of OpenSSL's X509_V_ERR codes

NEW_SERVER = (
    "To make a new one, bring keys/ca.key back, move keys/server.crt away, run personafl deploy keys {root} and start "
    "the server again. Clients keep what they have."
)
NEW_CA = (
    "To make a new one, move keys/ca.crt, ca.key, server.crt and server.key away, run personafl deploy keys {root}, "
    "give keys/ca.crt to every client and start the server again."
)
ASK_SERVER = "Whoever runs the server can make a new one with personafl deploy keys; nothing has to be done here."
ASK_CA = "This client needs a new ca.crt from whoever runs the server."


@dataclass(frozen=True)
class Certificate:
    """A certificate that a server or client depends on."""

    name: str
    expires: datetime.datetime
    remedy: str

    def days_left(self, now: datetime.datetime) -> int:
        """Return how many whole days it is still valid; negative where it is no more."""
        return (self.expires - now).days

    def warning(self, now: datetime.datetime) -> str | None:
        """Return what to say of it, which is nothing while it is valid for more than 30 days."""
        on = f"{self.expires:%Y-%m-%d %H:%M} UTC"
        days = self.days_left(now)
        if now >= self.expires:
            return f"{self.name} expired on {on}. No client can connect until there is a new one. {self.remedy}"
        if days > WARN_DAYS:
            return None
        left = "in less than a day" if days == 0 else "in 1 day" if days == 1 else f"in {days} days"
        return f"{self.name} expires {left}, on {on}. {self.remedy}"


def utc_now() -> datetime.datetime:
    """Return the time."""
    return datetime.datetime.now(datetime.UTC)


class ExpiryWatch:
    """Names certificates that expire soon or have expired, each once a day."""

    def __init__(
        self,
        read: Callable[[], Sequence[Certificate]],
        say: Callable[[str], None],
        hours: float = 1.0,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        """Watch what `read` returns, which is asked every `hours`."""
        self._read, self._say, self._now = read, say, now
        self._every = datetime.timedelta(hours=hours)
        self._looked: datetime.datetime | None = None
        self._said: dict[str, datetime.datetime] = {}

    def look(self) -> None:
        """Say what there is to say; call it as often as you like."""
        now = self._now()
        if self._looked is not None and self._looked <= now < self._looked + self._every:
            return
        self._looked = now
        try:
            certificates = self._read()
        except (UserError, OSError):  # a file that is being replaced; the next look finds the new one
            return
        for certificate in certificates:
            line, said = certificate.warning(now), self._said.get(certificate.name)
            if line is not None and (said is None or not said <= now < said + DAY):
                self._said[certificate.name] = now
                self._say(line)


def server_certificates(folder: Folder) -> list[Certificate]:
    """Return the certificates of a server, as they are in its folder now."""
    remedies = {"ca.crt": NEW_CA, "server.crt": NEW_SERVER}
    files = {name: folder.keys / name for name in remedies if (folder.keys / name).is_file()}
    return [
        Certificate(f"keys/{name}", keys.expires(file), remedies[name].format(root=folder.root))
        for name, file in files.items()
    ]


def client_certificates(client: Client) -> list[Certificate]:
    """Return the CA's certificate that a client was given, and the server's, as far as it can be asked for."""
    found = [Certificate("ca.crt", keys.expires(client.ca), ASK_CA)]
    if (expires := server_expires(client.link.address, client.ca)) is not None:
        found.append(Certificate(f"the certificate of {client.link.address}", expires, ASK_SERVER))
    return found


def server_expires(address: str, ca: Path) -> datetime.datetime | None:
    """Return until when the certificate is valid that a server shows; None where it cannot be asked or trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(str(ca))
    with contextlib.suppress(OSError, ValueError):
        try:
            return _server_certificate(address, context)
        except ssl.SSLCertVerificationError as e:
            if e.verify_code != _HAS_EXPIRED:
                return None
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to name the day it expired
        return _server_certificate(address, context)
    return None


def _server_certificate(address: str, context: ssl.SSLContext) -> datetime.datetime | None:
    host, port = split_address("link.address", address)
    with (
        socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(shown).not_valid_after_utc if shown else None
