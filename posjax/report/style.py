"""Colours and markers of schemes: the same name looks the same in every figure."""
import dataclasses
import zlib

# Okabe and Ito's colours for all kinds of colour vision, with their yellow and black (no contrast on paper, or on a dark
# page) replaced from Tol's. The page swaps them for lighter ones in dark mode (`--s0` to `--s7` in report.css).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#332288")
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★"}  # in a figure: in a text
INK, GREY = "#1d2430", "#8a8f98"

# Presentation, so here and not in the scheme: slots of schemes that are often shown together. Any other name gets one
# from its letters, and steps aside for these.
SLOTS = {"alibi": 0, "rope": 1, "nope": 2, "sinusoidal": 3, "learned": 4, "t5": 5, "fire": 6, "kerple": 7}


@dataclasses.dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    dash: str | tuple
    slot: int


def styles(summaries):
    """{label: Style}. Distinct for up to 24 labels; a scheme's own colour goes to the first of its runs."""
    by_label = {s.label: s.scheme for s in summaries}
    taken, chosen = set(), {}

    def take(label, wanted):
        free = [(lap, (wanted + step) % len(PALETTE)) for lap in range(3) for step in range(len(PALETTE))]
        lap, slot = next((place for place in free if place not in taken), (2, wanted))
        taken.add((lap, slot))
        # A second lap of the colours has other markers and dashes.
        marker = list(MARKERS)[(slot + 3 * lap) % len(MARKERS)]
        chosen[label] = Style(PALETTE[slot], marker, ("-", (0, (5, 1.5)), (0, (1.5, 1)))[lap], slot)

    seen = set()
    for label, scheme in by_label.items():
        if scheme in SLOTS and scheme not in seen:
            seen.add(scheme)
            take(label, SLOTS[scheme])
    for label in sorted(by_label):
        if label not in chosen:
            take(label, zlib.crc32(label.encode()) % len(PALETTE))
    return chosen
