"""Certificates that expire: when it is said, by whom, and what is to do."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.deployment.flower import expiry, keys, report
from personafl.deployment.flower.expiry import Certificate, ExpiryWatch
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.settings import read_client
from tests.deployment.flower.folders import with_keys

EXPIRES = datetime.datetime(2030, 6, 30, 12, tzinfo=datetime.UTC)
HOUR, DAY = datetime.timedelta(hours=1), datetime.timedelta(days=1)


def said_at(*times: datetime.datetime) -> list[str]:
    """What is said when it is looked at these times."""
    said: list[str] = []
    clock = list(times)
    watch = ExpiryWatch(lambda: [Certificate("a.crt", EXPIRES, "Make a new one.")], said.append, now=lambda: clock[0])
    while clock:
        watch.look()
        clock.pop(0)
    return said


def test_it_is_said_from_thirty_days_before_once_a_day() -> None:
    first = EXPIRES - 33 * DAY
    said = said_at(*(first + n * HOUR for n in range(35 * 24)))
    days = [line.split(" on ")[0] for line in said]
    before = [f"a.crt expires in {n} days," for n in range(30, 1, -1)]
    assert days == [*before, "a.crt expires in 1 day,", "a.crt expires in less than a day,", *["a.crt expired"] * 2]
    assert said[0] == "a.crt expires in 30 days, on 2030-06-30 12:00 UTC. Make a new one."
    assert said[-1] == (
        "a.crt expired on 2030-06-30 12:00 UTC. No client can connect until there is a new one. Make a new one."
    )


def test_a_clock_that_is_put_back_does_not_silence_it() -> None:
    assert len(said_at(EXPIRES - DAY, EXPIRES - 5 * DAY, EXPIRES - 5 * DAY + 25 * HOUR)) == 3


def test_a_file_that_is_being_replaced_does_not_end_anything() -> None:
    def read() -> list[Certificate]:
        raise UserError("not a certificate")

    ExpiryWatch(read, print).look()


def test_a_server_looks_at_both_of_its_certificates(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed", clients=1)
    ca, own = expiry.server_certificates(folder)
    assert (ca.name, own.name) == ("keys/ca.crt", "keys/server.crt")
    assert ca.expires - own.expires > datetime.timedelta(days=2000)
    assert "give keys/ca.crt to every client" in ca.remedy and "Clients keep what they have" in own.remedy


@contextlib.contextmanager
def shown(folder: Folder) -> Iterator[str]:
    """A server that shows the folder's certificate to whoever asks; its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder.keys / "server.crt", folder.keys / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"localhost:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_client_knows_the_server_s_certificate_from_the_handshake(tmp_path: Path) -> None:
    folder, other = with_keys(tmp_path / "fed", clients=1), with_keys(tmp_path / "other", clients=1)
    home = folder.clients / "client-0"
    with shown(folder) as address:
        file = home / "client.toml"
        file.write_text(file.read_text().replace("localhost:8443", address))
        ca, own = expiry.client_certificates(read_client(file))
        assert (ca.name, own.name) == ("ca.crt", f"the certificate of {address}")
        assert (ca.expires, own.expires) == (keys.expires(home / "ca.crt"), keys.expires(folder.keys / "server.crt"))
        assert expiry.server_expires(address, other.keys / "ca.crt") is None  # somebody else's word
    assert [c.name for c in expiry.client_certificates(read_client(file))] == ["ca.crt"]  # nobody answers


def test_a_client_names_the_day_a_server_s_certificate_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SERVER_DAYS", -1)
    monkeypatch.setattr(keys, "BEGINS", datetime.timedelta(days=30))
    folder = with_keys(tmp_path / "fed", clients=1)
    with shown(folder) as address:
        assert expiry.server_expires(address, folder.keys / "ca.crt") == keys.expires(folder.keys / "server.crt")


def test_the_status_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_keys(tmp_path / "fed", clients=1)
    found = report.status(folder)
    assert [c["days_left"] for c in found["certificates"]] == [keys.CA_DAYS - 1, keys.SERVER_DAYS - 1]
    assert report.status_lines(found) == ["server   not running"]
    later = keys.expires(folder.keys / "server.crt") - 3 * DAY - HOUR
    monkeypatch.setattr(expiry, "utc_now", lambda: later)
    assert report.status_lines(report.status(folder))[1].startswith("keys     keys/server.crt expires in 3 days, on ")
