"use strict";
// What moves on the page: light and dark, the pointer's values on curves, and the list of attempts.
const byId = (id) => document.getElementById(id);
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text; // never HTML: transcripts are whatever a model wrote
  return element;
};

byId("theme").onclick = () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};

for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart);
  const [left, first, scale] = chart.x;
  const places = [...new Set(chart.series.flatMap(([, points]) => points.map(([x]) => x)))].sort((a, b) => a - b);
  if (!places.length) continue;
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", chart.plot[0]);
  cross.setAttribute("y2", chart.plot[1]);
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + (((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width - left) / scale;
    const x = places.reduce((best, place) => (Math.abs(place - at) < Math.abs(best - at) ? place : best));
    const place = left + (x - first) * scale;
    cross.setAttribute("x1", place);
    cross.setAttribute("x2", place);
    svg.append(cross);
    const lines = chart.series.flatMap(([name, points]) =>
      points.filter((point) => point[0] === x).map((point) => `${name} ${point[2]}`));
    const tip = byId("tip");
    tip.replaceChildren(make("div", "dim", `${chart.name} ${x}`), ...lines.map((line) => make("div", "", line)));
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  };
  svg.onpointerleave = () => {
    cross.remove();
    byId("tip").hidden = true;
  };
}

const data = JSON.parse(byId("data").textContent);
const attempts = data.attempts.flatMap((rows, file) => rows.map((row) => ({ ...row, file })));
let shown = [];
let chosen = -1;

const outcomeOf = (row) => (row.failure ? "failed" : row.solved === true ? "solved" : row.solved === false ? "unsolved" : "");
const tests = {
  "": () => true,
  solved: (row) => row.solved === true,
  unsolved: (row) => row.solved === false,
  error: (row) => row.turns.some((turn) => turn.error),
  recovered: (row) => row.solved === true && row.turns.some((turn) => turn.error),
  malformed: (row) => row.turns.some((turn) => (turn.tools || []).some(([, , problem]) => problem)),
  cut: (row) => row.cut,
  failed: (row) => Boolean(row.failure),
};
const textOf = (row) => `${row.task} ${row.label} ${row.id} ${row.turns.map((turn) => data.texts[turn.text] + JSON.stringify(turn.tools || "")).join(" ")}`.toLowerCase();

function filter() {
  const file = byId("file").value;
  const test = tests[byId("outcome").value];
  const words = byId("search").value.toLowerCase().trim();
  const [low, high] = [byId("low").value, byId("high").value];
  shown = attempts.filter((row) =>
    (file === "" || row.file === Number(file)) && test(row) &&
    (low === "" || (row.reward !== null && row.reward >= Number(low))) &&
    (high === "" || (row.reward !== null && row.reward <= Number(high))) &&
    (!words || textOf(row).includes(words)));
  const here = attempts.length === data.made ? `${data.made}` : `${attempts.length} on this page, of ${data.made} made`;
  byId("count").textContent = `${shown.length} of ${here}`;
  byId("list").replaceChildren(...shown.slice(0, 2000).map(listRow));
  show(shown.length ? 0 : -1);
}

function listRow(row, index) {
  const line = make("div", "row");
  line.setAttribute("role", "option");
  line.append(
    make("span", `mark ${outcomeOf(row)}`),
    make("span", "what", row.task),
    make("span", "", row.reward === null ? "–" : row.reward.toFixed(2)),
    make("span", "more", [data.files[row.file], `#${row.n}`, row.label, `${row.tokens} tokens`, row.failure].filter(Boolean).join(" · ")),
  );
  line.onclick = () => show(index);
  return line;
}

function show(index) {
  const rows = byId("list").children;
  if (rows[chosen]) rows[chosen].removeAttribute("aria-selected");
  chosen = index;
  const pane = byId("attempt");
  if (index < 0) {
    pane.replaceChildren(make("p", "dim", data.made ? "No attempt fits the filter." : "No attempts are stored yet."));
    return;
  }
  rows[index].setAttribute("aria-selected", "true");
  const row = shown[index];
  const facts = [data.files[row.file], `attempt ${row.n}`, row.label, `${row.tokens} sampled tokens`, `${row.seconds} s`];
  if (row.tries > 1) facts.push(`try ${row.tries}`);
  if (row.cut) facts.push("cut off by the token limit");
  if (row.used !== "trained" && row.used !== "evaluation") facts.push(`not trained on: ${row.used}`);
  pane.replaceChildren(make("h3", "", row.task), make("div", "dim", facts.filter(Boolean).join(" · ")), ...row.turns.map(turnView), verdict(row));
}

function turnView(turn) {
  const view = make("div", `turn ${turn.role}${turn.error ? " error" : ""}`);
  const head = make("header");
  head.append(make("span", "", [turn.role, turn.name].filter(Boolean).join(" ")));
  if (turn.error) head.append(make("span", "", `error: ${turn.error}`));
  if (turn.call) {
    const [tokens, cached, low, high] = turn.call;
    head.append(make("span", "dim", `${tokens} tokens, ${cached} of the prompt cached, weights ${low === high ? low : `${low} to ${high}`}`));
  }
  view.append(head);
  if (turn.tokens && byId("tokens").checked) {
    view.append(tokenView(turn));
    return view;
  }
  const text = data.texts[turn.text];
  if (text) view.append(make("pre", "", text));
  for (const [name, args, problem] of turn.tools || []) {
    const use = make("div", "use");
    use.append(make("b", "", name || "(no name)"), ` ${args}`);
    if (problem) use.append(make("span", "bad", `  malformed: ${problem}`));
    view.append(use);
  }
  return view;
}

function tokenView(turn) {
  const view = make("pre", "tokens");
  turn.tokens.forEach((token, index) => {
    const text = make("span", "", data.texts[token]);
    text.style.setProperty("--p", turn.percent[index] / 100);
    text.title = `${turn.percent[index]}%`;
    view.append(text);
  });
  return view;
}

function verdict(row) {
  const box = make("div", "verdict");
  if (row.failure) {
    box.append(make("b", "failed", "Failed by the system, in no baseline: "), row.failure);
    return box;
  }
  const outcome = outcomeOf(row);
  box.append(`Reward ${row.reward} `, make("b", outcome, { solved: "solved", unsolved: "not solved" }[outcome] || ""));
  const metrics = Object.entries(row.metrics).map(([name, value]) => `${name} ${value}`);
  box.append(make("div", "dim", metrics.join(" · ")));
  return box;
}

byId("list").onkeydown = (event) => {
  const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
  if (!by || !shown.length) return;
  event.preventDefault();
  show(Math.min(Math.max(chosen + by, 0), byId("list").children.length - 1));
  byId("list").children[chosen].scrollIntoView({ block: "nearest" });
};
byId("tokens").onchange = () => show(chosen);
byId("probabilities").hidden = !attempts.some((row) => row.turns.some((turn) => turn.tokens));
byId("file").append(new Option("every step", ""), ...data.files.map((name, index) => new Option(name, index)));
for (const id of ["file", "outcome", "low", "high", "search"]) byId(id).oninput = filter;
filter();
