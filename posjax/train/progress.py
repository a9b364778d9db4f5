"""What a person sees while a run trains: the banner, and one line that keeps itself up to date."""
import sys
import time


def duration(seconds):
    """`75` -> `1:15`, `3700` -> `1:01:40`."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress:
    """A progress line: a bar, rate, loss and time left. On a terminal it is redrawn; elsewhere a line every 10 seconds.

    Args:
      total: steps of the whole run.
      done: steps behind it already, which count neither for the rate nor for the time left.
      tokens_per_step: over all replicas.
    """

    def __init__(self, total, done, tokens_per_step, *, stream=None, every=10.0):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.total, self.first, self.tokens_per_step = total, done, tokens_per_step
        self.every, self.shown, self.clock = every, None, None

    def rate(self, step):
        """Steps a second since the first chunk, whose compilation would hide the rate; 0.0 before there is one."""
        if self.clock is None or step <= self.clock[1]:
            return 0.0
        return (step - self.clock[1]) / (time.monotonic() - self.clock[0])

    def update(self, step, loss):
        now = time.monotonic()
        if self.clock is None:
            self.clock = (now, step)
        elif not self.live and step < self.total and now - self.shown < self.every:
            return
        self.shown = now
        rate = self.rate(step)
        bar = "#" * round(24 * step / self.total)
        left = duration((self.total - step) / rate) if rate else "?"
        text = (f"[{bar:<24}] {step}/{self.total}  loss {loss:.4f}  {rate:.1f} steps/s  "
                f"{rate * self.tokens_per_step:,.0f} tokens/s  {left} left")
        self.stream.write(f"\r{text}\x1b[K" if self.live else text + "\n")
        self.stream.flush()

    def close(self):
        if self.live and self.shown is not None:
            self.stream.write("\n")
            self.stream.flush()
