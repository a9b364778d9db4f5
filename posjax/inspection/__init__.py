"""Seeing one positional scheme: its numbers (`panels`), the figure (`draw`), the files (`command`)."""
