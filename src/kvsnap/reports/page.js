// Values under the pointer, arrow keys inside a picture, and light or dark. The page says everything without this, too:
// pictures are drawn, and tables hold their numbers. No text from a file is ever read as markup here.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  const live = document.getElementById("live");

  const named = (word, name) => `${word} ${name}`;
  const text = (value) => (value === null ? "no value" : typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value);

  // A heat map and a picture of marks answer the same questions: how many rows, how many cells in one, where a cell is,
  // what it says, and which one is at a point.
  const gridOf = (data) => {
    const [left, top, width, height] = data.box;
    const across = data.columns.length;
    const [w, h] = [width / across, height / data.rows.length];
    return {
      rows: data.rows.length,
      cells: () => across,
      box: (r, c) => [left + c * w, top + r * h, w, h],
      say: (r, c) => `${named(data.y, data.rows[r])}, ${named(data.x, data.columns[c])}: ${text(data.values[r * across + c])}`,
      at: (x, y) => {
        const [r, c] = [Math.floor((y - top) / h), Math.floor((x - left) / w)];
        return r >= 0 && c >= 0 && r < data.rows.length && c < across ? [r, c] : null;
      },
    };
  };
  const gap = (from, size, at) => Math.max(from - at, 0, at - from - size);
  const marksOf = (data) => ({
    rows: data.rows.length,
    cells: (r) => data.rows[r].marks.length,
    box: (r, c) => data.rows[r].marks[c].slice(0, 4),
    say: (r, c) => data.rows[r].lead + data.rows[r].marks[c][4],
    at: (x, y) => {
      let best = null;
      let least = 40;
      data.rows.forEach((row, r) => row.marks.forEach((mark, c) => {
        const far = Math.hypot(gap(mark[0], mark[2], x), gap(mark[1], mark[3], y));
        if (far < least) [best, least] = [[r, c], far];
      }));
      return best;
    },
  });

  const start = (plot) => {
    const svg = plot.querySelector("svg");
    const source = document.getElementById(`${plot.id}-data`);
    if (!svg || !source) return;
    const data = JSON.parse(source.textContent);
    const cells = data.kind === "grid" ? gridOf(data) : marksOf(data);
    if (!cells.rows) return;
    const outlines = [0, 1].map(() => {
      const made = document.createElementNS(SVG, "rect");
      made.setAttribute("class", "cursor");
      made.style.display = "none";
      svg.append(made);
      return made;
    });
    let place = null;
    let byKey = false;

    const hide = () => {
      place = null;
      tip.hidden = true;
      outlines.forEach((o) => { o.style.display = "none"; });
    };
    const show = (r, c, point) => {
      place = [r, c];
      byKey = !point;
      let [x, y, w, h] = cells.box(r, c);
      const [px, py] = [Math.max(0, 9 - w) / 2, Math.max(0, 9 - h) / 2];
      [x, y, w, h] = [x - px, y - py, w + 2 * px, h + 2 * py];
      outlines.forEach((o) => {
        Object.entries({ x, y, width: w, height: h, rx: 1.5 }).forEach(([k, v]) => o.setAttribute(k, v));
        o.style.display = "";
      });
      tip.textContent = cells.say(r, c);
      tip.hidden = false;
      if (byKey) {
        live.textContent = tip.textContent;
        outlines[0].scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
      }
      stand(point);
    };
    const stand = (point) => {
      const box = outlines[0].getBoundingClientRect();
      const [atX, atY] = point || [box.left + box.width / 2, box.top];
      const size = tip.getBoundingClientRect();
      const left = Math.min(Math.max(8, atX + 14), document.documentElement.clientWidth - size.width - 8);
      const above = atY - size.height - 14;
      tip.style.left = `${Math.max(8, left)}px`;
      tip.style.top = `${above > 8 ? above : (point ? atY : box.bottom) + 20}px`;
    };
    const under = (event) => {
      const m = svg.getScreenCTM();
      if (!m) return null;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(m.inverse());
      return cells.at(at.x, at.y);
    };
    const pointed = (event) => {
      const found = under(event);
      if (found) show(found[0], found[1], [event.clientX, event.clientY]);
      else if (document.activeElement !== plot) hide();
    };
    const moved = (key, r, c, ctrl) => {
      const last = (row) => cells.cells(row) - 1;
      const to = {
        ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1], ArrowUp: [r - 1, c], ArrowDown: [r + 1, c],
        PageUp: [r, c - 10], PageDown: [r, c + 10], Home: [ctrl ? 0 : r, 0], End: [ctrl ? cells.rows - 1 : r, Infinity],
      }[key];
      const row = Math.min(Math.max(to[0], 0), cells.rows - 1);
      return [row, Math.min(Math.max(to[1], 0), last(row))];
    };

    plot.tabIndex = 0;
    plot.setAttribute("role", "application");
    plot.setAttribute("aria-roledescription", "picture with values");
    plot.setAttribute("aria-describedby", "keys");
    plot.addEventListener("pointermove", pointed);
    plot.addEventListener("pointerdown", pointed);
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        hide();
        live.textContent = "";
      } else if (/^(Arrow(Left|Right|Up|Down)|Home|End|PageUp|PageDown)$/.test(event.key) && !event.altKey && !event.metaKey) {
        const next = place ? moved(event.key, place[0], place[1], event.ctrlKey) : [0, 0];
        event.preventDefault();
        show(next[0], next[1], null);
      }
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && place) hide(); });
    const scrolled = () => {
      if (place && byKey) stand(null);
      else if (place) tip.hidden = true;
    };
    window.addEventListener("scroll", scrolled, { passive: true });
    plot.addEventListener("scroll", scrolled, { passive: true });
  };

  document.querySelectorAll(".plot").forEach(start);

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.querySelector(".theme");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const told = () => { button.textContent = isDark() ? "Light page" : "Dark page"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; told(); });
  dark.addEventListener("change", told);
  told();
})();
