"""Processes that train when they are told to, so that engines which cannot share a process can take turns on one clock.

A worker is started with its job as JSON. It answers with one line of JSON that says what it is about to do, and from then on
answers every request, a line `NAME COUNT`, with a line of JSON when that is done. Idle, it waits for a line and takes no time.
"""
import json
import os
import pathlib
import subprocess
import sys


from posjax.errors import UserError


class Worker:
    """A worker's process: `about` is its first answer, `ask(name, count)` the later ones.

    Args:
      module: the Python module that is the worker, run with `python -m`.
      job: what it gets, as JSON.

    Raises:
      ValueError: the worker ended before its first answer; the message is the last line of what it wrote.
    """

    def __init__(self, module, job):
        root = str(pathlib.Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen([sys.executable, "-m", module, json.dumps(job)], text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
        self.about = self._answer()

    def ask(self, name, count):
        print(name, count, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            said = self._process.stderr.read().strip().splitlines() or ["it said nothing"]
            raise UserError(f"A worker of the benchmark has ended: {said[-1]}")
        return json.loads(line)

    def close(self):
        """Ends the process by ending its input."""
        self._process.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def serve(prepare):
    """The worker's side: `prepare(job)` returns what to say first, and the functions of a count by their names."""
    about, functions = prepare(json.loads(sys.argv[1]))
    answer = about
    while True:
        print(json.dumps(answer), flush=True)
        if not (line := sys.stdin.readline()):
            return
        name, count = line.split()
        answer = functions[name](int(count))
