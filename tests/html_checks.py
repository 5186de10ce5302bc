"""Reading HTML back: the cells of its tables, and its text."""

from html.parser import HTMLParser


class ParsedHTML(HTMLParser):
    """HTML as a browser reads it.

    Attributes:
        rows: Cells of each table row, headings included.
        text: All text.
        tags: Names of all elements.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self.tags: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self._in_cell = tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data
