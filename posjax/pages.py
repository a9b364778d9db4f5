"""A page of documentation for every scheme, and their index, in Markdown: taken from the classes themselves."""
import inspect
import pathlib
import re
import textwrap

from posjax import listing
from posjax.errors import UserError
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES

# Sections of a scheme's docstring that stand on its page as they are.
SECTIONS = ("Training and evaluation", "Where implementations differ")
NOTE = ("<!-- Made by `posjax list schemes --pages=docs/schemes` from what the classes say: change their docstrings, and run it "
        "again. -->\n")
# The hooks of a scheme, and what each acts on.
_ACTS = {"embed": "token embeddings", "rotary": "queries and keys, by rotation", "rotate": "queries and keys",
         "bias": "the logits, by a bias", "features": "the input of the layer, which it reads beside q, k and v",
         "logits": "the logits, where content and position mix", "values": "the values that attention returns"}


def write_pages(folder, imports=()):
    """Writes the pages of all registered schemes into `folder`.

    Args:
      folder: made if it does not exist; other files in it stay.
      imports: modules or files that the schemes came from, for the commands that a page shows.

    Returns:
      The names of the files.

    Raises:
      ValueError: the folder cannot be written.
    """
    made = pages(imports)
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        for name, page in made.items():
            (pathlib.Path(folder) / name).write_text(page)
    except OSError as error:
        raise UserError(f"The pages cannot be written to {folder}: {error.strerror}.") from None
    return list(made)


def pages(imports=()):
    """The pages as `{"rope.md": text, ..., "README.md": text}`."""
    rows = {row["name"]: row for row in listing.rows("schemes")}
    return {f"{name}.md": _page(row, imports) for name, row in rows.items()} | {"README.md": _index()}


def sections(docstring):
    """The parts of a Google-style docstring as `{"": description, "Args": text, ...}`, each without its indentation."""
    lines, title, found = inspect.cleandoc(docstring or "").split("\n"), "", {"": []}
    for line, after in zip(lines, [*lines[1:], ""]):
        header = re.fullmatch(r"([A-Z][\w ]*):", line)
        if header and after.startswith(" "):
            title = header[1]
            found[title] = []
            continue
        if line and not line.startswith(" "):
            title = ""  # text at the margin is of the docstring itself again
        found[title].append(line)
    return {title: textwrap.dedent("\n".join(part)).strip() for title, part in found.items()}


def arguments(section):
    """What a section "Args" says of each name, as `{"base": text}`; names that share an entry share its text."""
    found, names = {}, []
    for line in section.split("\n"):
        if entry := re.match(r"(\w+(?:, \w+)*)(?: \([^)]*\))?: (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def _page(row, imports):
    name, cls = row["name"], SCHEMES.get(row["name"])
    scheme, sizes = listing.default_scheme(name)
    parts = sections(cls.__doc__)
    blocks = [NOTE, f"# {name}\n", f"```\n{cls.formula}\n```\n" if cls.formula else "", f"{_linked(cls.reference)}\n",
              f"{_linked(parts[''])}\n", _facts(row, cls, scheme, sizes), _hyper(row["hyper"], parts.get("Args", ""))]
    blocks += [f"## {title}\n\n{_linked(parts[title])}\n" for title in SECTIONS if title in parts]
    blocks.append(_use(name, scheme, sizes, row, imports))
    return "\n".join(block for block in blocks if block.strip())


def _index():
    rows = [row | {"name": f"[{row['name']}]({row['name']}.md)"} for row in listing.table("schemes")]
    return "\n".join([
        NOTE, "# Positional schemes\n",
        f"Parameters are those of {_decoder()}; T is the number of tokens, D the width, d or Dh the channels a "
        "head, H the heads.\n",
        listing.markdown(rows) + "\n",
        "Any of them takes a temperature, a factor on the logits by position (`posjax list temperatures`); blocks of a decoder "
        "can have\ndifferent schemes (`layers` in a config); and positions come from a policy (`posjax list policies`).\n"])


def _decoder():
    _, sizes = listing.default_scheme("nope")
    return (f"the default decoder ({sizes.depth} layers, width {sizes.width}, {sizes.num_heads} heads of {sizes.head_dim} "
            "channels)")


def _facts(row, cls, scheme, sizes):
    owner = f" ({'of each layer its own' if cls.per_layer else 'shared by the layers'})" if row["parameters"] else ""
    facts = {"acts on": "; ".join(_acts(scheme or cls)) or "nothing",
             "parameters": None if row["parameters"] is None else f"{row['parameters']}{owner}", "relative": row["relative"],
             "max_length": row["max_length"], "depends on the length": (scheme or cls).depends_on_length,
             "under the causal mask only": cls.causal_only, "cost beside plain attention": cls.cost}
    if _built_in(cls):
        facts["code"] = f"`{cls.__module__.replace('.', '/')}.py`"
    table = listing.markdown([{"fact": fact, "value": value} for fact, value in facts.items()])
    return f"With default hyper-parameters, in {_decoder()}:\n\n{table}\n"


def _acts(scheme):
    """What a scheme, or its class, acts on, in words: those of the hooks that it has."""
    cls = scheme if isinstance(scheme, type) else type(scheme)
    own = [hook for hook in _ACTS if getattr(cls, hook) is not getattr(Scheme, hook) and getattr(scheme, hook) is not None]
    return [_ACTS[hook] for hook in own if hook != "rotate" or "rotary" not in own]


def _built_in(cls):
    return cls.__module__.startswith("posjax.")


def _hyper(defaults, section):
    if not defaults:
        return ""
    said = arguments(section)
    rows = [{"name": f"`{key}`", "default": f"`{default}`", "meaning": _linked(said.get(key, ""))}
            for key, default in defaults.items()]
    return f"## Hyper-parameters\n\n{listing.markdown(rows)}\n"


def _use(name, scheme, sizes, row, imports):
    options = "" if _built_in(SCHEMES.get(name)) else "".join(f" --import={module}" for module in imports)
    commands = f"```bash\nposjax train --config=configs/copy.py:{name}{options}\nposjax inspect {name}{options}\n```\n"
    if scheme is None:
        return f"## Use\n\n{commands}"
    heads, dim = sizes.num_heads, sizes.head_dim
    acts = [hook for hook in ("embed", "features") if getattr(type(scheme), hook) is not getattr(Scheme, hook)]
    lines = ["import jax", *(["import jax.numpy as jnp"] if "embed" in acts else []), "import posjax",
             *(["from flax import nnx"] if row["parameters"] else []), "",
             f'scheme = posjax.make_scheme("{name}", num_heads={heads}, head_dim={dim}'
             + (", rngs=nnx.Rngs(0))" if row["parameters"] else ")")]
    if acts:
        lines.append(f"x = jax.random.normal(jax.random.key(1), (2, 32, {heads * dim}))  # [B, T, D]")
    if "embed" in acts:
        lines.append("x = scheme.embed(x, jnp.arange(32))  # before q, k and v are made of it")
    lines += [f"q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, {heads}, {dim}))  # each [B, T, H, Dh]",
              f"out = posjax.attend(scheme, q, k, v{', features=scheme.features(x)' if 'features' in acts else ''})"]
    return "## Use\n\n```python\n" + "\n".join(lines) + f"\n```\n\n{commands}"


def _linked(text):
    """`text` with the arXiv numbers as links."""
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
