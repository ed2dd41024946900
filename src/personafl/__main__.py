"""`python -m personafl`."""

from personafl.cli import main

main()
