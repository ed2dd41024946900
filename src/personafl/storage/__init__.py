"""Client states on disk and in memory, locks and atomic files."""
