import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib

import numpy as np
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator as new_style
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from posjax.io.tensorboard import TensorBoard, hparam_value, write_experiment

ROPE = {"scheme": "rope", "base": 10_000, "learning_rate": 1e-3, "tied": True, "max_length": None}
ALIBI = {"scheme": "alibi", "base": "none", "learning_rate": 1e-2, "tied": True, "max_length": 34}

KILLED = """
import os, signal, sys
from posjax.io.tensorboard import TensorBoard
board = TensorBoard(sys.argv[1])
for step in range(1, 11):
    board.scalar("loss", float(step), step)
board.image("figure", bytes.fromhex(sys.argv[2]), 10)
os.kill(os.getpid(), signal.SIGKILL)
"""


def png(width=3, height=2):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + bytes(3 * width)) * height)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def read(directory):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def points(directory, tag="loss"):
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def killed_run(directory):
    result = subprocess.run([sys.executable, "-c", KILLED, str(directory), png().hex()], check=False, timeout=60)
    assert result.returncode == -signal.SIGKILL


def test_scalars_images_and_text_read_back(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.scalars({"loss": 0.25, "accuracy": np.float32(0.5)}, 5)
        board.scalar("loss", math.nan, np.int64(6))
        board.image("curves", png(3, 2), 6)
        board.text("config", "*hello*", 0)
    accumulator = read(tmp_path)
    assert points(tmp_path)[0] == (5, 0.25) and math.isnan(points(tmp_path)[1][1])
    assert points(tmp_path, "accuracy") == [(5, 0.5)]
    (image,) = accumulator.Images("curves")
    assert (image.step, image.width, image.height, image.encoded_image_string) == (6, 3, 2, png(3, 2))
    (text,) = accumulator.Tensors("config")
    assert text.tensor_proto.string_val[0] == b"*hello*"


def test_only_png_is_accepted(tmp_path):
    with TensorBoard(tmp_path) as board, pytest.raises(ValueError, match="'curves' is not a PNG"):
        board.image("curves", b"<svg>", 0)


def test_events_are_on_disk_before_close_and_after_a_kill(tmp_path):
    killed_run(tmp_path)
    assert points(tmp_path) == [(step, float(step)) for step in range(1, 11)]


@pytest.mark.parametrize("reader", [EventAccumulator, new_style.EventAccumulator])
def test_resuming_hides_the_steps_after_the_checkpoint(tmp_path, reader):
    killed_run(tmp_path)
    with TensorBoard(tmp_path, resume_step=6) as board:
        board.scalar("loss", 70.0, 7)
    accumulator = reader(str(tmp_path))
    accumulator.Reload()
    events = accumulator.Scalars("loss") if reader is EventAccumulator else accumulator.Tensors("loss")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6, 7]
    assert points(tmp_path)[5:] == [(6, 6.0), (7, 70.0)]
    figures = accumulator.Images("figure") if reader is EventAccumulator else accumulator.Tensors("figure")
    assert figures == []  # of step 10


def test_a_torn_event_does_not_hide_what_follows_in_the_next_file(tmp_path):
    killed_run(tmp_path)
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - 40)
    with TensorBoard(tmp_path, resume_step=6) as board:
        board.scalar("loss", 70.0, 7)
    assert points(tmp_path)[-2:] == [(6, 6.0), (7, 70.0)]


def test_hparam_values_are_what_the_table_can_hold():
    values = (True, np.bool_(False), 3, np.float32(0.5), "rope", None, (1, 2), math.inf)
    assert [hparam_value(value) for value in values] == [True, False, 3.0, 0.5, "rope", "none", "(1, 2)", "inf"]
    assert type(hparam_value(3)) is float and hparam_value(True) is True


class Server:
    """A TensorBoard server on loopback."""

    def __init__(self, logdir):
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen(
            [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watchdog = threading.Timer(40, self.process.kill)
        watchdog.start()
        found = None
        while not found:
            line = self.process.stdout.readline()
            assert line, "the server ended"
            found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        watchdog.cancel()
        self.url = found.group()

    def get(self, path, **query):
        with urllib.request.urlopen(f"{self.url}data/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            data = answer.read()
        return json.loads(data) if path != "plugin/images/individualImage" else data

    def post(self, path, body):
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}data/{path}", json.dumps(body).encode(), header)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def wait_for_runs(self, runs):
        deadline = time.monotonic() + 20
        while set(self.get("runs")) != runs:
            assert time.monotonic() < deadline, self.get("runs")
            time.sleep(0.1)

    def close(self):
        self.process.terminate()
        self.process.communicate(timeout=10)


def table(server):
    """(columns, {scheme: (hparams, {metric: value}, status)}) of the HParams table."""
    experiment = server.post("plugin/hparams/experiment", {"experimentName": ""})
    columns = [{"hparam": info["name"]} for info in experiment["hparamInfos"]]
    columns += [{"metric": info["name"]} for info in experiment["metricInfos"]]
    statuses = [f"STATUS_{status}" for status in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
    body = {"experimentName": "", "allowedStatuses": statuses, "colParams": columns, "startIndex": 0, "sliceSize": 10}
    rows = {}
    for group in server.post("plugin/hparams/session_groups", body)["sessionGroups"]:
        metrics = {metric["name"]["tag"]: metric["value"] for metric in group["metricValues"]}
        rows[group["hparams"]["scheme"]] = (group["hparams"], metrics, group["sessions"][0]["status"])
    return experiment, rows


def test_a_real_server_compares_two_schemes_and_shows_a_resumed_run(tmp_path):
    """One server for all that is asked of one: starting it takes seconds."""
    killed_run(tmp_path / "rope" / "tensorboard")
    with TensorBoard(tmp_path / "rope" / "tensorboard", resume_step=6) as board:
        board.hparams(ROPE)
        board.scalars({"loss": 70.0, "final/exact_match": 0.25}, 7)
        board.image("figure", png(), 7)
        board.session_end()
    with TensorBoard(tmp_path / "alibi" / "tensorboard") as board:
        board.hparams(ALIBI)
        board.scalars({"loss": 1.0, "final/exact_match": 0.75}, 7)
    write_experiment(tmp_path, [ROPE], ["loss"])
    write_experiment(tmp_path, [ROPE, ALIBI], ["final/exact_match"])  # the sweep grew: this one counts

    server = Server(tmp_path)
    try:
        server.wait_for_runs({"rope/tensorboard", "alibi/tensorboard", "."})
        curve = server.get("plugin/scalars/scalars", run="rope/tensorboard", tag="loss")
        (image,) = server.get("plugin/images/images", run="rope/tensorboard", tag="figure", sample=0)
        picture = server.get("plugin/images/individualImage", blob_key=image["query"].removeprefix("blob_key="))
        experiment, rows = table(server)
    finally:
        server.close()

    assert [(step, value) for _, step, value in curve] == [(step, float(step)) for step in range(1, 7)] + [(7, 70.0)]
    assert image["step"] == 7 and picture == png()
    assert {info["name"] for info in experiment["hparamInfos"]} == ROPE.keys() | ALIBI.keys()
    assert {info["name"] for info in experiment["hparamInfos"] if info["differs"]} == ROPE.keys() - {"tied"}
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == ["final/exact_match"]
    assert rows["rope"][0] == ROPE | {"max_length": "none"}
    assert rows["rope"][1:] == ({"final/exact_match": 0.25}, "STATUS_SUCCESS")
    assert rows["alibi"][0]["max_length"] == 34.0
    assert rows["alibi"][1]["final/exact_match"] == 0.75 and rows["alibi"][2] != "STATUS_SUCCESS"


def test_tensorflow_and_jax_stay_out():
    code = "import sys, posjax.io.tensorboard as _; assert not {'tensorflow', 'jax'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
