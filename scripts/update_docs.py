"""Writes what the scheme classes say of themselves into the README's table and docs/schemes, and removes pages of no scheme."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from posjax import listing, pages  # noqa: E402

TABLE = re.compile(r"^\| name \| formula \|.*?(?=^$)", re.MULTILINE | re.DOTALL)


def main():
    readme = ROOT / "README.md"
    table = listing.markdown(listing.table("schemes")) + "\n"
    readme.write_text(TABLE.sub(lambda _: table, readme.read_text(), count=1))
    folder = ROOT / "docs" / "schemes"
    made = pages.write_pages(folder)
    for page in folder.glob("*.md"):
        if page.name not in made:
            page.unlink()


if __name__ == "__main__":
    main()
