"""The page in a real browser: what its script does, that nothing needs it, and that all fits."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pandas import DataFrame

from lincorr_lightning.results.plots import pairs_heatmap
from lincorr_lightning.results.report import write_report
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table
from tests.results.conftest import lm_info, save
from tests.toys import drawn_figures

HOSTILE = "</script><img src=x onerror='parent.hurt=1'>"
# A frame is a window of its own size. The last one, in a sandbox, runs no script.
HARNESS = """<!DOCTYPE html><meta charset="utf-8">{frames}<pre id="out"></pre><script>
const use = (view, page) => {{
  const all = (css) => [...page.querySelectorAll(css)], one = (css) => page.querySelector(css);
  const out = {{ controls: all("button, input, dialog").length }}, [img] = page.images;
  // Beyond the window, unless one can scroll to it where it stands.
  out.wide = all("body *").filter((e) => e.getBoundingClientRect().right > view.innerWidth + 0.5
    && (e.matches(".scroll, caption bdi") || !e.closest(".scroll"))).map((e) => e.outerHTML);
  const order = () => [...one("tbody").rows].map((row) => row.hidden ? "" : row.cells[0].innerText);
  out.orders = [order()];
  if (!out.controls) return out;
  for (const _ of "123") {{ all("th button")[1].click(); out.orders.push(order()); }}
  one("input").value = "E->1";
  one("input").dispatchEvent(new Event("input"));
  out.orders.push(order(), one("output").innerText);
  const press = (key) => img.dispatchEvent(new KeyboardEvent("keydown", {{ key }}));
  const acts = [() => img.click(), () => one("dialog img").click(), () => press("Enter")];
  out.open = acts.map((act) => (act(), one("dialog").open));
  const script = page.createElement("script");
  script.append("parent.hurt = 2");
  page.body.append(script);
  return out;
}};
addEventListener("load", () => {{
  const pages = [...document.querySelectorAll("iframe")];
  const out = pages.map((frame) => use(frame.contentWindow, frame.contentDocument));
  document.getElementById("out").textContent = JSON.stringify([...out, window.hurt ?? 0]);
}});
</script>"""


@pytest.mark.slow
def test_it_sorts_filters_and_enlarges(tmp_path: Path) -> None:
    if (program := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("no browser on this machine: install chromium or google-chrome")
    numbers = [0.301, None, -0.2, 0.3, 12.0, -0.21, 0.5, 0.6, 0.7, 0.8, 0.9]  # 0.30 twice
    names = [HOSTILE, *(f"name->{i}" for i in range(1, len(numbers)))]
    rows = [[name, r, *["wide"] * 9] for name, r in zip(names, numbers, strict=True)]
    about = [*"abcdefghijk"], HOSTILE, HOSTILE, True, {}, {"b": ".1f"}
    sources = [HOSTILE, "\x07\u202e\"&lt;'"]
    cells = DataFrame({"source": sources, "to->": [0.5, 1], "b": [None, -0.1234567]})
    figure = Figure("f", HOSTILE, lambda: pairs_heatmap(cells, HOSTILE))
    tables = [Table.of("t", rows, *about), Table.of("one", rows[:1], *about)]
    results = Results("s", {}, {}, tables, [figure], lm_info("x" * 99), verdict=[HOSTILE])
    with drawn_figures():
        page = write_report([save(results, tmp_path / "s")], tmp_path / "out").read_text("utf-8")
    text = html.escape(page.replace('loading="lazy"', ""))  # drawn before the frames are read
    frames = "".join(
        f'<iframe width="{width}" height="800" srcdoc="{text}"{sandbox}></iframe>'
        for width, sandbox in ((420, ""), (1600, ""), (420, ' sandbox="allow-same-origin"'))
    )
    (harness := tmp_path / "harness.html").write_text(HARNESS.format(frames=frames), "utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --dump-dom"
    )
    command = [program, *flags.split(), f"--user-data-dir={tmp_path}/profile", harness.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (found,) = re.findall(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)
    *pages, hurt = json.loads(html.unescape(found))
    assert hurt == 0, "a script ran that is not the page's"
    shown = [name.replace("->", "→") for name in names]
    known = sorted((r, name) for r, name in zip(numbers, shown, strict=True) if r is not None)
    up, down = ([name for _, name in some] for some in (known, reversed(known)))
    for got in pages[:-1]:
        orders, missing, cut = got["orders"], shown[1], ["", shown[1], *[""] * 8, shown[10]]
        assert orders == [shown, [*up, missing], [*down, missing], shown, cut, "2 of 11 rows"]
        assert got["open"] == [True, False, True] and got["wide"] == []
    assert pages[-1] == {"controls": 0, "wide": [], "orders": [shown]}
