"""The reverse proxy between clients and SuperLink: an nginx configuration that passes the Fleet API alone.

Flower's Control API, through which runs are started, and its Runtime API share a port with the Fleet API, by which
nodes work, and ask for no credentials: whoever reaches them can run code on every node.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from personafl.core.errors import UserError
from personafl.flower.settings import ServerLink, split_address

# Which requests are passed goes by the request line as it was sent, and what is passed is put together anew: nothing
# that nginx and the SuperLink could read differently (dots, double slashes, escapes, a query) gets through.
TEXT = """\
# Between clients and Flower's SuperLink: lets the calls of nodes through (POST /v1/fleet/...) and nothing else. The
# SuperLink's other interfaces ask for no credentials. Paths are relative to this file: nginx -p . -c nginx.conf
worker_processes auto;
pid logs/nginx.pid;
error_log logs/nginx.log warn;

events {{}}

http {{
    server_tokens off;
    access_log off;
    client_body_temp_path flower/nginx/body;
    proxy_temp_path flower/nginx/proxy;
    fastcgi_temp_path flower/nginx/fastcgi;
    uwsgi_temp_path flower/nginx/uwsgi;
    scgi_temp_path flower/nginx/scgi;

    server {{
        listen {port} ssl;
        {hash}listen [::]:{port} ssl; # IPv6
        ssl_certificate keys/server.crt;
        ssl_certificate_key keys/server.key;
        ssl_protocols TLSv1.2 TLSv1.3;

        location / {{
            access_log logs/refused.log;
            return 404;
        }}

        location ~ ^/v1/fleet/(?<call>[a-z-]+)$ {{
            if ($request_uri !~ "^/v1/fleet/[a-z-]+$") {{
                return 404;
            }}
            if ($request_method != POST) {{
                return 404;
            }}
            # Flower sends what is large in pieces of 5 MiB. A SuperLink reads a request before it looks at its
            # signature, so this is also what a stranger can make it hold.
            client_max_body_size 64m;
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_http_version 1.1;
            proxy_read_timeout 120s;
            proxy_pass https://127.0.0.1:{link}/v1/fleet/$call;
            proxy_ssl_verify on;
            proxy_ssl_verify_depth 2;
            proxy_ssl_trusted_certificate keys/ca.crt;
            proxy_ssl_name localhost;
        }}
    }}
}}
"""


def text(link: ServerLink) -> str:
    """`nginx.conf` of a deployment folder."""
    host, port = split_address("link.address", link.address)
    return TEXT.format(port=port, link=link.port, hash="" if ":" in host else "# ")


def find() -> str | None:
    """nginx, where it is installed; distributions put it where only root looks."""
    return shutil.which("nginx") or next(
        (p for p in ("/usr/sbin/nginx", "/usr/local/sbin/nginx") if Path(p).is_file()), None
    )


def command(nginx: str, root: Path) -> list[str]:
    """nginx in the foreground with the folder's configuration."""
    return [
        nginx,
        "-p",
        f"{root}/",
        "-c",
        str(root / "nginx.conf"),
        "-e",
        str(root / "logs" / "nginx.log"),
        "-g",
        "daemon off;",
    ]


def check(nginx: str, root: Path, link: ServerLink) -> None:
    """Refuse a configuration that nginx does not take, or that leads to another SuperLink."""
    file = root / "nginx.conf"
    if not file.is_file():
        raise UserError(f"{file}: no such file; with --no-proxy the server starts without a proxy")
    if f"127.0.0.1:{link.port}/" not in file.read_text(encoding="utf-8"):
        raise UserError(f"{file}: does not lead to 127.0.0.1:{link.port}, the link.port of deployment.toml")
    (root / "flower" / "nginx").mkdir(parents=True, exist_ok=True)
    tried = subprocess.run([*command(nginx, root), "-t", "-q"], capture_output=True, text=True, errors="replace")
    if tried.returncode:
        raise UserError(f"{file}: nginx refuses it: {' '.join(tried.stderr.split())[-400:]}")
