"""Three phones and a server on this machine, over TLS and with keys: each phone ends with a model of its own.

python examples/phones.py [FOLDER]

The phones hold 60 windows each of three people's movements (UCI HAR, where PERSONAFL_DATA or the cache has it, else
36 handwritten digits each of three habits). Everything a real federation does is done by the same commands:
`personafl deploy init`, `keys`, `server`, `client`, `start`, `collect`. Needs `pip install 'personafl[flower]'`; takes
a few minutes.
"""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import personafl
from personafl.data import DATASETS
from personafl.deployment import load_model

PHONES = 3


def people() -> tuple[str, dict[str, float], list[tuple[np.ndarray, np.ndarray]]]:
    """A network and how it is trained, and what each phone recorded."""
    try:
        har = DATASETS["har"]()
    except personafl.UserError:
        digits = DATASETS["digits"]()
        habits = [range(6), range(2, 8), range(4, 10)]
        rows = [np.flatnonzero(np.isin(digits.labels, list(h)))[i * 36 : (i + 1) * 36] for i, h in enumerate(habits)]
        return "mlp", {"local_epochs": 10, "lr": 0.3}, [(digits.x[r].numpy(), digits.labels[r]) for r in rows]
    assert har.clients is not None
    who = np.unique(har.clients)[:PHONES]
    rows = [np.random.default_rng(int(p)).permutation(np.flatnonzero(har.clients == p))[:60] for p in who]
    return "har-dnn", {"local_epochs": 5, "lr": 0.1}, [(har.x[r].numpy(), har.labels[r]) for r in rows]


def deploy(*words: str) -> str:
    """A command of `personafl deploy`, and what it said."""
    command = [sys.executable, "-m", "personafl", "deploy", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[2:])}: {done.stdout}{done.stderr}")
    return done.stdout


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> None:
    home = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="phones-")).absolute()
    folder, running = home / "federation", []
    network, trained, recorded = people()
    print(f"{PHONES} phones with {len(recorded[0][1])} examples each; half of them are for testing", flush=True)

    # What every phone has. The simulation further down reads the same, a file a phone.
    for i, (x, y) in enumerate(recorded):
        (home / f"client-{i}").mkdir(parents=True)
        np.savez(home / f"client-{i}" / "recorded.npz", x=x, y=y)
        (home / "all").mkdir(exist_ok=True)
        np.savez(home / "all" / f"client-{i}.npz", x=x, y=y)
    recipe = {
        "data": {"dataset": str(home / "all"), "partition": "natural", "test_share": 0.5},
        "model": {"name": network},
        "training": {"num_rounds": 12, "join_ratio": 1.0, "batch_size": 10, **trained},
        "evaluation": {"shift": "none", "eval_every": 12},
        "algorithms": [{"name": "dm-pfl", "allocation": "erk"}],
    }
    (home / "recipe.toml").write_text(personafl.config.dump(personafl.config.load(recipe)))

    # The server's folder, and a folder for each phone with its key.
    port, inner = free_port(), free_port()
    at = ["--address", f"localhost:{port}", "--port", str(inner)]
    deploy("init", str(home / "recipe.toml"), str(folder), "--clients", str(PHONES), *at)
    deploy("keys", str(folder))
    try:
        with (home / "server.log").open("w") as log:
            words = [sys.executable, "-m", "personafl", "deploy", "server", str(folder)]
            running.append(subprocess.Popen(words, stdout=log, stderr=log))
        for i in range(PHONES):
            given = folder / "clients" / f"client-{i}"
            file = given / "client.toml"
            file.write_text(file.read_text().replace('data = "data"', f'data = "{home / f"client-{i}"}"'))
            with (home / f"client-{i}.log").open("w") as log:
                words = [sys.executable, "-m", "personafl", "deploy", "client", str(file)]
                running.append(subprocess.Popen(words, stdout=log, stderr=log))
        while "ready" not in (home / "server.log").read_text():
            if running[0].poll() is not None:
                sys.exit((home / "server.log").read_text())
            time.sleep(0.5)
        print("server and phones are up; 12 rounds of DM-PFL take some minutes", flush=True)
        begun = time.monotonic()
        deploy("start", str(folder), "--wait")
        print(f"they took {time.monotonic() - begun:.0f} s")
        print(deploy("collect", str(folder)))
        summary = json.loads((folder / "results" / "summary.json").read_text())
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()

    # What each phone would have come to by itself, on the same training and test data.
    alone = personafl.run({**recipe, "algorithms": [{"name": "local"}]}, quiet=True)["local"]
    by_itself = {row["client"]: row["accuracy"] for row in alone.clients}
    print("accuracy on the phone's own test data")
    print("| phone    | its own model | trained alone |")
    print("|----------|---------------|---------------|")
    for i in range(PHONES):
        (where,) = (folder / "clients" / f"client-{i}" / "state").glob(f"*/client-{i}/model")
        model = load_model(where)  # without the server, and without Flower
        assert model.predict(recorded[i][0][:2]).shape[0] == 2
        print(f"| client-{i} | {model.scores['own']:13.1%} | {by_itself[i]:13.1%} |")
    own, local = summary["accuracy"]["personal"]["mean"], alone.summary["accuracy"]["personal"]["mean"]
    print(f"| mean     | {own:13.1%} | {local:13.1%} |")
    print(f"everything is in {home}")


if __name__ == "__main__":
    main()
