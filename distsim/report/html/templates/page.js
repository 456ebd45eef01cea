"use strict";
(() => {
  const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));
  const one = (selector, from = document) => from.querySelector(selector);
  const LIGHT = { ink: "#1b1f24", line: "#d4d9df" }, DARK = { ink: "#e6e9ed", line: "#363c45" };
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const drawn = new Set();

  async function inflate(id) {
    const bytes = Uint8Array.from(atob(one("#" + id).textContent.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }
  let page = null;
  const data = () => (page ??= inflate("data").then(JSON.parse));
  let script = null;
  function plotly() {
    script ??= inflate("plotly").then((text) => {
      const element = document.createElement("script");
      element.textContent = text;
      document.head.append(element);
    });
    return script;
  }

  // ---- colours
  const colours = () => (!printing && prefersDark.matches ? DARK : LIGHT);
  function themed(layout) {
    const { ink, line } = colours();
    const axis = { gridcolor: line, linecolor: line, tickcolor: line };
    return {
      ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: "#8a8f98", activecolor: ink }, xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis },
    };
  }
  function recolour() {
    const { ink, line } = colours();
    for (const chart of drawn) {
      const change = { "font.color": ink };
      for (const axis of ["xaxis", "yaxis", "yaxis2"]) {
        if (chart.layout[axis]) for (const what of ["gridcolor", "linecolor", "tickcolor"]) change[axis + "." + what] = line;
      }
      window.Plotly.relayout(chart, change);
    }
  }
  prefersDark.addEventListener("change", recolour);
  addEventListener("beforeprint", () => { printing = true; recolour(); });
  addEventListener("afterprint", () => { printing = false; recolour(); });

  // ---- charts: those in sight, then, as nobody scrolls before they print, the others of what is shown
  async function draw(chart) {
    if (chart.dataset.begun) return;
    chart.dataset.begun = "1";
    const { figures, calls } = await data();
    const figure = figures[chart.dataset.figure];
    await plotly();
    const config = { responsive: true, displaylogo: false, displayModeBar: innerWidth < 700 || figure.layout.meta || figure.data[0].type === "icicle" ? false : "hover", scrollZoom: false, showTips: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud", "downloadJson"] };
    fit(chart, figure.layout);
    await window.Plotly.newPlot(chart, figure.data, themed(figure.layout), config);
    drawn.add(chart);
    chart.dataset.drawn = "1";
    chart.on("plotly_click", (event) => {
      const picked = event.points[0].customdata;
      if (typeof picked === "string") location.hash = picked;
      else if (Number.isInteger(picked)) show(chart, calls[chart.dataset.run], picked);
    });
    chart.addEventListener("keydown", (event) => byKeyboard(chart, calls[chart.dataset.run] || [], event));
  }
  // A graph is as wide as its names need: on a phone it is made smaller, with larger names, instead of cut.
  function fit(chart, layout) {
    const share = layout.meta ? chart.parentElement.clientWidth / layout.meta.width : 1;
    if (share >= 1) return;
    chart.style.zoom = Math.max(share, 0.5);
    for (const name of layout.annotations || []) name.font = { ...name.font, size: 1.35 * ((name.font || {}).size || 12) };
  }
  const sight = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target).catch(tooOld);
  }, { rootMargin: "600px" });
  const idle = window.requestIdleCallback || ((then) => setTimeout(then, 200));
  let below = Promise.resolve();
  const shown = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      below = below.then(() => new Promise(idle)).then(() => draw(entry.target)).catch(tooOld);
    }
  }, { rootMargin: "1000000px" });
  function tooOld(error) {
    const line = one("#old");
    line.hidden = false;
    line.textContent = "The charts could not be drawn (" + error + "): they need a browser of 2023 or later. The rest is here.";
  }

  // ---- the record of a call
  const seconds = (value) => value === null ? "never" :
    value < 1e-3 ? +(value * 1e6).toPrecision(6) + " us" : value < 1 ? +(value * 1e3).toPrecision(6) + " ms" : +value.toPrecision(6) + " s";
  function show(chart, calls, number) {
    const call = calls[number], panel = one(".record", chart.closest("section"));
    if (!call || !panel) return;
    chart.dataset.call = number;
    const list = document.createElement("dl");
    for (const [name, value] of Object.entries(call)) {
      if (value === null && !name.endsWith("_s")) continue;
      const term = document.createElement("dt"), said = document.createElement("dd");
      term.textContent = { issued_s: "called at", started_s: "all there at", completed_s: "ended at" }[name] || name;
      said.textContent = name.endsWith("_s") ? seconds(value) : Array.isArray(value) ? value.join("\n") : String(value);
      list.append(term, said);
    }
    panel.replaceChildren(list);
    panel.hidden = false;
    mark(chart, call);
  }
  function mark(chart, call) {
    const unit = /\((us|ms|s)\)/.exec(chart.layout.xaxis.title.text);
    const at = call.issued_s * (unit ? { us: 1e6, ms: 1e3, s: 1 }[unit[1]] : 1);
    window.Plotly.relayout(chart, { shapes: [{ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper",
      line: { width: 1.5, dash: "dot", color: colours().ink } }] });
  }
  function byKeyboard(chart, calls, event) {
    if (event.key === "+" || event.key === "-" || event.key === "0") {
      if (event.key === "0") window.Plotly.relayout(chart, { "xaxis.autorange": true });
      else {
        const [from, to] = chart.layout.xaxis.range, factor = event.key === "+" ? 0.25 : 1;
        const half = (to - from) * factor, middle = (from + to) / 2;
        window.Plotly.relayout(chart, { "xaxis.range": [middle - half, middle + half] });
      }
      event.preventDefault();
      return;
    }
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step || !calls.length) return;
    event.preventDefault();
    const here = calls[chart.dataset.call];
    if (!here) return show(chart, calls, 0);
    const sideways = event.key === "ArrowLeft" || event.key === "ArrowRight";
    const ranks = [...new Set(calls.map((call) => call.rank))].sort((a, b) => a - b);
    const rank = sideways ? here.rank : ranks[ranks.indexOf(here.rank) + step];
    const row = calls.map((call, number) => [call, number]).filter(([call]) => call.rank === rank)
      .sort((a, b) => a[0].issued_s - b[0].issued_s);
    if (!row.length) return;
    let next;
    if (sideways) next = row[row.findIndex(([call]) => call === here) + step];
    else next = row.reduce((best, other) => Math.abs(other[0].issued_s - here.issued_s) < Math.abs(best[0].issued_s - here.issued_s) ? other : best);
    if (next) show(chart, calls, next[1]);
  }

  // ---- tables
  for (const button of all("th button")) button.addEventListener("click", () => {
    const head = button.parentElement, body = one("tbody", head.closest("table"));
    const column = Array.from(head.parentElement.children).indexOf(head);
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => {
      const cell = row.children[column];
      return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
    };
    const rows = Array.from(body.rows).map((row) => [value(row), row]);
    rows.sort(([a], [b]) => typeof a === "number" && typeof b === "number" ? a - b
      : typeof a === "number" ? -1 : typeof b === "number" ? 1 : a.localeCompare(b, "en", { numeric: true }));
    if (down) rows.reverse();
    body.replaceChildren(...rows.map(([, row]) => row));
  });

  // ---- copy and download
  for (const button of all(".copy")) button.addEventListener("click", async () => {
    const code = one("code", button.parentElement);
    try { await navigator.clipboard.writeText(code.textContent); } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  one("#download").addEventListener("click", async () => {
    const { documents, overview } = await data();
    const shown = documents[location.hash.slice(1)] || overview || Object.values(documents)[0];
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(shown, null, 1) + "\n"], { type: "application/json" }));
    link.download = "report.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // ---- several runs: one at a time
  const overview = one("#overview");
  function turn() {
    if (!overview) return;
    const wanted = location.hash.slice(1);
    const run = all("article.run").find((article) => article.id === wanted || wanted.startsWith(article.id + "-"));
    for (const article of all("article")) article.classList.toggle("away", article !== (run || overview));
    if (run && run.id === wanted) scrollTo(0, 0);
  }
  addEventListener("hashchange", turn);
  turn();
  for (const chart of all(".chart")) { sight.observe(chart); shown.observe(chart); }
})();
