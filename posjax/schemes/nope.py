from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme


@register_scheme("nope")
class NoPE(Scheme):
    """No positional encoding: only the causal mask tells order.

    Haviv et al. 2022 (arXiv 2203.16634); Kazemnejad et al. 2023 (arXiv 2305.19466).

    Training and evaluation:
      Computes the same at every length, so nothing clamps or is undefined. What order it has comes from how many tokens a
      query sees, and a longer context spreads its attention over more of them. In an encoder (no causal mask) it has none.

    Where implementations differ:
      Some models leave positions out of some layers only: SmolLM3 of every 4th (`--config.layers.other_every=4` on rope
      does that), Llama 4 too, which there also multiplies queries by a factor that grows with the position (the temperature
      llama4). This scheme has no position in any layer that it serves, and no factor unless a temperature is set.
    """
    formula = "nothing is added; the causal mask alone breaks the symmetry"
    reference = "Kazemnejad et al. 2023, arXiv 2305.19466"
    cost = "nothing"
    relative = True
