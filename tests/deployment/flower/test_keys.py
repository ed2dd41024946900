"""Keys and certificates: what they are for, who can read them, and that none is written twice."""

from __future__ import annotations

import datetime
import ssl
import stat
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from personafl.core.errors import UserError
from personafl.deployment.flower import keys
from personafl.deployment.flower.folder import Folder
from tests.deployment.flower.folders import made, with_keys


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Folder) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.root.rglob("*") if p.is_file()}


def shake(ca: Path, folder: Folder, host: str) -> None:
    """A TLS handshake between a client that trusts a CA and a server with the folder's certificate."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder.keys / "server.crt", folder.keys / "server.key")
    client = ssl.create_default_context(cafile=str(ca))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    left = list(ends)
    for _ in range(10):
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not left


def test_a_client_that_has_the_ca_takes_the_server_for_its_hosts_alone(tmp_path: Path) -> None:
    folder = made(tmp_path / "fed", clients=1)
    keys.make(folder, 1, ["fl.example.org", "10.1.2.3"])
    ca = folder.clients / "client-0" / "ca.crt"
    for host in ("fl.example.org", "10.1.2.3", "localhost", "127.0.0.1", "::1"):
        shake(ca, folder, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake(ca, folder, "other.example.org")
    other = with_keys(tmp_path / "other", clients=1)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(other.keys / "ca.crt", folder, "localhost")


def test_a_node_has_a_p_384_key_pair_in_openssh_s_form(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=2)
    shown = []
    for name in ("client-0", "client-1"):
        secret = serialization.load_ssh_private_key((folder.clients / name / "node.key").read_bytes(), None)
        assert isinstance(secret, ec.EllipticCurvePrivateKey) and isinstance(secret.curve, ec.SECP384R1)
        public = serialization.load_ssh_public_key((folder.keys / f"{name}.pub").read_bytes())
        assert public == secret.public_key()
        shown.append(public)
    assert shown[0] != shown[1]


def test_private_files_are_their_owner_s(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed")
    private = [folder.keys / "ca.key", folder.keys / "server.key", *folder.clients.glob("*/node.key")]
    assert len(private) == 4 and {mode(p) for p in private} == {0o600}
    assert {mode(p) for p in (folder.keys, folder.clients, *folder.clients.iterdir())} == {0o700}


def test_a_client_s_folder_has_what_it_needs_and_nothing_of_others(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed")
    home = folder.clients / "client-1"
    assert {p.name for p in home.iterdir()} == {"ca.crt", "node.key", "client.toml"}
    told = tomllib.loads((home / "client.toml").read_text())
    assert told["client"]["id"] == "client-1" and told["link"]["key"] == "node.key"
    assert (home / "ca.crt").read_bytes() == (folder.keys / "ca.crt").read_bytes()


def test_what_is_there_stays_and_what_is_missing_is_added(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=2)
    before = contents(folder)
    assert keys.make(folder, 2) == keys.Made((), ())
    assert contents(folder) == before
    assert keys.make(folder, 3) == keys.Made((), ("client-2",))
    assert {p: c for p, c in contents(folder).items() if p in before} == before


def test_clients_are_added_without_the_ca_s_key(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=1)
    (folder.keys / "ca.key").unlink()
    assert keys.make(folder, 2).clients == ("client-1",)
    (folder.keys / "server.crt").unlink()
    with pytest.raises(UserError, match=r"ca\.key: no such file; it is needed once more"):
        keys.make(folder, 2)


def test_a_certificate_is_made_again_for_the_same_key(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=1)
    secret = (folder.keys / "server.key").read_bytes()
    (folder.keys / "server.crt").unlink()
    assert keys.make(folder, 1, ["new.example.org"]).certificates == ("server.crt",)
    assert (folder.keys / "server.key").read_bytes() == secret
    shake(folder.keys / "ca.crt", folder, "new.example.org")


def test_a_key_that_was_revoked_or_handed_over_is_not_made_again(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=2)
    (folder.keys / "client-0.pub").unlink()  # revoked
    for file in (folder.clients / "client-1").iterdir():
        file.unlink()
    (folder.clients / "client-1").rmdir()  # handed over
    assert keys.make(folder, 2).clients == ()
    assert not (folder.keys / "client-0.pub").exists()


def test_a_host_that_the_certificate_lacks_is_refused(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed")
    with pytest.raises(UserError, match=r"server\.crt: is not for other\.example\.org; move it"):
        keys.make(folder, 2, ["other.example.org"])


@pytest.mark.parametrize("host", ["", "a b", "https://a", "a/b"])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(UserError, match="must be a host name or an IP address"):
        keys.make(made(tmp_path / "fed"), 1, [host])


def test_certificates_expire_after_so_many_days(tmp_path: Path) -> None:
    folder, now = with_keys(tmp_path / "fed", clients=1), datetime.datetime.now(datetime.UTC)
    assert (keys.expires(folder.keys / "server.crt") - now).days == keys.SERVER_DAYS - 1
    assert (keys.expires(folder.keys / "ca.crt") - now).days == keys.CA_DAYS - 1


def test_a_template_without_the_placeholder_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "fed")
    folder.client.write_text(folder.client.read_text().replace('id = "CLIENT"', 'id = "me"'))
    with pytest.raises(UserError, match=r"client\.toml: must have one line id"):
        keys.make(folder, 1)
    assert not folder.clients.exists() and not list(folder.keys.glob("*.pub"))


def test_what_is_no_node_key_or_certificate_is_refused(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=1)
    keys.check_node_key(folder.clients / "client-0" / "node.key")
    with pytest.raises(UserError, match="not the private key of a node"):
        keys.check_node_key(folder.keys / "server.key")
    with pytest.raises(UserError, match="no such file"):
        keys.check_node_key(tmp_path / "gone")
    with pytest.raises(UserError, match="not a certificate"):
        keys.check_certificate(folder.keys / "ca.key")


def constraints(certificate: Path) -> x509.BasicConstraints:
    found = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    held = found.get_extension_for_class(x509.BasicConstraints)
    assert held.critical
    return held.value


def usage(certificate: Path) -> set[str]:
    found = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    held = found.get_extension_for_class(x509.KeyUsage)
    asked = ("digital_signature", "key_cert_sign", "crl_sign", "key_encipherment", "key_agreement")
    assert held.critical
    return {name for name in asked if getattr(held.value, name)}


def test_the_ca_signs_servers_alone_and_a_server_signs_nobody(tmp_path: Path) -> None:
    """Else whoever has the server's key could make certificates that clients take, and so could what it signed."""
    folder = with_keys(tmp_path / "fed", clients=1)
    assert constraints(folder.keys / "ca.crt") == x509.BasicConstraints(ca=True, path_length=0)
    assert usage(folder.keys / "ca.crt") == {"key_cert_sign", "crl_sign"}
    assert constraints(folder.keys / "server.crt") == x509.BasicConstraints(ca=False, path_length=None)
    assert usage(folder.keys / "server.crt") == {"digital_signature"}


def test_a_key_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=1)
    secret = (folder.keys / "ca.key").read_bytes()
    for name in ("ca.crt", "server.crt"):
        (folder.keys / name).unlink()
    with pytest.raises(FileExistsError, match=r"ca\.key"):
        keys.make(folder, 1)
    assert (folder.keys / "ca.key").read_bytes() == secret
    assert not (folder.keys / "ca.crt").exists()
