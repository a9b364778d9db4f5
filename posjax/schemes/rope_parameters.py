"""RoPE as a model's config.json describes it."""
from collections.abc import Mapping

from posjax.errors import UserError
from posjax.schemes.rope_scaling import Plain, check_number, mscale_amplitude, scale

_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def rope_parameters(head_dim, rope_parameters, *, length=None, max_position_embeddings=None):
    """The inverse frequencies that a config asks for, and the amplitude of cos and sin.

    Takes the mapping `rope_parameters` of a Hugging Face config.json as it stands: `rope_type` (default, linear, dynamic,
    yarn, longrope, llama3, proportional; and posjax's own ntk, ntk_by_parts and dynamic_paper), `rope_theta`,
    `partial_rotary_factor` and the type's own keys. Takes the older spelling too: "type" for "rope_type" ("su" for
    longrope), and the mapping, or null, under a key "rope_scaling" with rope_theta, partial_rotary_factor and
    original_max_position_embeddings beside it. Where layers differ, give the mapping of one type of layer.

    Args:
      head_dim: channels a head.
      rope_parameters: the mapping.
      length: tokens of the sequence, for dynamic and longrope; None for no more than the original length.
      max_position_embeddings: the config's; stands in for an absent original_max_position_embeddings, and its ratio to
        the original length for an absent (or null) `factor` of yarn and longrope.

    Returns:
      `(inv_freq, attention_factor)`: float64 `[r / 2]` in radians a position, r = int(head_dim * partial_rotary_factor)
      rotated channels (all, for proportional: pairs of frequency 0 stay put), and a float.

    Raises:
      ValueError: an unknown type, a key that the type does not use or that it misses, or a bad value.
    """
    given = _one_mapping(rope_parameters)
    if (base := given.pop("rope_theta", None)) is None:
        raise UserError("rope_theta is missing. In an older config.json it stands beside rope_scaling: pass "
                        '{"rope_theta": ..., "rope_scaling": {...}}.')
    rope_type = given.pop("rope_type", "default")
    fraction = given.pop("partial_rotary_factor", None)
    fraction = 1.0 if fraction is None else fraction
    check_number("head_dim", head_dim, at_least=2)
    check_number("rope_theta", base)
    check_number("partial_rotary_factor", fraction)
    for name, value in (("length", length), ("max_position_embeddings", max_position_embeddings)):
        if value is not None:
            check_number(name, value, at_least=1)
    if fraction > 1:
        raise UserError(f"partial_rotary_factor is {fraction:g}; it must be above 0 and at most 1.")
    rotary_dim = int(head_dim * fraction)
    paired = head_dim if rope_type == "proportional" else rotary_dim
    if paired % 2 or not paired:
        raise UserError(f"RoPE turns pairs of channels, so it needs an even number of them; head_dim {head_dim} with "
                        f"partial_rotary_factor {fraction:g} gives {paired}.")
    return scale(Plain(base, head_dim, rotary_dim, length, max_position_embeddings), rope_type, given)


def softmax_scale_multiplier(rope_parameters):
    """What DeepSeek's models multiply the softmax scale by: `(0.1 mscale_all_dim ln(factor) + 1) ** 2`.

    It comes on top of the amplitude, which an `mscale` equal to `mscale_all_dim` makes 1, and it acts on all channels of
    queries and keys, rotated or not, where the amplitude acts on the rotated: under partial rotation neither can stand
    for the other. 1.0 for a mapping (see `rope_parameters`) without `mscale_all_dim`.
    """
    given = _one_mapping(rope_parameters)
    if not given.get("mscale_all_dim"):
        return 1.0
    for name in ("mscale_all_dim", "factor"):
        check_number(name, given.get(name))
    return mscale_amplitude(given["factor"], given["mscale_all_dim"]) ** 2


def _one_mapping(given):
    """The mapping in the newer spelling, whatever it came in."""
    if not isinstance(given, Mapping):
        raise UserError(f"rope_parameters must be a mapping, as in a config.json; it is {given!r}.")
    given = dict(given)
    if given and all(isinstance(value, Mapping) for value in given.values()) and "rope_scaling" not in given:
        raise UserError(f"rope_parameters has one mapping for each type of layer, {', '.join(map(str, given))}; give one.")
    if "rope_scaling" in given:
        inner = given.pop("rope_scaling")
        for key in given:
            if key not in _BESIDE:
                raise UserError(f"The key {key!r} beside rope_scaling is not used; {', '.join(_BESIDE)} are.")
        given = _merged(given, {} if inner is None else _one_mapping(inner))
    if "type" in given:
        older = given.pop("type")
        given = _merged({"rope_type": "longrope" if older == "su" else older}, given)
    return given


def _merged(first, second):
    for key in first.keys() & second.keys():
        if first[key] != second[key]:
            raise UserError(f"{key} is given twice, as {first[key]!r} and as {second[key]!r}.")
    return first | second
