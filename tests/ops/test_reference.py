"""The judge computes in the precision that it is given, and nobody else passes float32 off as float64."""
import jax
import numpy as np
import pytest

from posjax.errors import UserError
from posjax.schemes.attend import attend
from posjax.schemes.registry import make_scheme

B, T, H, DH = 2, 9, 4, 8


def expected(q, k, v, slopes=0.0):
    distance = np.arange(T)[:, None] - np.arange(T)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * DH**-0.5 - np.reshape(slopes, (-1, 1, 1)) * distance
    weights = np.exp(np.where(distance < 0, -np.inf, logits))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("scheme, slopes, error", [("nope", 0.0, 1e-14), ("alibi", 2.0 ** (-2 * np.arange(1, 5)), 1e-14),
                                                   ("rope", None, 1e-6)])
def test_float64_is_computed_in_float64_by_the_reference_alone(scheme, slopes, error):
    made = make_scheme(scheme, num_heads=H, head_dim=DH)
    q, k, v = np.random.default_rng(0).normal(size=(3, B, T, H, DH))
    if slopes is None:  # only the angles are float32
        inv_freq = 1e4 ** (-np.arange(DH // 2) * 2 / DH)
        turn = np.exp(1j * np.arange(T)[:, None, None] * inv_freq)
        qr, kr = ((x[..., :DH // 2] + 1j * x[..., DH // 2:]) * turn for x in (q, k))
        want = expected(*(np.concatenate([x.real, x.imag], -1) for x in (qr, kr)), v)
    else:
        want = expected(q, k, v, slopes)
    with jax.enable_x64(True):
        out = attend(made, q, k, v)
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, want, rtol=0, atol=error)
        with pytest.raises(UserError, match="backend dense cannot .* it computes in float32, and float64 was given"):
            attend(made, q, k, v, backend="dense")
