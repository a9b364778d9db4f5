"""Who would serve a call of attention, and why the others would not: `posjax list backends`."""
import jax
import jax.numpy as jnp
from flax import nnx

from posjax.errors import UserError, unknown
from posjax.models.decoder import DTYPES
from posjax.ops.attention import BACKENDS, default_platform
from posjax.schemes.attend import attend_call
from posjax.schemes.registry import make_scheme

PLATFORMS = ("cpu", "gpu", "tpu")


def rows(scheme="nope", *, queries=1024, keys=None, heads=8, groups=None, head_dim=64, dtype="float32", window=None,
         causal=True, segments=False, platform=None):
    """A dict for each backend, in the order in which "auto" asks them: `backend`, `serves` and `why`. Nothing is computed.

    Args:
      scheme: a registered name; its hyper-parameters have their defaults.
      queries, keys: tokens; as many keys as queries if None.
      heads, groups: of queries, and of keys and values; as many groups as heads if None.
      head_dim: channels of a head.
      dtype: float32, bfloat16 or float16.
      window, causal: as in `posjax.attend`.
      segments: whether the call has segment ids.
      platform: "cpu", "gpu" or "tpu"; None for where jax computes by default.

    Raises:
      ValueError: a mistyped name, or sizes that do not fit.
    """
    platform = default_platform() if platform is None else platform
    if platform not in PLATFORMS:
        raise unknown("platform", platform, PLATFORMS)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    keys, groups = queries if keys is None else keys, heads if groups is None else groups
    for name, size in (("queries", queries), ("keys", keys), ("heads", heads), ("groups", groups), ("head_dim", head_dim)):
        if size < 1:
            raise UserError(f"{name} is {size}; it must be at least 1.")
    found = []

    def look():
        made = make_scheme(scheme, num_heads=heads, head_dim=head_dim, rngs=nnx.Rngs(0))
        q, k = (jnp.zeros((1, length, n, head_dim), DTYPES[dtype]) for length, n in ((queries, heads), (keys, groups)))
        features = made.features(jnp.zeros((1, keys, made.model_dim)))
        ids = [jnp.zeros((1, length), jnp.int32) if segments else None for length in (queries, keys)]
        call = attend_call(made, q, k, k, q_segment_ids=ids[0], k_segment_ids=ids[1], features=features, window=window,
                           causal=causal, platform=platform)
        first = None
        for backend in BACKENDS:
            refused, why = backend.supports(call), backend.why_not(call)
            if why is None and first is None:
                first, serves = backend.name, "yes"
            else:
                serves = "by name only" if refused is None else "no"
                why = why or f"comes after {first}"
            found.append({"backend": backend.name, "serves": serves, "why": why})
    jax.eval_shape(look)
    return found
