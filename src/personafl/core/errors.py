"""What a user did that cannot be done, told in one sentence; any other exception is a bug of ours."""

from __future__ import annotations


class Note(UserWarning):
    """What was decided in the user's place: told once, and no sign of anything wrong."""


class UserError(ValueError):
    """Input, settings or a method of one's own that cannot be used.

    The message names the thing, its value, what was possible, and the way out. The command line prints it without a
    traceback.
    """
