"""Keys and certificates of a deployment: a CA, the server's certificate, a key pair for every node.

What is there is never written again. A client's own files stand in a folder that is given to it.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from personafl.core.errors import UserError
from personafl.deployment.flower.folder import CLIENT, Folder
from personafl.deployment.flower.private_files import make_private, write_new
from personafl.deployment.flower.settings import LOOPBACK, split_address

CA_DAYS, SERVER_DAYS = 3650, 825
BEGINS = datetime.timedelta(hours=1)  # before now: clocks of clients may be behind
CURVE = ec.SECP384R1  # of nodes' keys, as Flower's documentation has it, and of all others


@dataclass(frozen=True)
class Made:
    """What `make` wrote, by name."""

    certificates: tuple[str, ...]
    clients: tuple[str, ...]


def make(folder: Folder, clients: int, hosts: Sequence[str] = ()) -> Made:
    """Write what is missing of certificates and of the keys of clients 0 to N-1."""
    if clients < 0:
        raise UserError(f"--clients {clients}: must not be negative")
    wanted = _hosts([split_address("link.address", folder.link().address)[0], *hosts])
    make_private(folder.keys)
    certificates = _certificates(folder.keys, wanted)
    names = [f"client-{i}" for i in range(clients)]
    new = [n for n in names if not (folder.keys / f"{n}.pub").exists() and not (folder.clients / n).exists()]
    for name in new:
        _client(folder, name)
    return Made(tuple(certificates), tuple(new))


def hosts_of(certificate: Path) -> set[str]:
    """The names and addresses a certificate is for."""
    found = _loaded(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(n.value) for n in found}


def expires(certificate: Path) -> datetime.datetime:
    """Return until when a certificate is valid."""
    return _loaded(certificate).not_valid_after_utc


def check_node_key(path: Path) -> None:
    """Refuse what is no private key of a node."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a client needs the private key that personafl deploy keys made for it")
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: not the private key of a node (an unencrypted EC key in OpenSSH's format)")


def check_certificate(path: Path) -> None:
    """Refuse what is no certificate."""
    _loaded(path)


def _loaded(path: Path) -> x509.Certificate:
    if not path.is_file():
        raise UserError(f"{path}: no such file; personafl deploy keys makes certificates")
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise UserError(f"{path}: not a certificate in PEM form") from None


def _hosts(given: Sequence[str]) -> list[str]:
    """Names and addresses for the server's certificate, those of the loopback interface among them."""
    for host in given:
        if not re.fullmatch(r"[A-Za-z0-9.:*-]+", host):
            raise UserError(f"--host {host!r}: must be a host name or an IP address, without a port")
    return list(dict.fromkeys([*given, *LOOPBACK]))


def _certificates(keys: Path, hosts: list[str]) -> list[str]:
    ca_key, ca, key, certificate = (keys / n for n in ("ca.key", "ca.crt", "server.key", "server.crt"))
    if certificate.exists():
        if missing := [h for h in hosts if h not in hosts_of(certificate)]:
            raise UserError(
                f"{certificate}: is not for {', '.join(missing)}; move it and server.key away and make keys again "
                "(this needs ca.key)"
            )
        return []
    if ca.exists() and not ca_key.exists():
        raise UserError(f"{ca_key}: no such file; it is needed once more, to sign the server's certificate")
    made = []
    if not ca.exists():
        signer = ec.generate_private_key(CURVE())
        write_new(ca_key, _pem(signer))
        _write_public(ca, _sign_ca(signer))
        made += ["ca.key", "ca.crt"]
    loaded = serialization.load_pem_private_key(ca_key.read_bytes(), None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise UserError(f"{ca_key}: not an EC private key")
    if key.exists():
        own = serialization.load_pem_private_key(key.read_bytes(), None)
    else:
        own = ec.generate_private_key(CURVE())
        write_new(key, _pem(own))
        made.append("server.key")
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    _write_public(certificate, _sign_server(own, loaded, _loaded(ca), hosts))
    return [*made, "server.crt"]


def _client(folder: Folder, name: str) -> None:
    """A client's key pair: the public key stays, the private one goes into the folder that is given to the client."""
    key = ec.generate_private_key(CURVE())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    shown = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    template = folder.client.read_text(encoding="utf-8")
    text, found = re.subn(rf'^id = "{CLIENT}"$', f'id = "{name}"', template, flags=re.M)
    if found != 1:
        raise UserError(f'{folder.client}: must have one line id = "{CLIENT}", in whose place a client\'s name comes')
    home = folder.clients / name
    make_private(folder.clients)
    home.mkdir(mode=0o700)
    write_new(home / "node.key", secret)
    _write_public(home / "ca.crt", (folder.keys / "ca.crt").read_bytes())
    _write_public(home / "client.toml", text.encode())
    if folder.modules.is_dir():
        shutil.copytree(folder.modules, home / "modules")
    _write_public(folder.keys / f"{name}.pub", shown + b"\n")


def _sign_ca(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "personafl deployment CA")])
    made = _builder(name, name, key, CA_DAYS).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    made = made.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return made.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _sign_server(
    key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, ca: x509.Certificate, hosts: list[str]
) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    made = _builder(name, ca.subject, key, SERVER_DAYS)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(digital_signature=True), critical=True)
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    made = made.add_extension(x509.SubjectAlternativeName([_general(h) for h in hosts]), critical=False)
    made = made.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    return made.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    begun = now - BEGINS
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(begun)
    made = made.not_valid_after(now + datetime.timedelta(days=days))
    return made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_public(path: Path, content: bytes) -> None:
    write_new(path, content, 0o644)
