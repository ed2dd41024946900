"""The code of docs/new-method.md that stands alone, as a module: `tests.documented:FedBN` in a recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "new-method.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
WHOLE = [block for block in BLOCKS if block.startswith(("from ", "import "))]  # others are parts of a class


def __getattr__(name: str) -> Any:
    """Say to type checkers that the page's names are here."""
    raise AttributeError(f"docs/new-method.md has no {name}")


for _block in WHOLE:
    exec(compile(_block, str(PAGE), "exec"), globals())
