// Tables are sorted and filtered, pictures enlarged, and cells of heat maps shown. Texts come from
// files of unknown origin: they are set as text, never as markup.
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

const dialog = make("dialog", { onclose: () => show() }), mark = make("div", { className: "mark" });
const close = make("button", { textContent: "Close", onclick: () => dialog.close() });
const tip = make("div", { className: "tip", hidden: true, role: "status" });
let shown = [];  // a heat map, a row and a column of it
document.body.append(dialog, tip);
const read = (text) => {
  try {
    return JSON.parse(text).filter(({ box, axes, rows, columns, cells }) =>
      axes && box.every(Number.isFinite) && rows.every((_, i) => cells[i].length === columns.length));
  } catch { return []; }  // no heat map, or none that this package drew
};
// Left and upper end of a heat map in its picture, and the size of a cell, in CSS pixels.
const measure = (img, { box, rows, columns }) => {
  const [x, y, right, low] = box.map((end) => end * img.clientWidth / img.getAttribute("width"));
  return [x, y, (right - x) / columns.length, (low - y) / rows.length];
};
const find = (img, { offsetX, offsetY }) => {
  for (const map of img.maps) {
    const [x, y, width, height] = measure(img, map);
    const row = Math.floor((offsetY - y) / height), column = Math.floor((offsetX - x) / width);
    if (row in map.rows && column in map.columns) return [map, row, column];
  }
  return [];
};
const show = (img, map, row, column) => {  // without a map, nothing
  shown = [map, row, column];
  tip.hidden = !map;
  mark.remove();
  if (!map) return;
  const [x, y, width, height] = measure(img, map), value = map.cells[row][column];
  const lines = [`${map.axes[0] || "row"}: ${map.rows[row]}`,
    `${map.axes[1] || "column"}: ${map.columns[column]}`,
    value === null ? "no value" : String(value).replaceAll("-", "−")];
  tip.replaceChildren(...lines.map((textContent) => make("div", { textContent })));
  const left = img.offsetLeft + x + column * width, top = img.offsetTop + y + row * height;
  mark.style.cssText = `left: ${left}px; top: ${top}px; width: ${width}px; height: ${height}px`;
  img.after(mark);
  (dialog.open ? dialog : document.body).append(tip);
  place();
};
const place = () => {
  const cell = mark.getBoundingClientRect(), { width, height } = tip.getBoundingClientRect();
  const y = cell.bottom + height + 6 < innerHeight ? cell.bottom + 6 : cell.top - height - 6;
  tip.style.translate = `${Math.min(cell.right + 6, innerWidth - width - 20)}px ${Math.max(4, y)}px`;
};
const move = (img, [down, right]) => {
  let [map, row, column] = [shown[0], shown[1] + down, shown[2] + right];
  if (!(column in map.columns)) {  // to the heat map beside it
    map = img.maps[img.maps.indexOf(map) + right];
    column = right > 0 ? 0 : map?.columns.length - 1;
  }
  if (map && row in map.rows) show(img, map, row, column);
  mark.scrollIntoView({ block: "nearest", inline: "nearest" });
};
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
  let isTouch = false;  // a finger does not hover: its first touch of a cell shows that
  const arrows = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  img.parentElement.removeAttribute("tabindex");  // one stop of the tabulator is enough
  Object.assign(img, {
    maps: read(img.dataset.cells),
    tabIndex: 0,
    role: "button",
    onblur: () => show(),
    onfocus: () => img.matches(":focus-visible") && show(img, img.maps[0], 0, 0),
    onpointerdown: (event) => { isTouch = event.pointerType === "touch"; },
    onpointermove: (event) => event.pointerType === "touch" || show(img, ...find(img, event)),
    onpointerleave: (event) => event.pointerType === "touch" || show(),
    onclick: (event) => {
      const cell = find(img, event), isNew = cell.some((part, i) => part !== shown[i]);
      return isTouch && isNew ? show(img, ...cell) : enlarge(img);
    },
    onkeydown: ({ key }) => {
      if (key === "Enter" || key === " ") enlarge(img);
      else if (key in arrows && shown[0]) move(img, arrows[key]);
      else return true;
      return false;  // else the page scrolls
    },
  });
};
addEventListener("scroll", place, { capture: true, passive: true });
addEventListener("resize", () => show());
[...document.images].forEach(prepare);
