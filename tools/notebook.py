"""Run a notebook as a reader would, and write it with its outputs.

    python tools/notebook.py examples/notebook.ipynb                  in place
    python tools/notebook.py examples/notebook.ipynb --out other.ipynb

Needs the extra `dev` (nbclient, ipykernel, pandas). What tells of the machine or of one execution is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

KEPT = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def executed(path: Path) -> Any:
    """The notebook of a file with the outputs of its code."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, startup_timeout=600).execute()
    notebook.metadata = nbformat.from_dict(KEPT)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", ()):
            output.pop("transient", None)
    return notebook


def main() -> None:
    import nbformat

    parser = argparse.ArgumentParser(description="Run a notebook and write it with its outputs.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, help="where to write it; default: in place")
    given = parser.parse_args()
    nbformat.write(executed(given.notebook), given.out or given.notebook)


if __name__ == "__main__":
    main()
