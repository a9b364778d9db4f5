"""SIGINT and SIGTERM while a run trains: finish the chunk, save, then stop."""
import contextlib
import signal
import threading


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state. `signal` is the signal's number."""

    def __init__(self, message, signum):
        super().__init__(message)
        self.signum = signum


class Flag:
    """Which signal has come, or None."""
    signum = None


@contextlib.contextmanager
def deferred_signals():
    """Yields a `Flag` that the first SIGINT or SIGTERM sets; the second one acts at once, as without this."""
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield flag
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(signum, frame):
        flag.signum = signum
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in before:
        signal.signal(number, note)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
