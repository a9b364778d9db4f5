"""What a person sees while a run trains: the banner, and one line that keeps itself up to date."""
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
      stream: where it is shown.
      every: seconds between lines where the stream is no terminal.
    """

    def __init__(self, total, done, tokens_per_step, *, stream, every=10.0):
        self.stream, self.live = stream, stream.isatty()
        self.total, self.first, self.tokens_per_step = total, done, tokens_per_step
        self.every = every
        self.start()

    def start(self):
        """Starts the clock: what came before (compiling) is not counted."""
        self.started = self.shown = time.monotonic()

    def rate(self, step):
        """Steps a second since the clock started."""
        return (step - self.first) / (time.monotonic() - self.started)

    def update(self, step, loss):
        now = time.monotonic()
        if not self.live and step < self.total and now - self.shown < self.every:
            return
        self.shown = now
        rate = self.rate(step)
        bar = "#" * round(24 * step / self.total)
        left = duration((self.total - step) / rate)
        text = (f"[{bar:<24}] {step}/{self.total}  loss {loss:.4f}  {rate:.1f} steps/s  "
                f"{rate * self.tokens_per_step:,.0f} tokens/s  {left} left")
        self.stream.write(f"\r{text}\x1b[K" if self.live else text + "\n")
        self.stream.flush()

    def close(self):
        """Ends the line, once."""
        if self.live:
            self.live = False
            self.stream.write("\n")
            self.stream.flush()
