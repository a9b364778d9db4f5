"""TensorBoard events without TensorFlow: scalars, images, text and the HParams table.

Scalars and images are written in the old, plain form of the summary proto, which every reader of TensorBoard converts.
"""
import hashlib
import json
import math
import os
import struct
import time
from pathlib import Path
from typing import Self

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.text import summary_v2 as text_summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

_EXPERIMENT_SUFFIX = ".experiment"


class TensorBoard:
    """The event files of one run. All that was written is on disk when a method returns.

    Args:
      directory: made if needed; each run needs its own.
      resume_step: the step of the checkpoint that the run resumes from; what an earlier process wrote for later steps
        is then hidden by TensorBoard.
    """

    def __init__(self, directory: str | os.PathLike, *, resume_step: int | None = None):
        _wait_for_a_later_name(Path(directory))
        self._writer = EventFileWriter(str(directory))
        # Readers drop events of steps >= that of a START, but not at the first START of a run: so the first process,
        # too, writes one.
        first_step = 0 if resume_step is None else resume_step + 1
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(first_step, session_log=start)

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars({tag: value}, step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """One point for each tag, at `step`."""
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        self._add(step, summary=summary_pb2.Summary(value=values))

    def image(self, tag: str, png_bytes: bytes, step: int) -> None:
        """A picture, as the content of a PNG file."""
        if png_bytes[:8] != b"\x89PNG\r\n\x1a\n":
            raise ValueError(f"Image {tag!r} is not a PNG file: it starts with {png_bytes[:8]!r}.")
        width, height = struct.unpack(">II", png_bytes[16:24])
        image = summary_pb2.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png_bytes)
        self._add(step, summary=summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, image=image)]))

    def text(self, tag: str, markdown: str, step: int) -> None:
        self._add(step, summary=text_summary.text_pb(tag, markdown))

    def hparams(self, values: dict) -> None:
        """Puts the run into the HParams table, in which its metrics are the last values of its scalars.

        Args:
          values: a column each. Give the same keys in every run of a sweep; see `hparam_value` for what is shown.
        """
        values = {key: hparam_value(value) for key, value in values.items()}
        # Runs of equal group are shown as repetitions of one trial.
        group = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        start = plugin_data_pb2.SessionStartInfo(group_name=group, start_time_secs=time.time())
        for key, value in values.items():
            field = {bool: "bool_value", float: "number_value", str: "string_value"}[type(value)]
            setattr(start.hparams[key], field, value)
        self._add(0, summary=_hparams_summary(hparams_metadata.SESSION_START_INFO_TAG, session_start_info=start))

    def session_end(self) -> None:
        """Shows the run as finished in the HParams table."""
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        self._add(0, summary=_hparams_summary(hparams_metadata.SESSION_END_INFO_TAG, session_end_info=end))

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _add(self, step: int, **what) -> None:
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=int(step), **what))
        self._writer.flush()


def write_experiment(root: str | os.PathLike, runs: list[dict], metrics: list[str]) -> None:
    """Describes the HParams table of a sweep: which columns it has. Replaces an earlier description.

    Without it TensorBoard infers the columns: all keys of all runs, and every scalar tag as a metric.

    Args:
      root: the directory above the runs' directories.
      runs: the `values` of `TensorBoard.hparams` of each run. The columns are the union of their keys.
      metrics: the scalar tags to show.
    """
    # Of several descriptions TensorBoard takes the first.
    for old in Path(root).glob(f"*tfevents*{_EXPERIMENT_SUFFIX}"):
        old.unlink()
    columns = {}
    for run in runs:
        for key, value in run.items():
            columns.setdefault(key, []).append(hparam_value(value))
    experiment = api_pb2.Experiment(
        time_created_secs=time.time(),
        hparam_infos=[_column(key, values, len(runs)) for key, values in columns.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    summary = _hparams_summary(hparams_metadata.EXPERIMENT_TAG, experiment=experiment)
    writer = EventFileWriter(str(root), filename_suffix=_EXPERIMENT_SUFFIX)
    writer.add_event(event_pb2.Event(wall_time=time.time(), summary=summary))
    writer.close()


def _wait_for_a_later_name(directory: Path) -> None:
    """Event files are read in the order of their names, which hold whole seconds and then the process id."""
    names = [path.name.split(".") for path in directory.glob("events.out.tfevents.*")]
    newest = max((int(name[3]) for name in names if name[3].isdecimal()), default=0)
    time.sleep(min(max(newest + 1 - time.time(), 0), 1))


def hparam_value(value) -> bool | float | str:
    """`value` as the HParams table can hold it: a bool, a finite number as a float, all else as text (None: "none")."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return "none" if value is None else str(value)


def _column(key: str, values: list, num_runs: int) -> api_pb2.HParamInfo:
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        values = [str(value) for value in values]
    distinct = sorted(set(values))
    info = api_pb2.HParamInfo(name=key, differs=len(distinct) > 1 or len(values) < num_runs)
    if kinds == {float}:
        info.type = api_pb2.DATA_TYPE_FLOAT64
        info.domain_interval.min_value = distinct[0]
        info.domain_interval.max_value = distinct[-1]
    else:
        info.type = api_pb2.DATA_TYPE_BOOL if kinds == {bool} else api_pb2.DATA_TYPE_STRING
        info.domain_discrete.extend(distinct)
    return info


def _hparams_summary(tag: str, **data) -> summary_pb2.Summary:
    metadata = hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR)
    return summary_pb2.Summary(value=[value])
