"""The reverse proxy between clients and SuperLink: an nginx configuration that passes the Fleet API alone.

Flower's Control API, through which runs are started, and its Runtime API share a port with the Fleet API, by which
nodes work, and ask for no credentials: whoever reaches them can run code on every node.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from personafl.core.errors import UserError
from personafl.deployment.flower.private_files import make_private
from personafl.deployment.flower.processes import has_ipv6
from personafl.deployment.flower.settings import ServerLink, is_loopback, split_address

# Which requests are passed goes by the request line as it was sent, and what is passed is put together anew: nothing
# that nginx and the SuperLink could read differently (dots, double slashes, escapes, a query) gets through.
#
# A SuperLink reads the whole body of a request before it looks at the signature. So nginx looks first whether the
# public key in the request's header is one of the folder's, and reads a body whole before it passes it on. Status 503
# is what Flower's nodes try again after; after 401 they end.
TEXT = """\
# Between clients and Flower's SuperLink: lets the calls of nodes through (POST /v1/fleet/...) and nothing else. The
# SuperLink's other interfaces ask for no credentials. Paths are relative to this file: nginx -p . -c nginx.conf
# The section "Limits for strangers" of docs/deployment.md says which numbers to raise for a large federation.
worker_processes 2;
worker_rlimit_nofile 8192;
pid logs/nginx.pid;
error_log stderr warn; # deploy server writes it to logs/nginx.log

events {{
    worker_connections 2048; # of each process, idle connections included
}}

http {{
    server_tokens off;
    access_log off;
    client_body_temp_path flower/nginx/body;
    proxy_temp_path flower/nginx/proxy;
    fastcgi_temp_path flower/nginx/fastcgi;
    uwsgi_temp_path flower/nginx/uwsgi;
    scgi_temp_path flower/nginx/scgi;

    # How long a slow or silent connection is waited for. Nodes ask every 3 seconds.
    client_header_timeout 10s;
    large_client_header_buffers 4 2k;
    client_body_timeout 20s; # between two reads
    send_timeout 30s;
    keepalive_timeout 60s;
    lingering_time 10s;
    reset_timedout_connection on;

    # Sets $stranger to the address of a request whose public key is not in keys/, and to nothing for a node's.
    # deploy server writes the file and has it read again when keys/ changes.
    map_hash_max_size 8192;
    map_hash_bucket_size 1024;
    include {nodes};
    map $stranger $any_stranger {{
        default all;
        "" "";
    }}

    # Requests at the same time and per second: of a node's address, of all nodes, of a stranger, of all strangers.
    # A client has at most 3 requests under way, and about 20 small ones around each message.
    limit_conn_zone $binary_remote_addr zone=at_once:2m;
    limit_conn_zone all zone=all_at_once:64k;
    limit_conn_zone $stranger zone=stranger_at_once:2m;
    limit_conn_zone $any_stranger zone=strangers_at_once:64k;
    limit_req_zone $binary_remote_addr zone=rate:2m rate=100r/s;
    limit_req_zone $stranger zone=stranger_rate:2m rate=1r/s;
    limit_req_zone $any_stranger zone=strangers_rate:64k rate=5r/s;
    limit_conn_log_level info;
    limit_req_log_level info;

    # What is refused is written to logs/refused.log, up to a rate; all of it is refused.
    limit_req_zone $binary_remote_addr zone=told:2m rate=1r/s;
    limit_req_zone all zone=all_told:64k rate=2r/s;
    log_format refused 'refused $remote_addr [$time_local] "$first_characters" $status $body_bytes_sent';
    map $request $first_characters {{
        "~^(?<first>.{{0,150}})" $first;
    }}
    map $limit_req_status $within_rate {{
        default 1;
        REJECTED 0;
    }}
    map "$within_rate$status" $is_told {{
        default 0;
        ~^14 1;
    }}

    server {{
{listen}        ssl_certificate keys/server.crt;
        ssl_certificate_key keys/server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        access_log /dev/stdout refused if=$is_told; # deploy server writes it to logs/refused.log

        proxy_request_buffering on;
        proxy_buffering off;
        proxy_http_version 1.1;
        proxy_read_timeout 120s;
        proxy_set_header X-Forwarded-For $remote_addr; # so that the SuperLink's log names it
        proxy_ssl_verify on;
        proxy_ssl_verify_depth 2;
        proxy_ssl_trusted_certificate keys/ca.crt;
        proxy_ssl_name localhost;

        location / {{
            client_max_body_size 0; # a body is thrown away
            limit_req zone=told burst=20 nodelay;
            limit_req zone=all_told burst=100 nodelay;
            limit_req_status 404;
            try_files /- =404;
        }}

        location = /-/unknown-key {{
            internal;
            client_max_body_size 0; # a body is thrown away
            limit_req zone=told burst=20 nodelay;
            limit_req zone=all_told burst=100 nodelay;
            limit_req_status 401;
            try_files /- =401;
        }}

        # How a node begins. A stranger may ask that as well, so that its user is told that the key is not registered.
        location = /v1/fleet/activate-node {{
            if ($request_uri != "/v1/fleet/activate-node") {{
                rewrite ^ /- last;
            }}
            if ($request_method != POST) {{
                rewrite ^ /- last;
            }}
            client_max_body_size 8k;
            limit_conn stranger_at_once 4;
            limit_conn strangers_at_once 16;
            limit_conn at_once 128;
            limit_conn all_at_once 256;
            limit_req zone=stranger_rate burst=10 nodelay;
            limit_req zone=strangers_rate burst=20 nodelay;
            proxy_pass https://127.0.0.1:{link}/v1/fleet/activate-node;
        }}

        location ~ "^/v1/fleet/(?<call>[a-z-]{{1,40}})$" {{
            if ($request_uri !~ "^/v1/fleet/[a-z-]+$") {{
                rewrite ^ /- last;
            }}
            if ($request_method != POST) {{
                rewrite ^ /- last;
            }}
            if ($stranger) {{
                rewrite ^ /-/unknown-key last;
            }}
            # Flower sends what is large in pieces of 5 MiB.
            client_max_body_size 6m;
            limit_conn at_once 128;
            limit_conn all_at_once 256;
            limit_req zone=rate burst=200;
            proxy_pass https://127.0.0.1:{link}/v1/fleet/$call;
        }}
    }}
}}
"""

NODES_FILE = "flower/nginx/nodes.conf"
NODES = """\
# Written by personafl deploy server from the public keys in keys/; it is written anew when these change.
map $http_{header} $stranger {{
    default {default};
{keys}}}
"""


def text(link: ServerLink) -> str:
    """Return `nginx.conf` of a deployment folder."""
    host, port = split_address("link.address", link.address)
    return TEXT.format(port=port, link=link.port, nodes=NODES_FILE, listen=_listen(host, port))


def _listen(host: str, port: int) -> str:
    """The `listen` lines: the loopback interface alone where clients come to an address of it, else all interfaces."""
    if is_loopback(host):
        return _loopback_listen(host, port)
    return f"        listen {port} ssl;\n        {'' if ':' in host else '# '}listen [::]:{port} ssl; # IPv6\n"


def _loopback_listen(host: str, port: int) -> str:
    # The name localhost leads a client to either address. Without IPv6 nginx would refuse to start.
    four = host if host.startswith("127.") else "127.0.0.1"
    six = "" if has_ipv6() else "# "
    return f"        listen {four}:{port} ssl;\n        {six}listen [::1]:{port} ssl;\n"


def write_admitted_keys(root: Path, public_keys: Iterable[str]) -> bool:
    """Write which public keys nginx lets through; return whether that has changed.

    Args:
        root: The deployment folder.
        public_keys: Nodes' public keys in OpenSSH's form.
    """
    header, default = _key_header(), "$remote_addr"
    if header is None:  # this version of Flower sends the key some other way: leave it to the SuperLink
        header, default = "flwr_public_key", '""'
    values = sorted({value for key in public_keys if (value := _header_value(key)) is not None})
    content = NODES.format(header=header, default=default, keys="".join(f'    "{v}" "";\n' for v in values))
    file = root / NODES_FILE
    if file.is_file() and file.read_text(encoding="utf-8") == content:
        return False
    make_private(file.parent)
    draft = file.with_suffix(".tmp")
    draft.write_text(content, encoding="utf-8")
    draft.replace(file)
    return True


def _key_header() -> str | None:
    """The header in which a node sends its public key, as nginx names it."""
    try:
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    except ImportError:
        return None
    return str(FLEET_HTTP_PUBLIC_KEY_HEADER).lower().replace("-", "_")


def _header_value(public_key: str) -> str | None:
    """A public key as a node sends it; nothing for what is no key, which the SuperLink refuses by its own words."""
    try:
        key = serialization.load_ssh_public_key(public_key.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(pem).decode()


def find() -> str | None:
    """nginx, where it is installed; distributions put it where only root looks."""
    return shutil.which("nginx") or next(
        (p for p in ("/usr/sbin/nginx", "/usr/local/sbin/nginx") if Path(p).is_file()), None
    )


def is_root() -> bool:
    """Whether this process, and so nginx, runs as root."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def command(nginx: str, root: Path) -> list[str]:
    """nginx in the foreground with the folder's configuration."""
    # Started by root, nginx would read requests as the user nobody, who cannot write bodies into the folder.
    user = "user root; " if is_root() else ""
    return [
        nginx,
        "-p",
        f"{root}/",
        "-c",
        str(root / "nginx.conf"),
        "-e",
        str(root / "logs" / "nginx.log"),
        "-g",
        f"{user}daemon off;",
    ]


def check(nginx: str, root: Path, link: ServerLink) -> None:
    """Refuse a configuration that nginx does not take, or that leads to another SuperLink."""
    file = root / "nginx.conf"
    if not file.is_file():
        raise UserError(f"{file}: no such file; with --no-proxy the server starts without a proxy")
    if f"127.0.0.1:{link.port}/" not in file.read_text(encoding="utf-8"):
        raise UserError(f"{file}: does not lead to 127.0.0.1:{link.port}, the link.port of deployment.toml")
    if not (root / NODES_FILE).is_file():
        write_admitted_keys(root, ())
    tried = subprocess.run([*command(nginx, root), "-t", "-q"], capture_output=True, text=True, errors="replace")
    if tried.returncode:
        raise UserError(f"{file}: nginx refuses it: {' '.join(tried.stderr.split())[-400:]}")
