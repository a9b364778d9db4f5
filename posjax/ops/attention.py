"""Attention behind one function, and the ordered list of backends that can serve it.

The meaning is the same on every backend: queries stand at the end of the keys when there are fewer of them
(bottom-right); a window of `w` shows `w` keys, the query's own among them; a row that sees no key gives zeros
with finite gradients; causality is decided by index and segment id, never by the value of a position.
"""
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError, unknown
from posjax.ops import chunked, dense, folded, pallas, reference
from posjax.ops.rotary import apply_rotary, as_data, check_positions

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """One call, checked: what a backend is asked to serve. Shapes and meanings as in `attention`, and

    Attributes:
      given_positions: those of queries and keys as the caller gave them, perhaps known when tracing.
    """
    q: Any
    k: Any
    v: Any
    bias: Any
    logits: Callable | None
    values: Callable | None
    q_positions: Any
    k_positions: Any
    q_segment_ids: Any
    k_segment_ids: Any
    causal: bool
    window: int | None
    scale: float
    first_query: Any
    rotary: Any
    platform: str
    given_positions: tuple | None

    def known_positions(self):
        """Positions of queries and keys on the host, where they can be read when tracing, else None."""
        if self.given_positions is None or any(isinstance(p, jax.core.Tracer) for p in self.given_positions):
            return None
        return tuple(np.asarray(p) for p in self.given_positions)

    def rotated(self):
        """The same call with queries and keys rotated already."""
        if self.rotary is None:
            return self
        q, k = (apply_rotary(x, p[0] if p.shape[0] == 1 and p.ndim == 2 else p, self.rotary)
                for x, p in ((self.q, self.q_positions), (self.k, self.k_positions)))
        return dataclasses.replace(self, q=q, k=k, rotary=None)

    def visible(self):
        """Which key a query may see: bool `[1 or B, Q, K]`."""
        q_len, k_len = self.q.shape[1], self.k.shape[1]
        first = jnp.asarray(self.first_query, jnp.int32).reshape(-1, 1, 1)  # [1 or B, 1, 1]
        lag = first + (jnp.arange(q_len, dtype=jnp.int32)[:, None] - jnp.arange(k_len, dtype=jnp.int32)[None])[None]
        seen = jnp.ones(lag.shape, bool)
        if self.causal:
            seen &= lag >= 0
        if self.window is not None:
            seen &= jnp.abs(lag) < self.window
        if self.q_segment_ids is not None:
            seen = seen & (self.q_segment_ids[:, :, None] == self.k_segment_ids[:, None, :])
        return seen


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    Attributes:
      name: to ask for it by.
      serves: of a call whose dtype suits it, None or the reason why it cannot serve it.
      run: of a call, its output `[B, Q, H, Dv]`.
      declines: of a call that it could serve, None or the reason why "auto" should look further.
      rotates: whether it rotates queries and keys itself, where a call has a `rotary`; others get them rotated.
      general: whether it serves every call, of any scheme.
      double: whether it computes in float64 what is float64; others would in float32, and refuse.
    """
    name: str
    serves: Callable
    run: Callable
    declines: Callable = lambda call: None
    rotates: bool = False
    general: bool = False
    double: bool = False

    def supports(self, call):
        """None, or the reason why it cannot serve `call`."""
        if jnp.result_type(call.q) == jnp.float64 and not self.double:
            return "it computes in float32, and float64 was given"
        return self.serves(call)

    def why_not(self, call):
        """None, or the reason why "auto" passes it by."""
        return self.supports(call) or self.declines(call)


# The first that has no reason against a call serves it. The reference comes last: it is the judge, not a contender.
BACKENDS = (
    Backend("dense", dense.supports, dense.run, dense.declines, general=True),
    Backend("folded", folded.supports, folded.run, folded.declines),
    Backend("pallas", pallas.supports, pallas.run, pallas.declines, rotates=True),
    Backend("chunked", chunked.supports, chunked.run, general=True),
    Backend("reference", reference.supports, reference.run, general=True, double=True),
)


def attention(q, k, v, *, backend="auto", **options):
    """Scaled dot-product attention with positions as data.

    Args:
      q, k, v, options: those of `make_call`.
      backend: a name of `BACKENDS`, or "auto" for the first of them that suits the call.

    Returns:
      `[B, Q, H, Dv]` in the dtype of `q`.

    Raises:
      ValueError: as `make_call`; an unknown backend, or one that cannot serve the call.
    """
    return run(make_call(q, k, v, **options), backend)


def make_call(q, k, v, *, bias=None, logits=None, values=None, q_positions, k_positions, q_segment_ids=None,
              k_segment_ids=None, causal=True, window=None, scale=None, first_query=None, rotary=None, platform=None):
    """An `AttentionCall`, checked.

    Args:
      q: `[B, Q, H, Dh]`.
      k: `[B, K, G, Dh]`; H is a multiple of G (grouped queries).
      v: `[B, K, G, Dv]`.
      bias: a lazy bias (see `posjax.ops.bias`) added to the scaled logits, or None.
      logits: replaces `scale * q.k`: a function `(q, k, q_positions, k_positions, *, visible, scale) -> [B, H, Q, K]`
        of a block of queries against all keys, or None. Its keys are `[B, K, H, Dh]`: grouped ones come repeated.
      values: what to add to the values: a function `(weights, q_positions, k_positions) -> [B, Q, H, Dv]` in float32,
        linear in the float32 weights `[B, H, Q, K]`, or None.
      q_positions, k_positions: int32 `[Q]` and `[K]`, or `[B, Q]` and `[B, K]`.
      q_segment_ids, k_segment_ids: int32 `[B, Q]` and `[B, K]`, both or neither; unequal ids never see each other.
      causal: whether a query sees no key after its own index.
      window: number of keys visible to a query, with its own; None for all. Two-sided when not causal.
      scale: factor on `q.k`; None for `Dh ** -0.5`.
      first_query: index among the keys of the first query, int32 `[]`, or `[B]` where rows differ, possibly traced; None for
        K - Q. With a cache that has room left, the keys after the queries are not written yet: causality hides them.
      rotary: a `posjax.ops.rotary.Rotary` by which queries and keys are still to be rotated; None where they are.
      platform: what will compute it, "cpu", "gpu" or "tpu"; None for where jax computes by default.

    Raises:
      ValueError: shapes that do not fit, or a window below 1.
    """
    check_call(q, k, v, q_positions, k_positions, q_segment_ids, k_segment_ids, causal, window)
    given = q_positions, k_positions
    # Signed, so that a distance can be negative; and of one rank, so that biases need not tell rows from no rows.
    q_positions, k_positions = as_data(q_positions), as_data(k_positions)
    if first_query is not None and jnp.shape(first_query) not in ((), (q.shape[0],)):
        raise UserError(f"first_query must have shape () or {(q.shape[0],)}; got {jnp.shape(first_query)}.")
    if q_positions.ndim != k_positions.ndim:
        q_positions, k_positions = jnp.atleast_2d(q_positions), jnp.atleast_2d(k_positions)
    return AttentionCall(
        q, k, v, bias, logits, values, q_positions, k_positions, q_segment_ids, k_segment_ids, causal, window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        first_query=k.shape[1] - q.shape[1] if first_query is None else first_query,
        rotary=rotary, platform=default_platform() if platform is None else platform, given_positions=given)


def run(call, backend="auto"):
    """The output of `call` by a backend: a name of `BACKENDS`, or "auto"."""
    chosen = choose(call, backend)
    return chosen.run(call if chosen.rotates else call.rotated())


def default_platform():
    """Where jax computes by default: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def choose(call, name="auto"):
    """The backend that serves `call`; raises `ValueError` with the reason if the named one cannot."""
    if name != "auto":
        found = [b for b in BACKENDS if b.name == name]
        if not found:
            raise unknown("attention backend", name, ["auto", *(b.name for b in BACKENDS)])
        if (reason := found[0].supports(call)) is not None:
            raise UserError(f"The attention backend {name} cannot serve this call: {reason}.")
        return found[0]
    for candidate in BACKENDS:
        if candidate.why_not(call) is None:
            _log_choice(candidate.name)
            return candidate
    reasons = "; ".join(f"{b.name}: {b.why_not(call)}" for b in BACKENDS)
    raise UserError(f"No attention backend serves this call ({reasons}).")


@functools.cache
def _log_choice(name):
    _log.info("attention: backend %s", name)


def check_window(window):
    """Raises `ValueError` unless `window` is None or a whole number of at least 1."""
    whole = isinstance(window, int | np.integer) and not isinstance(window, bool)
    if window is not None and (not whole or window < 1):
        raise UserError(f"window is {window!r}; it counts visible keys with the query's own: a whole number of at least 1, "
                        "or None for all.")


def check_call(q, k, v, q_positions, k_positions, q_segment_ids, k_segment_ids, causal, window):
    """Raises `ValueError` if the arguments of `attention` do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise UserError(f"{name} must be [B, T, H, Dh]; got shape {x.shape}.")
        if 0 in x.shape[:3]:
            raise UserError(f"{name} has shape {x.shape}; there must be at least one row, token and head.")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]):
        raise UserError(f"q, k and v do not fit together: {q.shape}, {k.shape}, {v.shape}.")
    if q.shape[2] % k.shape[2]:
        raise UserError(f"The {q.shape[2]} query heads are not a multiple of the {k.shape[2]} key heads.")
    if causal and q.shape[1] > k.shape[1]:
        raise UserError(f"Causal attention of {q.shape[1]} queries on {k.shape[1]} keys: queries cannot outnumber keys.")
    check_positions(k_positions, k.shape[:2], "k_positions")
    check_positions(q_positions, q.shape[:2], "q_positions")
    for name, ids in (("q_segment_ids", q_segment_ids), ("k_segment_ids", k_segment_ids)):
        if ids is not None and not hasattr(ids, "shape"):
            raise UserError(f"{name} must be an array of integers; got {type(ids).__name__}.")
    if (q_segment_ids is None) != (k_segment_ids is None):
        raise UserError("Give both q_segment_ids and k_segment_ids, or neither.")
    if q_segment_ids is not None and (q_segment_ids.shape != q.shape[:2] or k_segment_ids.shape != k.shape[:2]):
        raise UserError(f"Segment ids must have shapes {q.shape[:2]} and {k.shape[:2]}; "
                        f"got {q_segment_ids.shape} and {k_segment_ids.shape}.")
    check_window(window)
