"""How a page looks: on a screen of any width, by day and by night, and on paper."""

CSS = """
:root { color-scheme: light dark; --ink: #1d232b; --soft: #5a6472; --line: #d7dce3;
  --paper: #ffffff; --shade: #f4f6f9; --link: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ed; --soft: #a3adba; --line: #39424e; --paper: #14181d; --shade: #1d232b;
    --link: #82b8f2; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem;
  background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.45rem; line-height: 1.25; margin: 3rem 0 .5rem; padding-top: 1rem;
  border-top: 2px solid var(--line); }
h3 { font-size: 1.15rem; line-height: 1.3; margin: 2.25rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0 1rem; }
a { color: var(--link); }
.skip { position: absolute; left: -100vw; }
.skip:focus { position: static; }
nav { background: var(--shade); border-radius: .5rem; padding: .75rem 1.25rem;
  margin-bottom: 1.5rem; }
nav h2 { font-size: 1rem; margin: 0; padding: 0; border: 0; }
nav ul { margin: .25rem 0; padding-left: 1.25rem; }
nav li { margin: .3rem 0; }
.scroll { overflow-x: auto; max-width: 100%; }
.scroll:focus-visible, a:focus-visible, summary:focus-visible { outline: 2px solid var(--link);
  outline-offset: 2px; }
table { border-collapse: collapse; font-size: .875rem; margin: .75rem 0 .5rem;
  min-width: min(100%, 24rem); }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; font-size: 1rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { padding: .3rem .55rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: normal; max-width: 26rem; }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--soft); color: var(--soft);
  font-weight: 600; }
tbody th { font-weight: 500; }
td { overflow-wrap: break-word; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
thead .number { white-space: normal; }
.short { white-space: nowrap; }
.note, figcaption { color: var(--soft); font-size: .875rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr));
  gap: .35rem 1.5rem; margin: .75rem 0 1.25rem; padding: .9rem 1.1rem; background: var(--shade);
  border-radius: .5rem; font-size: .9rem; }
.facts div { min-width: 0; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; }
pre { background: var(--shade); border-radius: .5rem; padding: .75rem 1rem; margin: .25rem 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; line-height: 1.45; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .3rem 0; font-weight: 600; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.25rem; align-items: flex-start;
  margin: 1rem 0; }
figure { margin: 0; min-width: 0; max-width: 100%; padding: .75rem; border: 1px solid var(--line);
  border-radius: .5rem; }
img { display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: .25rem; }
figcaption { margin-top: .5rem; }
@media (max-width: 40rem) {
  figure img { max-width: min(38rem, 250%); }
  th, td { padding: .3rem .5rem; }
}
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --shade: #fff; --link: #000; }
  @page { margin: 15mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, .facts, pre { border: 1px solid var(--line); }
  .scroll { overflow: visible; }
  table { font-size: 7pt; max-width: 100%; }
  th, td { padding: 1.5pt 3pt; }
  .short { white-space: normal; }
  h2, h3, caption { break-after: avoid; }
  tr, figure, .facts { break-inside: avoid; }
  .pictures { display: block; }
  figure { margin-bottom: 8mm; }
  figure img { max-height: 115mm; width: auto; }
  details:not([open]), .skip { display: none; }
}
"""
