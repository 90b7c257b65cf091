"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function size(bytes) {
  const sign = bytes < 0 ? "-" : "", n = Math.abs(bytes);
  for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (n >= factor || (unit === "GiB" && n >= factor / 2))
      return sign + (n / factor).toFixed(unit === "GiB" ? 2 : 1) + " " + unit;
  }
  return sign + n + " B";
}

const signed = (bytes) => (bytes > 0 ? "+" : "") + size(bytes);
const percent = (part, whole) => (whole ? (100 * part / whole).toFixed(1) + " %" : "–");
const swatch = (color) => make("span", { class: "swatch", style: "background:" + color });

function header() {
  for (const [name, value] of data.totals)
    $("#totals").append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  const section = $("#findings");
  section.hidden = !data.findings.length;
  for (const finding of data.findings) {
    const item = make("li", { class: finding.severity });
    if (finding.source) item.append(make("code", {}, finding.source), " ");
    item.append(finding.message + " " + finding.fix);
    $("ul", section).append(item);
  }
  $("#notes").hidden = !data.notes.length;
  for (const note of data.notes) $("#notes ul").append(make("li", {}, note));
}

function categories() {
  const sizes = Object.entries(data.categories);
  const whole = sizes.reduce((sum, [, n]) => sum + n, 0);
  for (const [name, n] of sizes) {
    const color = data.colors[name];
    const text = `${name} ${size(n)} (${percent(n, whole)})`;
    $("#categories .bar").append(
      make("span", { style: `flex:${n} 0 0;background:${color}`, title: text }));
    if (n >= 0.005 * whole)
      $("#categories .legend").append(make("li", {}, swatch(color), text));
  }
}

/* The timeline: an area for each pass, a cursor, a marker at the peak. */
function timeline() {
  const section = $("#timeline"), svg = $("svg", section), points = data.timeline;
  if (!points.length) { section.hidden = true; return; }
  const [AT, NAME, BYTES, HOST, PHASE, RUNS] = [0, 1, 2, 3, 4, 5];
  const first = points[0][AT], last = points[points.length - 1][AT] + 1;
  const most = Math.max(1, ...points.map((p) => p[BYTES]), ...points.map((p) => p[HOST]));
  const peak = points.reduce((best, p, i) => (p[BYTES] > points[best][BYTES] ? i : best), 0);
  let from = first, to = last, cursor = peak, dragged = null;
  const margin = { left: 62, right: 8, top: 18, bottom: 16 };
  const box = () => ({ w: svg.clientWidth || 600, h: svg.clientHeight || 260 });
  const x = (at) => margin.left + (box().w - margin.left - margin.right) * (at - from) / (to - from);
  const y = (n) => box().h - margin.bottom - (box().h - margin.top - margin.bottom) * n / most;
  const at = (px) => from + (px - margin.left) / (box().w - margin.left - margin.right) * (to - from);
  const end = (i) => (i + 1 < points.length ? points[i + 1][AT] : last);

  function node(tag, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    svg.append(element);
    return element;
  }

  function area(start, stop) {
    const base = y(0);
    let path = `M${x(points[start][AT])} ${base}`;
    for (let i = start; i < stop; i++)
      path += `L${x(points[i][AT])} ${y(points[i][BYTES])}L${x(end(i))} ${y(points[i][BYTES])}`;
    const color = data.phase_colors[points[start][PHASE] || ""];
    node("path", { d: path + `L${x(end(stop - 1))} ${base}Z`, fill: color });
  }

  function draw() {
    svg.replaceChildren();
    for (let i = 0; i <= 4; i++) {
      const n = most * i / 4;
      node("line", { class: "grid", x1: margin.left, x2: box().w - margin.right, y1: y(n), y2: y(n) });
      node("text", { x: margin.left - 4, y: y(n) + 4, "text-anchor": "end" }, size(Math.round(n)));
    }
    let low = points.findIndex((p, i) => end(i) > from);
    let high = points.length;
    while (high > low + 1 && points[high - 1][AT] >= to) high--;
    for (let start = low; start < high;) {
      let stop = start + 1;
      while (stop < high && points[stop][PHASE] === points[start][PHASE]) stop++;
      area(start, stop);
      start = stop;
    }
    if (points.some((p) => p[HOST])) {
      let path = "";
      for (let i = low; i < high; i++)
        path += `${path ? "L" : "M"}${x(points[i][AT])} ${y(points[i][HOST])}L${x(end(i))} ${y(points[i][HOST])}`;
      node("path", { class: "host", d: path });
    }
    const top = points[peak];
    const mid = (top[AT] + end(peak)) / 2;
    if (mid >= from && mid <= to) {
      node("line", { class: "peak", x1: x(mid), x2: x(mid), y1: margin.top - 4, y2: box().h - margin.bottom });
      const right = x(mid) > box().w / 2;
      node("text", { class: "peaktext", x: x(mid) + (right ? -4 : 4), y: 12, "text-anchor": right ? "end" : "start" },
        "▼ peak " + size(top[BYTES]));
    }
    const c = points[cursor];
    const cx = x((c[AT] + end(cursor)) / 2);
    if (cx >= margin.left - 1 && cx <= box().w)
      node("line", { class: "cursor", x1: cx, x2: cx, y1: margin.top, y2: box().h - margin.bottom });
    if (dragged && dragged.to !== undefined) {
      const [a, b] = [dragged.from, dragged.to].sort((p, q) => p - q);
      node("rect", { class: "zoombox", x: a, y: margin.top, width: b - a, height: box().h - margin.top - margin.bottom });
    }
    node("rect", { x: 0, y: 0, width: margin.left - 2, height: 0, fill: "none" });
    read();
  }

  function read() {
    const p = points[cursor];
    const host = p[HOST] ? `, host ${size(p[HOST])}` : "";
    const runs = p[RUNS] > 1 ? `, runs ${p[RUNS]} times` : "";
    $(".readout", section).textContent =
      `${cursor === peak ? "peak: " : ""}${size(p[BYTES])} at ${p[NAME]} (${p[PHASE] || "other"}${runs})${host}`;
  }

  function point_at(px) {
    const place = at(px);
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (points[middle][AT] <= place) low = middle; else high = middle - 1;
    }
    return low;
  }

  function show(a, b) {
    const least = Math.min(4, last - first);
    if (b - a < least) { const c = (a + b) / 2; a = c - least / 2; b = c + least / 2; }
    if (a < first) { b += first - a; a = first; }
    if (b > last) { a -= b - last; b = last; }
    from = Math.max(first, a); to = Math.min(last, b);
    draw();
  }

  function zoom(factor, center = (points[cursor][AT] + end(cursor)) / 2) {
    show(center - (center - from) * factor, center + (to - center) * factor);
  }

  function move(i) {
    cursor = Math.max(0, Math.min(points.length - 1, i));
    const place = points[cursor][AT];
    if (place < from || end(cursor) > to) show(place - (to - from) / 2, place + (to - from) / 2);
    else draw();
  }

  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), all: () => show(first, last),
    peak: () => { cursor = peak; move(peak); },
  };
  for (const button of section.querySelectorAll("[data-do]"))
    button.addEventListener("click", () => actions[button.dataset.do]());
  const offset = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("pointermove", (event) => {
    if (dragged) dragged.to = offset(event);
    cursor = point_at(offset(event));
    draw();
  });
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse") { cursor = point_at(offset(event)); draw(); return; }
    dragged = { from: offset(event) };
  });
  window.addEventListener("pointerup", () => {
    const drag = dragged;
    dragged = null;
    if (drag && drag.to !== undefined && Math.abs(drag.to - drag.from) > 5) {
      const [a, b] = [at(drag.from), at(drag.to)].sort((p, q) => p - q);
      show(a, b);
    } else if (drag) draw();
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== svg) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, at(offset(event)));
  }, { passive: false });
  svg.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => move(cursor - step), ArrowRight: () => move(cursor + step),
      Home: () => move(0), End: () => move(points.length - 1),
      "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all,
      p: actions.peak, P: actions.peak,
    };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  window.addEventListener("resize", draw);
  for (const phase of new Set(points.map((p) => p[PHASE])))
    $(".legend", section).append(make("li", {}, swatch(data.phase_colors[phase || ""]), phase || "other"));
  if (points.some((p) => p[HOST])) $(".legend", section).append(make("li", {}, "┄ host memory"));
  data.summits.forEach(([bytes, name, phase], i) => $(".summits", section).append(
    make("li", {}, `${i ? "then" : "peak"} ${size(bytes)} at ${name} (${phase || "other"})`)));
  draw();
}

/* The treemap: squarified tiles of the modules; a tile opens what is in it. */
const ARGUMENTS = ["parameters", "optimizer", "batch"];

function tree_of(buffers) {
  const root = { name: "all", bytes: 0, children: new Map(), category: null };
  for (const b of buffers) {
    const parts = b.path ? b.path.split("/").filter(Boolean) : [`(${b.category})`];
    if (b.path && ARGUMENTS.includes(b.category)) parts.unshift(b.category);
    parts.push(b.leaf);
    let here = root;
    here.bytes += b.bytes;
    for (const part of parts) {
      if (!here.children.has(part))
        here.children.set(part, { name: part, bytes: 0, children: new Map(), sizes: {} });
      here = here.children.get(part);
      here.bytes += b.bytes;
      here.sizes[b.category] = (here.sizes[b.category] || 0) + b.bytes;
    }
  }
  return root;
}

function squarify(items, x, y, w, h, place) {
  let rest = items.filter((item) => item.bytes > 0);
  while (rest.length) {
    const total = rest.reduce((sum, item) => sum + item.bytes, 0);
    const short = Math.min(w, h), scale = w * h / total;
    let row = [], best = Infinity;
    for (const item of rest) {
      const next = [...row, item];
      const area = next.reduce((sum, one) => sum + one.bytes * scale, 0);
      const side = area / short;
      const worst = Math.max(...next.map((one) => {
        const other = one.bytes * scale / side;
        return Math.max(side / other, other / side);
      }));
      if (worst > best) break;
      row = next; best = worst;
    }
    const area = row.reduce((sum, one) => sum + one.bytes * scale, 0);
    const side = Math.min(area / short, Math.max(w, h));
    let offset = 0;
    for (const one of row) {
      const length = side ? one.bytes * scale / side : 0;
      if (w >= h) place(one, x, y + offset, side, length);
      else place(one, x + offset, y, length, side);
      offset += length;
    }
    if (w >= h) { x += side; w -= side; } else { y += side; h -= side; }
    rest = rest.slice(row.length);
    if (w < 0.5 || h < 0.5) break;
  }
}

function treemap() {
  const section = $("#treemap");
  const buffers = data.buffers.rows.map(buffer).filter((b) => b.space === "device");
  if (!buffers.length) { section.hidden = true; return; }
  let path = [tree_of(buffers)];

  function only_child(node) {
    while (node.children.size === 1) {
      const [next] = node.children.values();
      if (!next.children.size) break;
      node = next;
    }
    return node;
  }

  /* Few modules say little: the largest are shown as what is in them. */
  function shown(node) {
    const items = [...only_child(node).children.values()];
    while (items.length < 12) {
      items.sort((a, b) => b.bytes - a.bytes);
      const i = items.findIndex((one) => one.children.size > 1);
      if (i < 0) break;
      const [opened] = items.splice(i, 1);
      for (const child of opened.children.values())
        items.push({ ...child, name: `${opened.name}/${child.name}` });
    }
    return items.sort((a, b) => b.bytes - a.bytes);
  }

  function draw(focus) {
    const here = path[path.length - 1], tiles = $(".tiles", section);
    tiles.replaceChildren();
    $("nav", section).replaceChildren(...path.map((node, i) => make("button", {
      onclick: () => { path = path.slice(0, i + 1); draw(true); },
    }, `${node.name} ${size(node.bytes)}`)));
    squarify(shown(here), 0, 0, tiles.clientWidth, tiles.clientHeight, (node, x, y, w, h) => {
      const [category] = Object.entries(node.sizes).sort((a, b) => b[1] - a[1])[0];
      const text = `${node.name} ${size(node.bytes)} (${percent(node.bytes, path[0].bytes)}, ${category})`;
      const tile = make("button", {
        title: text, "aria-label": text,
        style: `left:${x}px;top:${y}px;width:${w}px;height:${h}px;background:${data.colors[category]}`,
        onclick: () => { if (node.children.size) { path = [...path, node]; draw(true); } },
      });
      if (w > 40 && h > 18) tile.append(make("span", {}, node.name));
      if (w > 40 && h > 34) tile.append(make("span", {}, size(node.bytes)));
      if (w < 3 || h < 3) tile.tabIndex = -1;
      tiles.append(tile);
    });
    const button = $("button", tiles);
    if (focus && button) button.focus();
  }
  section.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && path.length > 1) { path = path.slice(0, -1); draw(true); }
  });
  window.addEventListener("resize", () => draw());
  draw();
}

function buffer(row) {
  const b = {};
  data.buffers.columns.forEach((column, i) => (b[column] = row[i]));
  b.path = b.module_path;
  b.leaf = b.label || b.primitive || b.instruction;
  return b;
}

/* A table whose header sorts and whose rows a text filters. */
function table(section, columns, rows, options) {
  const LIMIT = 200;
  let shown = LIMIT, order = options.order, down = true;
  const count = make("span", { class: "hint", "aria-live": "polite" });
  const filter = make("input", { type: "search", placeholder: "filter: name, line, type…", "aria-label": "filter rows", oninput: draw });
  const choose = make("select", { "aria-label": "category", onchange: draw },
    make("option", { value: "" }, "all categories"),
    ...[...new Set(rows.map((r) => r.category))].map((c) => make("option", {}, c)));
  const heads = columns.map((column) => {
    const head = make("th", { class: column.number ? "n" : "", scope: "col" }, make("button", {
      onclick: () => {
        down = order === column.key ? !down : Boolean(column.number);
        order = column.key;
        draw();
      },
    }, column.title));
    return head;
  });
  const body = make("tbody");
  const more = make("button", { onclick: () => { shown += 10 * LIMIT; draw(); } }, "show more");
  section.append(
    make("div", { class: "tools" }, filter, choose), count,
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body)), more);

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = rows.filter((row) => (!choose.value || row.category === choose.value)
      && words.every((word) => row.text.includes(word)));
    const column = columns.find((one) => one.key === order);
    const value = column.value || ((row) => row[column.key] ?? "");
    chosen.sort((a, b) => {
      const [p, q] = [value(a), value(b)];
      return (p < q ? -1 : p > q ? 1 : 0) * (down ? -1 : 1);
    });
    heads.forEach((head, i) => head.setAttribute("aria-sort",
      columns[i].key !== order ? "none" : down ? "descending" : "ascending"));
    body.replaceChildren(...chosen.slice(0, shown).map((row) => make("tr", {}, ...columns.map((one) =>
      make("td", { class: (one.number ? "n" : one.key === "name" ? "name" : "") + (one.tone ? " " + one.tone(row) : "") },
        ...one.cell(row))))));
    const sum = chosen.reduce((total, row) => total + row[options.sum], 0);
    count.textContent = `${chosen.length} of ${rows.length} rows, ${options.total(sum)}`;
    more.hidden = chosen.length <= shown;
  }
  draw();
}

const text_cell = (key) => (row) => [row[key] ? String(row[key]) : "–"];
const bytes_cell = (key) => (row) => [row[key] ? size(row[key]) : "–"];
const category_cell = (row) => [make("span", { class: "whole" }, swatch(data.colors[row.category]), row.category)];

function buffers() {
  const rows = data.buffers.rows.map(buffer);
  if (!rows.length) { $("#buffers").hidden = true; return; }
  for (const row of rows) {
    row.type = `${row.dtype}[${row.shape.join(",")}]` + (row.n_stacked > 1 ? ` ×${row.n_stacked}` : "");
    row.name = row.path && row.label ? `${row.path} [${row.label}]` : row.path || row.leaf;
    row.waste = row.bytes - row.unpadded_bytes;
    row.text = [row.name, row.category, row.phase, row.type, row.source, row.space, row.instruction,
      row.primitive].join(" ").toLowerCase();
  }
  table($("#buffers"), [
    { key: "bytes", title: "size", number: true, cell: bytes_cell("bytes") },
    { key: "waste", title: "padding", number: true, cell: bytes_cell("waste") },
    { key: "category", title: "category", cell: category_cell },
    { key: "phase", title: "pass", cell: text_cell("phase") },
    { key: "space", title: "memory", cell: text_cell("space") },
    { key: "type", title: "shape", cell: (row) => [make("code", {}, row.type)] },
    { key: "name", title: "value", cell: text_cell("name") },
    { key: "source", title: "line", cell: text_cell("source") },
    { key: "instruction", title: "HLO", cell: text_cell("instruction") },
  ], rows, { order: "bytes", sum: "bytes", total: size });
}

function changes() {
  if (!data.diff) return;
  $("#changes").hidden = false;
  $("#changes .summary").textContent = data.diff.summary;
  const columns = data.diff.columns;
  const rows = data.diff.rows.map((row) => Object.fromEntries(columns.map((c, i) => [c, row[i]])));
  for (const row of rows) row.text = [row.name, row.category, row.source].join(" ").toLowerCase();
  table($("#changes"), [
    { key: "change_bytes", title: "change", number: true, value: (row) => Math.abs(row.change_bytes),
      tone: (row) => (row.change_bytes < 0 ? "good" : "bad"), cell: (row) => [signed(row.change_bytes)] },
    { key: "before_bytes", title: "before", number: true, cell: bytes_cell("before_bytes") },
    { key: "after_bytes", title: "after", number: true, cell: bytes_cell("after_bytes") },
    { key: "to_host_bytes", title: "to host", number: true, cell: bytes_cell("to_host_bytes") },
    { key: "category", title: "category", cell: category_cell },
    { key: "name", title: "value", cell: text_cell("name") },
    { key: "source", title: "line", cell: text_cell("source") },
  ], rows, { order: "change_bytes", sum: "change_bytes", total: signed });
}

header();
categories();
timeline();
treemap();
changes();
buffers();
