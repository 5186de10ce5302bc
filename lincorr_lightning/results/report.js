// Tables are sorted and filtered, and pictures enlarged. Texts come from files of unknown origin: they
// are set as text, never as markup.
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const compare = new Intl.Collator(undefined, { numeric: true }).compare;
const fold = (text) => text.normalize("NFKC").toLowerCase().replaceAll("->", "→").replaceAll("−", "-");

for (const table of document.querySelectorAll("table")) {
  const rows = [...table.tBodies[0].rows], headings = [...[...table.tHead.rows].at(-1).cells];
  // Numbers come before texts, and empty cells last whatever the order.
  const key = ({ dataset: { value }, textContent }) =>
    value ? [0, Number(value.replace("inf", "Infinity"))] : [textContent ? 1 : 2, textContent];
  if (rows.length > 2) headings.forEach((heading, column) => {
    const button = make("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.onclick = () => {
      const order = { ascending: "descending", descending: "none" }[heading.ariaSort] ?? "ascending";
      const sign = order === "ascending" ? 1 : -1;
      const sorted = order === "none" ? rows : rows.toSorted((a, b) => {
        const [kind, x] = key(a.cells[column]), [other, y] = key(b.cells[column]);
        return kind - other || sign * (kind ? compare(x, y) : x - y);
      });
      table.tBodies[0].append(...sorted);
      for (const each of headings) each.ariaSort = each === heading ? order : "none";
    };
  });
  if (rows.length > 10) {
    const filter = make("div", { className: "filter" }), count = make("output");
    const input = make("input", { type: "search", placeholder: "Filter rows" });
    input.ariaLabel = `Filter rows: ${table.caption.textContent}`;
    input.oninput = () => {
      const has = (cell) => fold(cell.textContent).includes(fold(input.value.trim()));
      for (const row of rows) row.hidden = ![...row.cells].some(has);
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
    };
    filter.append(input, count);
    table.parentElement.before(filter);
  }
}

const dialog = make("dialog");
const close = make("button", { textContent: "Close", onclick: () => dialog.close() });
document.body.append(dialog);
const enlarge = (img) => {  // to the size of the window or its own, whichever is larger; or back
  if (dialog.open) return dialog.close();
  const large = img.cloneNode(), [width, height] = ["width", "height"].map((x) => img.getAttribute(x));
  const fit = Math.min((innerWidth - 32) / width, (innerHeight - 80) / height, 2);
  large.style.width = `${width * Math.max(fit, 1)}px`;
  dialog.replaceChildren(close, large);
  dialog.ariaLabel = img.alt;
  prepare(large);
  dialog.showModal();
};
const prepare = (img) => {
  img.parentElement.removeAttribute("tabindex");  // one stop of the tabulator is enough
  Object.assign(img, {
    tabIndex: 0,
    role: "button",
    onclick: () => enlarge(img),
    onkeydown: ({ key }) => {
      if (key !== "Enter" && key !== " ") return true;
      enlarge(img);
      return false;  // else the page scrolls
    },
  });
};
[...document.images].forEach(prepare);
