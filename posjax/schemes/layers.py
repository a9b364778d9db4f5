"""Which scheme, and which window, each block of a decoder has."""
from flax import nnx

from posjax.errors import UserError, unknown
from posjax.ops.attention import check_window
from posjax.schemes.base import Scheme

PARAMETERS = ("published", "shared", "own")


class Layers(nnx.Module):
    """A decoder's positional schemes, block by block.

    Most decoders use one scheme throughout: `Layers.of(scheme, depth)`. Others alternate: NoPE in every fourth block
    (SmolLM3), another base and no window in every sixth (Gemma 3), parameters of their own in each (Shaw): see `make_layers`.

    Args:
      schemes: the different schemes.
      order: for each block, the index of its scheme.
      windows: for each block, the number of visible keys with the query's own, or None for all.

    Raises:
      ValueError: nothing to alternate, a window below 1, or schemes that would add to the embeddings twice.
    """

    def __init__(self, schemes, order, windows):
        for window in windows:
            check_window(window)
        embedding = [s for s in schemes if type(s).embed is not Scheme.embed]
        if len(embedding) > 1:
            raise UserError(f"{', '.join(type(s).__name__ for s in embedding)} add to the embeddings, which happens once, "
                            "before the first block: no second of them can serve other blocks.")
        self.schemes = nnx.List(schemes)
        self.order, self.windows = tuple(order), tuple(windows)
        self.embedding = schemes.index(embedding[0]) if embedding else None

    @classmethod
    def of(cls, scheme, depth):
        """The same scheme in all of `depth` blocks; a `Layers` is returned as it is."""
        if not isinstance(scheme, cls):
            return cls([scheme], (0,) * depth, (None,) * depth)
        if len(scheme.order) != depth:
            raise UserError(f"The layers are made for {len(scheme.order)} blocks, but the decoder has {depth}.")
        return scheme

    def embed(self, x, positions):
        """Token embeddings `[B, T, D]` with the position added, by the one scheme that does so."""
        return x if self.embedding is None else self.schemes[self.embedding].embed(x, positions)

    def __getitem__(self, block):
        """The scheme and the window of a block."""
        return self.schemes[self.order[block]], self.windows[block]

    @property
    def max_length(self):
        """The shortest `max_length` among the schemes, or None."""
        return min((s.max_length for s in self.schemes if s.max_length is not None), default=None)


def make_layers(make, depth, *, parameters="published", window=None, other=None, other_every=0, other_window=None):
    """The `Layers` of a config's section "layers".

    Args:
      make: makes the scheme of an ordinary block.
      depth: number of blocks.
      parameters: "shared": one scheme for all blocks; "own": each block has its own, and its own parameters;
        "published": as the scheme's `per_layer` says.
      window: visible keys with the query's own in the ordinary blocks; None for all.
      other: makes the scheme of every `other_every`-th block (of 4: the 4th, 8th, ...).
      other_every: 0 for none.
      other_window: as `window`, for those blocks.

    Raises:
      ValueError: an option that does not exist or goes with nothing, a window below 1.
    """
    if parameters not in PARAMETERS:
        raise unknown("layers.parameters", parameters, PARAMETERS)
    if not 0 <= other_every <= depth:
        raise UserError(f"layers.other_every is {other_every}; it must be from 0 (none) to the number of blocks, {depth}.")
    is_other = [other_every > 0 and block % other_every == other_every - 1 for block in range(depth)]
    if other_window is not None and not any(is_other):
        raise UserError(f"layers.other_window is {other_window}, but no block is of the other kind: set layers.other_every.")
    schemes, order, shared = [], [], {}
    for here in is_other:
        if here not in shared:
            shared[here] = len(schemes)
            schemes.append((other if here else make)())
            order.append(shared[here])
            continue
        scheme = schemes[shared[here]]
        if parameters == "own" or (parameters == "published" and scheme.per_layer):
            order.append(len(schemes))
            schemes.append((other if here else make)())
        else:
            order.append(shared[here])
    return Layers(schemes, order, [other_window if here else window for here in is_other])
