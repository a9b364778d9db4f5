"""The one exception for what a user got wrong."""
import difflib


class UserError(ValueError):
    """A mistake in the input: its message is the whole story, in one line.

    The command line prints it and exits with 2; in the library it is an ordinary `ValueError`.
    """


def unknown(kind: str, given: object, allowed) -> UserError:
    """The error for a name that is not among `allowed`: close matches first, then the full list."""
    allowed = sorted(str(name) for name in allowed)
    close = difflib.get_close_matches(str(given), allowed, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return UserError(f"Unknown {kind} {str(given)!r}.{hint} Known: {', '.join(allowed) or '(none)'}.")
