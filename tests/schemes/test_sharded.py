"""A sequence spread over devices is attended as on one: output, gradients, masks."""
import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from posjax.compilations import compilations
from posjax.errors import UserError
from posjax.schemes.attend import attend
from posjax.schemes.registry import SCHEMES, make_scheme
from posjax.schemes.sharded import attend_sharded

B, T, H, DH = 2, 16, 4, 8
DIMS = {"num_heads": H, "head_dim": DH}
SEGMENTS = np.asarray([[0] * 5 + [1] * 11, [0] * 9 + [1] * 6 + [2]], np.int32)
ROWS = np.stack([np.arange(T), 3 * np.arange(T) + 5]).astype(np.int32)
PACKED = {"positions": ROWS, "segment_ids": SEGMENTS, "window": 7}
CALLS = [(name, (2, 4), PACKED) for name in SCHEMES.names()] + [
    ("t5", (4,), {}),
    ("rope", (4,), {"window": 5}),  # of the shard before alone
    ("cope", (4,), {"window": 3, "backend": "chunked"}),
    ("alibi", (4,), {"causal": False, "window": 5}),
    ("fire", (2,), {"causal": False, "segment_ids": SEGMENTS, "backend": "chunked"}),
]


def mesh_of(shards, **more):
    names = {"sequence": shards} | more
    count = int(np.prod(list(names.values())))
    return jax.make_mesh(tuple(names.values()), tuple(names), axis_types=(AxisType.Auto,) * len(names),
                         devices=jax.devices()[:count])


def arrays(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compare(name, meshes, options):
    """Output and gradients of what is learned, of q, k, v and of the embeddings behind the features: sharded and not."""
    graphdef, state = nnx.split(make_scheme(name, **DIMS, rngs=nnx.Rngs(0)))
    d_out = arrays(B, T, H, DH, seed=9)
    whole = {key: value for key, value in options.items() if key not in ("positions", "segment_ids", "backend")}
    whole |= {f"{side}_{key}": options[key] for key in ("positions", "segment_ids") if key in options for side in "qk"}

    def run(attention, options):
        def loss(state, q, k, v, x):
            scheme = nnx.merge(graphdef, state)
            out = attention(scheme, q, k, v, features=scheme.features(x), **options)
            return (out * d_out).sum(), out
        inputs = arrays(B, T, H, DH), arrays(B, T, 2, DH, seed=1), arrays(B, T, 2, DH, seed=2), arrays(B, T, H * DH, seed=3)
        gradients, out = jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))(state, *inputs)
        return jax.tree.leaves((gradients, out))
    with tiny.quick_compilation():
        expected = run(attend, whole | {"backend": "dense"})
        for mesh in meshes:
            for one, other in zip(run(attend_sharded, options | {"mesh": mesh}), expected, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("name, shards, options", CALLS)
def test_output_and_gradients_are_those_of_one_device(name, shards, options):
    compare(name, map(mesh_of, shards), options)


def test_rows_lie_along_another_axis_of_the_mesh():
    mesh = mesh_of(2, data=2)
    compare("alibi", [mesh], {})
    q = jax.device_put(arrays(B, T, H, DH), NamedSharding(mesh, PartitionSpec("data", "sequence")))
    out = attend_sharded(make_scheme("alibi", **DIMS), q, q, q, mesh=mesh)
    assert out.sharding.shard_shape(out.shape) == (B // 2, T // 2, H, DH)


def test_calls_outside_of_jit_compile_once():
    q, alibi, mesh = arrays(1, T, H, DH), make_scheme("alibi", **DIMS), mesh_of(4)
    attend_sharded(alibi, q, q, q, mesh=mesh)
    with compilations() as compiled:
        out = attend_sharded(alibi, 2 * q, q, q, mesh=mesh)
    assert not compiled and out.sharding.shard_shape(out.shape) == (1, T // 4, H, DH)


@pytest.mark.parametrize("options, message", [
    ({"tokens": 10}, "10 tokens do not divide by the 4 devices of the mesh axis 'sequence': pad them to 12"),
    ({"axis": "sequenc"}, "Unknown mesh axis 'sequenc'. Did you mean sequence"),
    ({"window": 0}, "window is 0"),
    ({"positions": np.arange(3)}, "must be integers of shape"),
    ({"scheme": "fox", "causal": False}, "causal mask only"),
    ({"scheme": "fox"}, "needs features"),
])
def test_what_does_not_fit_is_refused(options, message):
    options = {"tokens": T, "scheme": "alibi"} | options
    x = arrays(1, options.pop("tokens"), H, DH)
    scheme = make_scheme(options.pop("scheme"), **DIMS, rngs=nnx.Rngs(0))
    features = arrays(1, T, H) if "causal" in options else None
    with pytest.raises(UserError, match=message):
        attend_sharded(scheme, x, x, x, mesh=mesh_of(4), features=features, **options)
