"use strict";
// Without this script the page shows everything; with it tables sort, curves are singled out, and the scatter switches.

const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// ---- tables: a click sorts, a second one turns the order; what has no value stays below ----
for (const table of all("table.sortable")) {
  const heads = all("thead th", table);
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const falls = head.getAttribute("aria-sort") === "none"
      ? !head.classList.contains("text")
      : head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const body = table.tBodies[0];
    const text = (row) => row.cells[column].dataset.value ?? "";
    const order = (a, b) => {
      const [x, y] = [text(a), text(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const by = head.classList.contains("text") ? x.localeCompare(y) : Number(x) - Number(y);
      return falls ? -by : by;
    };
    body.append(...[...body.rows].sort(order));
  }));
}

// ---- curves: one method in front of the others ----
const single = (label) => {
  for (const chart of all(".main-chart")) {
    chart.classList.toggle("single", label !== null);
    for (const series of all("g.series", chart)) series.classList.toggle("front", series.dataset.label === label);
  }
};
const names = all(".legend button");
const pressed = () => names.find((name) => name.getAttribute("aria-pressed") === "true")?.dataset.label ?? null;
for (const name of names) {
  name.addEventListener("click", () => {
    const on = name.getAttribute("aria-pressed") !== "true";
    names.forEach((other) => other.setAttribute("aria-pressed", String(on && other === name)));
    single(pressed());
  });
  name.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") single(name.dataset.label); });
  name.addEventListener("pointerleave", () => single(pressed()));
}

// ---- films of one seed: from the beginning, together; a click on one stops it. Controls would cover half of it ----
for (const strip of all(".strip")) {
  for (const video of all("video", strip)) {
    video.removeAttribute("controls");
    video.addEventListener("click", () => (video.paused ? video.play() : video.pause()));
  }
  strip.querySelector("button.play").addEventListener("click", () => {
    for (const video of all("video", strip)) {
      video.currentTime = 0;
      video.play();
    }
  });
}

// ---- the scatter: other coordinates, another run ----
const field = document.getElementById("field");
if (field) {
  const { coordinates, outcomes, tallies } = JSON.parse(field.textContent);
  const [across, up, run] = ["axis-x", "axis-y", "run"].map((id) => document.getElementById(id));
  const svg = (name, attributes, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };
  const axes = (x, y) => [
    ...y.ticks.flatMap(([at, label]) => [
      svg("line", { class: "grid", x1: 0, x2: "100%", y1: `${100 - at}%`, y2: `${100 - at}%` }),
      svg("text", { class: "tick y", x: -7, y: `${100 - at}%`, dy: ".34em" }, label),
    ]),
    ...x.ticks.map(([at, label]) => svg("text", { class: "tick x", x: `${at}%`, y: "100%", dy: "1.6em" }, label)),
  ];
  const show = (panel, outcome) => {
    const [x, y] = [coordinates[across.value], coordinates[up.value]];
    const points = all("use", panel.querySelector(".points"));
    for (const point of points) {
      const i = Number(point.dataset.i);
      const kind = outcome[i] ? "good" : "bad";
      point.setAttribute("class", kind);
      point.setAttribute("href", `#${kind}`);
      point.setAttribute("x", `${x.places[i]}%`);
      point.setAttribute("y", `${100 - y.places[i]}%`);
    }
    // Failures are drawn last, so that none hides behind a success.
    points.filter((point) => point.getAttribute("class") === "bad").forEach((point) => point.parentNode.append(point));
    panel.querySelector(".axes").replaceChildren(...axes(x, y));
  };
  const update = () => {
    show(document.getElementById("panel-base"), outcomes.base);
    show(document.getElementById("panel-run"), outcomes[run.value]);
    document.querySelector("#panel-run figcaption").textContent = run.value;
    document.getElementById("tally").textContent = tallies[run.value];
  };
  for (const choice of [across, up, run]) choice.addEventListener("change", update);
}
