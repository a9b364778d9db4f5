"""What an inspection finds: panels of series of numbers."""
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a panel, or one row of a map.

    Attributes:
      label: what it is, unique in its panel.
      x, y: float64 `[N]`, except that `x` holds integers.
      head: the head, from 0; None where all heads agree or there is none.
      query: position of the query, where that matters; else None.
      spread: standard deviation of `y` over random content, float64 `[N]`; None where `y` is no mean.
      before: whether it shows the scheme as it was before an extension of the context.
    """
    label: str
    x: np.ndarray
    y: np.ndarray
    head: int | None = None
    query: int | None = None
    spread: np.ndarray | None = None
    before: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """What belongs in one coordinate system.

    Attributes:
      name: "bias", "score", "content", "embedding", "temperature", "wavelengths", "embedding_map" or "map".
      title, x_label, y_label: for people.
      x_axis: "distance", "position", "pair" or "key".
      series: `Series`.
    """
    name: str
    title: str
    x_label: str
    y_label: str
    x_axis: str
    series: tuple


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The panels that apply to a scheme, and the lengths that they were made for."""
    train_length: int
    length: int
    panels: tuple
