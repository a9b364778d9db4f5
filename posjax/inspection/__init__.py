"""Seeing one positional scheme: its numbers (`panels`, as `data`), the figure (`draw`), the files (`command`)."""
