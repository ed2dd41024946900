"""`python -m personafl`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # python -m put it before all that is installed

from personafl.cli import main

main()
