"""An empty data folder, a server, and photographs."""

import http.server
import threading

import pytest
import torch


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data folder, nothing in the cache, and no network."""
    monkeypatch.setenv("PERSONAFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PERSONAFL_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


class Server(http.server.BaseHTTPRequestHandler):
    """Files by name; `cut` ends that many answers early, `ranges` may be refused."""

    held: dict
    asked: list
    cut = 0
    ranges = True

    def do_GET(self):
        cls, name = type(self), self.path.strip("/").split("?")[0]
        asked = self.headers.get("Range")
        cls.asked.append((name, asked))
        if name not in cls.held:
            self.send_error(404)
            return
        body = cls.held[name]
        start = int(asked[6:-1]) if asked and cls.ranges else 0
        if start >= len(body) and start:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked and cls.ranges else 200)
        if asked and cls.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if cls.cut:
            cls.cut -= 1
            self.wfile.write(body[start : start + (len(body) - start) // 2])
            self.close_connection = True
            return
        self.wfile.write(body[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    kind = type("Held", (Server,), {"held": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        kind.url = f"http://127.0.0.1:{running.server_port}/"  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield kind
        running.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def photos():
    """32 x 32 pieces of two photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    out = []
    for photo in load_sample_images().images:
        small = torch.tensor(photo[:384]).float().view(96, 4, 160, 4, 3).mean((1, 3))
        out.append(small.view(3, 32, 5, 32, 3).permute(0, 2, 4, 1, 3).flatten(0, 1))
    return torch.cat(out).to(torch.uint8)  # [30, 3, 32, 32]
