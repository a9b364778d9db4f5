"""What one positional scheme does to attention, as numbers. Knows no scheme by name: only the hooks that it overrides."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.inspection.data import Inspection, Panel, Series
from posjax.ops.rotary import Rotary, apply_rotary
from posjax.schemes.base import Scheme

DRAWS = 64  # of random queries, keys and inputs, where content and position mix
MAP_TOKENS = 64
_CURVE_POINTS = 512


def inspect(scheme, *, train_length=None, length=None, head=0):
    """The numbers that show what a scheme does, each panel only where the scheme has the hook for it.

    bias: of each head against the distance. score: of a rotated query and an equal key. content: what position adds to
    the logit, mean and spread over random queries, keys and inputs. embedding: inner product of what two positions add.
    wavelengths: positions to a whole turn of each pair. map: logits of one head where all tokens have the same content.
    A scheme that is not `relative` is asked by the last query of `train_length` tokens and by the last of `length`.

    Args:
      scheme: a `posjax.Scheme`.
      train_length: tokens of a training sequence; None for the length that the scheme extends, else 512, or all of its
        positions if fewer.
      length: tokens of the longest sequence to look at; None for 8 times `train_length`, or all positions if fewer.
      head: of the map, from 0.

    Returns:
      An `Inspection`.

    Raises:
      ValueError: a length below 1 or beyond the scheme's positions, a `length` below `train_length`, no such head.
    """
    view = _View(scheme, *_lengths(scheme, train_length, length), head)
    if not 0 <= head < scheme.num_heads:
        raise UserError(f"head is {head}; the scheme has heads 0 to {scheme.num_heads - 1}.")
    makers = (_bias, _score, _content, _embedding, _temperature, _wavelengths, _embedding_map, _map)
    return Inspection(view.train_length, view.length, tuple(panel for make in makers if (panel := make(view)) is not None))


def _lengths(scheme, train_length, length):
    end = scheme.max_length
    if train_length is None:
        train_length = int(scheme.original_length or min(end or 512, 512))
    if length is None:
        length = 8 * train_length if end is None else max(train_length, min(8 * train_length, end))
    if train_length < 1:
        raise UserError(f"train_length is {train_length}; it must be at least 1.")
    if length < train_length:
        raise UserError(f"length is {length}; it must be at least train_length, {train_length}.")
    if end is not None and length > end:
        raise UserError(f"{'train_length' if train_length > end else 'length'} is {max(train_length, length)}, but the scheme "
                        f"has positions 0 to {end - 1} only (its max_length is {end}).")
    return train_length, length


@dataclasses.dataclass(frozen=True)
class _View:
    scheme: Scheme
    train_length: int
    length: int
    head: int

    @property
    def queries(self):
        """Positions of the queries that ask."""
        lengths = [self.length] if self.scheme.relative else sorted({self.train_length, self.length})
        return [n - 1 for n in lengths]

    def overrides(self, hook):
        return getattr(type(self.scheme), hook) is not getattr(Scheme, hook)


def spaced(last):
    """0 and about 500 integers up to `last`, all of the small ones and then evenly on a logarithmic scale."""
    return np.unique(np.r_[0, np.round(np.geomspace(1, max(last, 1), _CURVE_POINTS))].astype(np.int32).clip(0, last))


def _over_distance(view, values):
    """Series of `values(q_positions, k_positions)`, int32 `[1]` and `[N]`: `[N]`, or `[H, N]`, or a pair with the spread."""
    for query in view.queries:
        every = spaced(view.length - 1)  # the same ones for each query, so that an undersampled wave looks the same
        distances = np.unique(np.r_[every[every <= query], np.int32(query)])
        y = values(np.array([query], np.int32), query - distances)
        y, spread = (np.asarray(part, np.float64) for part in y) if isinstance(y, tuple) else (np.asarray(y, np.float64), None)
        yield from _of_heads(distances, y, spread=spread, query=query if len(view.queries) > 1 else None)


def _of_heads(x, y, *, spread=None, query=None):
    """A series for each head of `y` `[H, N]`, or one for all of them where they agree; `[N]` is of no head."""
    where = "" if query is None else f"query at {query}"
    y, spread = (None if part is None else np.atleast_2d(part) for part in (y, spread))
    if all(part is None or (part == part[:1]).all() for part in (y, spread)):
        yield Series(where or "all heads", x, y[0], query=query, spread=None if spread is None else spread[0])
        return
    for head, row in enumerate(y):
        yield Series(f"head {head}{where and ', '}{where}", x, row, head, query, None if spread is None else spread[head])


def _bias(view):
    bias = view.scheme.bias()
    if bias is None:
        return None

    @jax.jit
    def values(q_positions, k_positions):
        block = bias.block(q_positions, k_positions)
        return jnp.broadcast_to(block, (view.scheme.num_heads, 1, k_positions.size))[:, 0]
    return Panel("bias", "Bias of each head", "distance", "added to the logit", "distance", tuple(_over_distance(view, values)))


def _score(view):
    scheme = view.scheme
    if scheme.logits is not None or not (view.overrides("rotate") or isinstance(scheme.rotary(), Rotary)):
        return None

    @functools.partial(jax.jit, static_argnums=0)
    def rotated(rotate, q, k, q_positions, k_positions):
        q, k = rotate(q, k, q_positions, k_positions)
        return jnp.einsum("bqhd,bkhd->hk", q, k, precision="highest") / scheme.head_dim

    def score(rotate, *positions):
        return rotated(rotate, *(_alike(scheme, p.size) for p in positions), *positions)
    series = list(_over_distance(view, functools.partial(score, scheme.rotate)))
    if (before := _before(scheme)) is not None:
        if len(series) == 1:
            series = [dataclasses.replace(series[0], label="extended")]
        distances = spaced(view.length - 1)

        def rotate_before(q, k, q_positions, k_positions):
            return apply_rotary(q, q_positions, before), apply_rotary(k, k_positions, before)
        y = np.asarray(score(rotate_before, np.array([view.length - 1], np.int32), view.length - 1 - distances), np.float64)[0]
        series.insert(0, Series("before the extension", distances, y, before=True))
    # The trace of a rotation, which is its mean over directions, is also the score of a vector of ones.
    title = ("Score of q = k, all channels 1" if view.overrides("rotate")
             else "Mean score of q = k of unit length, exact over all directions")
    return Panel("score", title, "distance", "q.k / head_dim" if view.overrides("rotate") else "q.k", "distance", tuple(series))


def _content(view):
    scheme = view.scheme
    if scheme.logits is None:
        return None

    def values(q_positions, k_positions):
        @jax.jit
        def draw(key):
            n = q_positions[0] + 1  # all keys up to the query: what lies between may matter
            keys = jax.random.split(key, 3)
            q, k = (jax.random.normal(key, (1, n, scheme.num_heads, scheme.head_dim)) for key, n in zip(keys, (1, n)))
            features = scheme.features(jax.random.normal(keys[2], (1, n, scheme.model_dim)))
            positions = jnp.arange(n, dtype=jnp.int32)
            own = _content_logits(scheme, q, k, positions[-1:], positions, features)
            plain = _scale(scheme) * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
            return (own - plain)[0, :, 0][:, k_positions]
        draws = np.stack([np.asarray(draw(key), np.float64) for key in jax.random.split(jax.random.key(0), DRAWS)])
        return draws.mean(0), draws.std(0)
    title = f"What position adds to the logit, over {DRAWS} random q, k, inputs"
    return Panel("content", title, "distance", "mean ± std", "distance", tuple(_over_distance(view, values)))


def _embedding(view):
    if not view.overrides("embed"):
        return None

    def values(q_positions, k_positions):
        vectors = _added(view.scheme, np.r_[q_positions, k_positions])
        return vectors[1:] @ vectors[0]
    return Panel("embedding", "Inner product of what two positions add to the embedding", "distance", "inner product", "distance",
                 tuple(_over_distance(view, values)))


def _temperature(view):
    scheme = view.scheme
    if scheme.temperature is None:
        return None
    positions = spaced(view.length - 1)
    factor = np.asarray(jax.jit(scheme.temperature.factor)(positions[None]), np.float64)[0].T
    return Panel("temperature", "Temperature", "position of the query", "factor on the logits", "position",
                 tuple(_of_heads(positions, factor)))


def _wavelengths(view):
    scheme = view.scheme
    rotary = scheme.rotary()
    if not isinstance(rotary, Rotary):
        return None
    before = _before(scheme)
    shown = [] if before is None else [("before the extension", before, True)]
    if scheme.depends_on_length:
        shown += [(f"at length {n}", scheme.rotary(n), False) for n in sorted({view.train_length, view.length})]
    else:
        shown.append(("rotation" if before is None else "extended", rotary, False))
    series = []
    for label, one, is_before in shown:
        if (amplitude := float(one.amplitude)) != 1:
            label += f", amplitude {amplitude:.6g}"
        waves = wavelengths(one)
        series.append(Series(label, np.arange(waves.size), waves, before=is_before))
    return Panel("wavelengths", "Wavelengths: positions to a whole turn of each pair", "pair of channels",
                 "wavelength, positions", "pair", tuple(series))


def wavelengths(rotary):
    """`2 pi / theta_k` in positions, float64 `[r / 2]`, of one `Rotary`; infinite for a pair that stands still."""
    turns = np.asarray(rotary.turns, np.float64) * 2.0**-32 + np.asarray(rotary.rest, np.float64)
    with np.errstate(divide="ignore"):
        return 1 / turns


def _embedding_map(view):
    if not view.overrides("embed"):
        return None
    vectors = _added(view.scheme, np.arange(_map_tokens(view)))
    return _rows("embedding_map", "Inner product of what two positions add", "inner product", vectors @ vectors.T, "position")


def _map(view):
    scheme = view.scheme
    if view.overrides("embed") and not (scheme.logits is not None or scheme.bias() is not None or view.overrides("rotate")
                                        or scheme.rotary() is not None):
        return None  # position is not in the logits themselves

    @jax.jit
    def values(q, x, positions):
        logits = _content_logits(scheme, q, q, positions, positions, scheme.features(x))
        if scheme.temperature is not None:
            logits *= scheme.temperature.factor(positions[None]).transpose(0, 2, 1)[..., None]
        bias = scheme.bias()
        return logits[0] if bias is None else logits[0] + bias.block(positions, positions)
    n = _map_tokens(view)
    logits = np.asarray(values(_alike(scheme, n), np.ones((1, n, scheme.model_dim), np.float32), np.arange(n, dtype=np.int32)))
    return _rows("map", f"Logits of head {view.head} where all tokens are alike (q = k = 1)", "logit", logits[view.head])


def _rows(name, title, label, square, x_label="key"):
    """A map with a series for each query, of the keys up to it."""
    series = tuple(Series(f"query {i}", np.arange(i + 1), np.asarray(row[:i + 1], np.float64), query=i)
                   for i, row in enumerate(square))
    return Panel(name, title, x_label, label, "key", series)


def _map_tokens(view):
    return min(MAP_TOKENS, view.scheme.max_length or MAP_TOKENS)


def _content_logits(scheme, q, k, q_positions, k_positions, features):
    """Logits `[B, H, Q, K]` before temperature, bias and mask; every key up to a query is visible to it."""
    q, k = scheme.rotate(q, k, q_positions, k_positions)
    if scheme.logits is None:
        return _scale(scheme) * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    visible = (q_positions[:, None] >= k_positions[None, :])[None]
    logits = scheme.logits(q, k, q_positions[None], k_positions[None], visible=visible, scale=_scale(scheme), features=features)
    return logits.astype(jnp.float32)


def _alike(scheme, n):
    """Queries or keys of n equal tokens. Arguments of what is compiled: as constants in it they would all be multiplied out."""
    return np.ones((1, n, scheme.num_heads, scheme.head_dim), np.float32)


def _scale(scheme):
    return scheme.head_dim ** -0.5 if scheme.logit_scale is None else scheme.logit_scale


def _added(scheme, positions):
    """What positions `[T]` add to an embedding, float64 `[T, D]`."""
    x = jnp.zeros((1, positions.size, scheme.model_dim), jnp.float32)
    return np.asarray(jax.jit(scheme.embed)(x, positions.astype(np.int32)), np.float64)[0]


def _before(scheme):
    """The rotation before an extension, or None where none changes it at any length."""
    before = scheme.plain()
    if before is None or scheme.depends_on_length:
        return before
    now = scheme.rotary()
    same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(now)))
    return None if same else before
