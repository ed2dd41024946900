"""Run tests as other machines would: older instruction sets, misaligned tensors, one thread, busy cores.

    python -m tests.machines [--only NAME ...] [-- arguments of pytest]

Without arguments pytest runs everything CI runs, on two processes, once for each machine below. Which variable has an
effect depends on the CPU: MKL heeds MKL_ENABLE_INSTRUCTIONS on Intel's alone; MKL_CBWR has it take other code paths on
all of them. Exits with 1 where a machine has a failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

ALONE = {"OMP_NUM_THREADS": "1"}
MACHINES: dict[str, dict[str, str]] = {
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "PERSONAFL_TEST_MISALIGNED": "56",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "PERSONAFL_TEST_MISALIGNED": "8",
    },
    "compatible": ALONE | {"MKL_CBWR": "COMPATIBLE", "MKL_ENABLE_INSTRUCTIONS": "AVX", "ONEDNN_MAX_CPU_ISA": "AVX"},
    "misaligned": {"PERSONAFL_TEST_MISALIGNED": "24"},
    "busy": ALONE,
}
"""What each of them sets; `busy` also has another process at work on every core."""


@contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes that do nothing, as fast as they can."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def played(name: str, given: list[str]) -> int:
    """pytest's exit status on one of the machines."""
    print(f"== {name}: {' '.join(f'{k}={v}' for k, v in MACHINES[name].items())}", flush=True)
    begun = time.perf_counter()
    with others((os.cpu_count() or 1) if name == "busy" else 0):
        line = [sys.executable, "-m", "pytest", *given]
        status = subprocess.run(line, env=os.environ | MACHINES[name], check=False).returncode
    print(f"== {name}: {'passed' if not status else 'FAILED'} in {time.perf_counter() - begun:.0f} s", flush=True)
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("pytest", nargs="*", default=["-n", "2"], help="Behind --: what pytest is given; default -n 2.")
    args = parser.parse_args()
    failed = [name for name in args.only if played(name, args.pytest)]
    sys.exit(f"failed on: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
