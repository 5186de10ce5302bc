"""Run folders with hostile names, labels and values, and what a report's page may hold."""

from __future__ import annotations

import json
import random
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.faults.bad_inputs import damage_file
from tests.faults.runs import Fault

_HOSTILE = [
    "<script>alert(1)</script>", "</td></table><script>alert(1)</script>", "{% for x in y %}",
    '"><img src=x onerror=a>', "' onmouseover='alert(1)", "javascript:alert(1)", "{{ 7*7 }}",
    "<svg/onload=alert(1)>", "</style><script>1</script>", "<!--", "]]>", "\\input{/etc/passwd}",
    "|a|b|", "<iframe src=//x>", "../../../etc/passwd", "&lt;script&gt;", "\x00", "\u202eabc",
    "=cmd|'/C'!A1",
]  # fmt: skip
_VALUES: list[Any] = [
    None, -1, 1e300, [], {}, True, "", ["<b>"], {"<script>": "<script>"}, 10**40,
]  # fmt: skip
_URLS = ("src", "href", "action", "data", "srcset", "formaction", "xlink:href", "poster")


def hostile_runs(run: Path, draw: random.Random, folder: Path) -> tuple[list[Path], str]:
    """Make hostile copies of a finished run.

    Returns:
        Folders to report, and what was done.
    """
    name = draw.choice(["plain", "a b", "<script>alert(1)<script>", "'\"&", "\u202eabc", "-x"])
    copy = folder / "runs" / name
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.ckpt"))
    done = [f"folder {name!r}"]
    for _ in range(draw.randint(1, 3)):
        done.append(_change(copy, draw))
    return [copy] + [run] * (draw.random() < 0.5), ", ".join(done)


def _change(copy: Path, draw: random.Random) -> str:
    tables = sorted(path for path in copy.rglob("*.csv") if path.is_file())
    results = copy / "results.json"
    kind = draw.choice(["text", "text", "text", "value", "key", "cell", "cell", "config", "file"])
    word = draw.choice(_HOSTILE)
    if kind == "cell" and tables:
        path = draw.choice(tables)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            i = draw.randrange(len(lines))
            cells = lines[i].split(",")
            cells[draw.randrange(len(cells))] = '"' + word.replace('"', '""') + '"'
            lines[i] = ",".join(cells)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"{path.name} {word!r}"
    if kind == "config":
        text = f"# {word}\nname: {json.dumps(word)}\nseed_everything: {json.dumps(word)}\n"
        (copy / "config.yaml").write_text(text, encoding="utf-8")
        return f"config {word!r}"
    if kind == "file":
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        return damage_file(draw.choice(files), draw)[0]
    try:
        tree = json.loads(results.read_text(encoding="utf-8"))
        nodes = list(_nodes(tree))
        texts = [(node, key) for node, key in nodes if isinstance(node[key], str)]
    except (OSError, ValueError, AttributeError):
        return "nothing"
    node, key = draw.choice(texts if kind == "text" and texts else nodes)
    if kind == "key" and isinstance(node, dict):
        node[word] = node.pop(key)
    else:
        node[key] = word if kind == "text" else draw.choice(_VALUES)
    results.write_text(json.dumps(tree), encoding="utf-8")
    return f"{kind} of {key} {word!r}"


def _nodes(node: Any) -> Any:
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], (dict, list)):
            yield from _nodes(node[key])


class _Page(HTMLParser):
    """Refuses what could run or load something."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base", "form", "svg", "link"):
            raise Fault(f"the page has a tag {tag}")
        for name, value in attrs:
            target = (value or "").strip().lower()
            if name.startswith("on"):
                raise Fault(f"the page has an attribute {name}")
            if name in _URLS and not target.startswith(("data:image/", "#", "http://", "https://")):
                raise Fault(f"the page has a {name} of {target[:60]!r}")


def check_page(folder: Path) -> None:
    """Check that a report's page holds nothing that runs or loads."""
    found = sorted(folder.glob("*.html"))
    if not found:
        raise Fault("there is no page")
    for path in found:
        parser = _Page()
        parser.feed(path.read_text(encoding="utf-8"))
        parser.close()
