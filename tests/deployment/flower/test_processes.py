"""Flower's programs as processes: none is left behind, whoever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import personafl
from personafl.core.errors import UserError
from personafl.deployment.flower import processes
from personafl.deployment.flower.processes import Child, Stop


def script(path: Path, text: str) -> str:
    """An executable Python file."""
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return str(path)


def waited(condition, seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


# The package without its own imports, of which PyTorch takes seconds.
BARE = f"""
import sys, types
package = sys.modules["personafl"] = types.ModuleType("personafl")
package.__path__ = [{str(Path(personafl.__file__).parent)!r}]
"""

# A process with a child in its group and one in a group of its own, whose ids it prints.
PARENT = """
    import subprocess, sys, time
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    near = subprocess.Popen(sleep)
    far = subprocess.Popen(sleep, start_new_session=True)
    print(near.pid, far.pid, flush=True)
    time.sleep(600)
"""


def test_nothing_is_reported_looked_up_or_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_OTHER", "1")
    monkeypatch.setenv("PYTHONPATH", "/first")
    found = processes.environment(tmp_path, Path("/own"))
    assert {k: v for k, v in found.items() if k.startswith(("FLWR_", "RAY_"))} == {
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    assert found["PYTHONPATH"] == "/first:/own"
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_lines_are_handed_on_without_colours(tmp_path: Path) -> None:
    said: list[str] = []
    talker = script(tmp_path / "talk", r'print("\x1b[92mINFO \x1b[0m: ä"); import sys; print("end", file=sys.stderr)')
    child = Child([talker], dict(os.environ), tmp_path, said.append)
    assert child.wait(30) == 0
    child.clear()
    assert sorted(said) == ["INFO : ä", "end"]


@pytest.mark.skipif(sys.platform != "linux", reason="the tree of processes is read as Linux has it")
def test_stopping_ends_the_group_and_the_family(tmp_path: Path) -> None:
    """In a process of its own, whose family is nobody else's."""
    parent = script(tmp_path / "parent", PARENT)
    code = f"""
        import os, pathlib, time
        from personafl.deployment.flower.processes import Child, adopt, end_family, family
        adopt()
        said = []
        child = Child([{parent!r}], dict(os.environ), pathlib.Path("."), said.append)
        while not said:
            time.sleep(0.01)
        near, far = map(int, said[0].split())
        assert set(family(os.getpid())) == {{child.process.pid, near, far}}
        child.stop()
        print(near in family(os.getpid()), far in family(os.getpid()))
        end_family()
        print(family(os.getpid()), far)
    """
    done = subprocess.run(
        [sys.executable, "-c", BARE + textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
    )
    first, second = done.stdout.splitlines()
    assert first == "False True"  # a group of its own outlives its parent
    assert second.startswith("[] ") and not alive(int(second.split()[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    sleeper = script(tmp_path / "sleep", "import time; print('up', flush=True); time.sleep(600)")
    code = f"""
        import os, pathlib, time
        from personafl.deployment.flower.processes import Child
        def heard(line):
            print(child.process.pid, flush=True)
        child = Child([{sleeper!r}], dict(os.environ), pathlib.Path("."), heard)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", BARE + textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        assert waited(lambda: not alive(child))
    finally:
        parent.kill()
        parent.communicate()


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    child = Child([script(tmp_path / "deaf", deaf)], dict(os.environ), tmp_path, said.append)
    assert waited(lambda: said)
    child.stop(patience=0.05)
    assert child.ended() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_is_asked_by_signals_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop and not stop.wait(0)
        os.kill(os.getpid(), number)
        assert waited(lambda: stop) and stop.wait(600)
    assert signal.getsignal(number) is before


def test_a_stop_is_asked_where_there_is_no_hangup(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.delattr(signal, "SIGHUP")
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert waited(lambda: stop)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wait(0.01)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("printed", "code", "words"),
    [
        ('{"success": false, "error-message": "no such\\n  node"}', 0, "flwr list: no such node"),
        ("Traceback: nonsense", 1, "flwr list: no answer: Traceback: nonsense"),
    ],
)
def test_a_refusal_of_flwr_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: str, code: int, words: str
) -> None:
    fake = script(tmp_path / "flwr", f"import sys; print({printed!r}); sys.exit({code})")
    monkeypatch.setattr(processes, "program", lambda name: fake)
    with pytest.raises(UserError, match=words):
        processes.call(["list"], dict(os.environ), tmp_path)


def test_an_answer_of_flwr_is_read_behind_what_it_says_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = 'import sys, json; print("hello"); print(json.dumps({"success": True, "said": sys.argv[1:]}))'
    monkeypatch.setattr(processes, "program", lambda name: script(tmp_path / name, text))
    assert processes.call(["list", "link"], dict(os.environ), tmp_path)["said"] == ["list", "link", "--format", "json"]


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(UserError, match=r"flower-nothing: no such command .* pip install 'personafl\[flower\]'"):
        processes.program("flower-nothing")


def test_a_setting_for_flower_is_quoted(tmp_path: Path) -> None:
    from flwr.common.config import parse_config_args  # what reads it

    path = tmp_path / "a folder" / "client.toml"
    assert parse_config_args([processes.option("client", path)]) == {"client": str(path)}


def test_a_free_port_is_free() -> None:
    assert not processes.answers(processes.free_port())
