"""Runs every command and every Python example of the README, in order, in a copy of the working tree.

What trains is cut short by overrides added at its end; the test command only collects; TensorBoard has to serve its
page. A line that cannot be run here (cloning) is named. Exit code 1 at the first failure.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHORT = (" --config.train.steps=4 --config.train.chunk_steps=4 --config.eval.every=0 --config.eval.num_examples=4"
         " --config.model.width=8 --config.model.depth=1 --config.model.num_heads=2 --config.num_seeds=2")
SKIPPED = {"git clone": "needs a remote", "cd posjax": "goes with cloning"}
# A training run that goes on through its README name has to have the config it was shortened to.
TRAINS = ("posjax train", "posjax sweep", "bash scripts/demo.sh")


def blocks(text):
    """(language, content) of the fenced code blocks."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(content):
    """The commands of a shell block: comments left out, continued lines joined."""
    joined = content.replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def shortened(command):
    if command.startswith(TRAINS):
        # A depth that the command itself sets goes with its other options.
        return command + (SHORT.replace(" --config.model.depth=1", "") if "model.depth" in command else SHORT)
    if command.startswith("bash scripts/test.sh"):
        return command + " --collect-only -q"
    return command


def serves(command, cwd):
    """Whether a TensorBoard command answers on its port within half a minute."""
    port = 16006
    process = subprocess.Popen(f"exec {command} --port={port}", shell=True, cwd=cwd, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        for _ in range(60):
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://localhost:{port}/", timeout=5) as page:
                    return page.status == 200
            except OSError:
                if process.poll() is not None:
                    return False
        return False
    finally:
        process.terminate()
        process.wait()


def run(command, cwd):
    """Runs one command; returns what it printed if it failed, else None."""
    if "tensorboard" in command:
        return None if serves(command, cwd) else "TensorBoard did not serve its page."
    result = subprocess.run(["bash", "-c", f"PATH=$PWD/.venv/bin:$PATH; {shortened(command)}"], cwd=cwd,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return None if result.returncode == 0 else f"exit code {result.returncode}\n{result.stdout[-3000:]}"


def copy_tree(target):
    """The files that git tracks or would track, and the environment as a link."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(ROOT / ".venv")


def main():
    ran = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        copy_tree(folder)
        for language, content in blocks((ROOT / "README.md").read_text()):
            if language == "python":
                # A block that begins with a file's name in a comment is that file; another is a program.
                name = re.match(r"# (\S+\.py)\n", content)
                (folder / (name[1] if name else "readme_example.py")).write_text(content)
                todo = [] if name else ["python readme_example.py"]
            else:
                todo = commands(content) if language in ("bash", "sh") else []
            for command in todo:
                if reason := next((why for start, why in SKIPPED.items() if command.startswith(start)), None):
                    print(f"skipped ({reason}): {command}")
                    continue
                started = time.monotonic()
                if problem := run(command, folder):
                    print(f"FAILED: {command}\n{problem}")
                    return 1
                ran += 1
                print(f"ok ({time.monotonic() - started:.0f} s): {command}", flush=True)
    print(f"README: {ran} commands and examples ran.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
