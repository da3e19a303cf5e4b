// The page of one run. The state comes as server-sent events; details are requested when the user opens them.
// Data is only ever put into text nodes and attributes, never parsed as HTML.

const $ = (id) => document.getElementById(id);
const key = new URLSearchParams(location.search).get("key") || sessionStorage.getItem("key") || "";
if (key) {
  sessionStorage.setItem("key", key);
  history.replaceState(null, "", location.pathname + location.hash);
}

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// sets the children of an element; null and undefined are left out, as replaceChildren would write them as words
const fill = (place, ...children) => place.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));

function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number.isInteger(value) ? String(value) : Number(value).toPrecision(digits);
const duration = (seconds) => {
  seconds = Math.max(0, Math.round(seconds));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
};
const clock = (time) => new Date(time * 1000).toLocaleTimeString();
const moment = (time) => (new Date(time * 1000).toDateString() === new Date().toDateString() ? clock(time) : new Date(time * 1000).toLocaleString());
const PALETTE = ["#3b7ddd", "#e07b39", "#2f9e69", "#b14fc5", "#c2302b", "#7a7f8c"];

async function ask(path, options = {}) {
  const response = await fetch(path, options);
  const body = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw new Error(body.error || `status ${response.status}`);
  return body;
}

const act = (path, body = {}) =>
  ask(path, { method: "POST", headers: { "X-TMQ-Key": key, "Content-Type": "application/json" }, body: JSON.stringify(body) });

function fail(place, error) {
  place.replaceChildren(h("p", { class: "empty bad" }, error.message));
}

// -- hints next to the pointer

let tip = null;
function showTip(event, text) {
  hideTip();
  tip = h("div", { class: "tip" }, text);
  document.body.append(tip);
  const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}
function hideTip() {
  tip?.remove();
  tip = null;
}

// -- the state of the run

let state = null;
let section = null;

function connect() {
  const events = new EventSource("events");
  events.addEventListener("state", (event) => {
    state = JSON.parse(event.data);
    $("connection").className = state.connection ? "bad" : "";
    $("connection").textContent = state.connection ? `broker: ${state.connection}` : state.over ? "this run is over" : state.live ? "live" : "from the run's folder";
    drawHead();
    section?.update?.();
  });
  events.onerror = () => {
    samples.outdated = true; // the next server may be another process, which numbers the samples anew
    $("connection").className = "bad";
    $("connection").textContent = "the page's server does not answer; it is tried again";
  };
}

function drawHead() {
  document.title = `${state.run} · ${state.step}/${state.total ?? "?"}`;
  $("run").textContent = state.run;
  $("progress").textContent = `step ${state.step} of ${state.total ?? "?"}`;
  $("figures").replaceChildren(...state.figures.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
  drawFinding();
}

function drawFinding() {
  const place = $("finding");
  const found = state.finding;
  const shown = found && found.state !== "moving" ? found : state.bottleneck || found;
  place.hidden = !shown || !shown.sentence;
  if (place.hidden) return;
  place.className = found && found.state !== "moving" ? found.state : "";
  const evidence = found.state !== "moving" && shown.evidence?.length ? h("ul", {}, shown.evidence.map((line) => h("li", {}, line))) : null;
  fill(place, h("b", {}, shown.sentence), shown.lever ? h("div", {}, `What to do: ${shown.lever}`) : null, evidence);
}

// -- flow

const flow = {
  title: "Flow",
  draw(main) {
    this.boxes = h("div", { class: "flow" });
    this.agents = h("div", { class: "card wide" });
    this.failures = h("div", {});
    this.news = h("div", { class: "card news" });
    main.append(this.boxes, h("h2", {}, "Agents"), this.agents, this.failures, h("h2", {}, "News"), this.news);
  },
  update() {
    const byRole = Object.fromEntries(state.flow.nodes.map((node) => [node.role, node]));
    const arrow = (from, to) => state.flow.arrows.find((one) => one.from === from && one.to === to);
    const parts = [];
    for (const [role, to] of [["explorer", "runner"], ["runner", "operator"], ["operator", "trainer"], ["trainer", null]]) {
      if (byRole[role]) parts.push(this.node(byRole[role]));
      if (to && byRole[role] && byRole[to]) parts.push(this.arrow(arrow(role, to)));
    }
    const engine = byRole.engine && arrow("runner", "engine");
    if (engine) parts.push(h("div", { class: "arrow" }, `weights ${state.sync.version}`), this.node(byRole.engine, `${engine.rate.toFixed(0)} tokens/s`));
    if (byRole.gateway) parts.push(this.node(byRole.gateway, state.sessions ? `${state.sessions.open ?? 0} sessions open` : ""));
    if (!parts.length) parts.push(h("p", { class: "empty" }, state.live ? "No agent of this run has sent a heartbeat yet." : "This run does not run now: samples and curves are those of its folder."));
    this.boxes.replaceChildren(...parts);
    this.agents.replaceChildren(agentTable());
    const failures = [...state.failures, ...state.problems];
    this.failures.replaceChildren(...(failures.length ? [h("h2", {}, "Failures"), ...failures.map((line) => h("p", { class: "bad" }, line))] : []));
    const lines = [...state.news].reverse().slice(0, 60);
    this.news.replaceChildren(...(lines.length ? lines.map(([at, text]) => h("p", {}, h("span", at === null ? { class: "dim", title: "before this page was opened" } : { class: "dim" }, `${at === null ? "earlier" : moment(at)} `), text)) : [h("p", { class: "dim" }, "Nothing yet.")]));
  },
  node(node, more = "") {
    const limit = state.bottleneck?.stage === node.role;
    const kind = node.alive === 0 ? "none" : limit ? "limit" : "";
    const busy = node.busy === null ? null : h("div", { class: "busy", title: `busy ${(100 * node.busy).toFixed(0)} % of the last minute` }, h("i", { style: { width: `${100 * node.busy}%` } }));
    return h("div", { class: `card node ${kind}` }, h("h3", {}, node.role, limit ? h("span", { class: "warn" }, " limits") : null), h("div", {}, `${node.alive} of ${node.count} alive`), h("div", { class: "dim" }, node.item), more ? h("div", { class: "dim" }, more) : null, node.busy === null ? null : h("div", { class: "dim" }, `busy ${(100 * node.busy).toFixed(0)} %`), busy);
  },
  arrow(one) {
    const depth = one.depth === null || one.depth === undefined ? "" : `${one.depth} waiting`;
    return h("div", { class: "arrow" }, `${one.rate.toFixed(1)} ${one.of}/s`, h("br"), depth);
  },
};

function agentTable() {
  const rows = state.agents.map((agent) =>
    h("tr", { class: agent.alive ? "" : agent.state === "silent" ? "bad" : "dim" }, h("td", {}, agent.id), h("td", {}, agent.state), h("td", {}, agent.waits_for || ""), h("td", { class: "number" }, agent.waits_for ? duration(agent.waits_seconds) : ""), state.operate ? h("td", {}, commands(agent)) : null),
  );
  if (!rows.length) return h("p", { class: "dim" }, "None.");
  return h("table", {}, h("thead", {}, h("tr", {}, ["agent", "state", "waits for", "since", ...(state.operate ? [""] : [])].map((name) => h("th", {}, name)))), h("tbody", {}, rows));
}

function commands(agent) {
  if (!agent.alive || agent.role === "engine") return []; // an engine is hosted by its explorer
  return ["restart", "drain"].map((verb) =>
    h("button", { onclick: () => confirm(`${verb} ${agent.id}?`) && act(`api/agents/${encodeURIComponent(agent.id)}/${verb}`).catch((error) => alert(error.message)) }, verb),
  );
}

// -- timeline

const STATES = { working: "--work", idle: "--idle", holding: "--hold", starting: "--accent", paused: "--hold", draining: "--accent", silent: "--down", finished: "--line", gone: "--line" };
const ACTIVITIES = { explore: PALETTE[0], eval: PALETTE[3], operators: PALETTE[5], train: PALETTE[2], skip: PALETTE[4], sync: PALETTE[1], save: "#8a6d3b" };
const LANE = 34;
const LABEL = 92;

const timeline = {
  title: "Timeline",
  seconds: 120,
  draw(main) {
    this.canvas = h("canvas", { class: "lanes", "aria-label": "what each agent did and waited for" });
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    const ranges = [60, 120, 300, 900, 3600].map((seconds) =>
      h("button", { "aria-pressed": String(seconds === this.seconds), onclick: (event) => {
        this.seconds = seconds;
        for (const one of event.target.parentElement.children) one.setAttribute("aria-pressed", String(one === event.target));
        this.load();
      } }, seconds < 3600 ? `${seconds / 60} min` : "1 h"),
    );
    const legend = [...Object.entries(STATES).slice(0, 7).filter(([name]) => !["paused", "draining"].includes(name)).map(([name, color]) => [name, `var(${color})`]), ...Object.entries(ACTIVITIES)];
    main.append(h("div", { class: "bar" }, ...ranges), h("div", { class: "card" }, this.canvas), h("p", { class: "legend" }, legend.map(([name, color]) => h("span", {}, h("i", { style: { background: color } }), name))));
    this.at = 0;
    this.load();
  },
  update() {
    if (performance.now() - this.at > (this.seconds > 300 ? 5000 : 1500)) this.load();
  },
  async load() {
    this.at = performance.now();
    try {
      this.data = await ask(`api/timeline?seconds=${this.seconds}`);
      if (section === this) this.paint();
    } catch (error) {
      console.info(error.message);
    }
  },
  lanes() {
    const known = new Map(this.data.lanes.map((lane) => [lane.agent, { ...lane, spans: [] }]));
    for (const span of this.data.spans) {
      if (!known.has(span.agent)) known.set(span.agent, { agent: span.agent, role: span.role, intervals: [], spans: [] });
      known.get(span.agent).spans.push(span);
    }
    return [...known.values()];
  },
  paint() {
    const { canvas, data } = this;
    this.shown = this.lanes();
    const width = canvas.clientWidth || 600;
    const height = Math.max(1, this.shown.length) * LANE + 22;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const draw = canvas.getContext("2d");
    draw.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const color = (name) => (name.startsWith("--") ? style.getPropertyValue(name).trim() : name);
    const place = (time) => LABEL + ((time - data.start) / (data.end - data.start)) * (width - LABEL);
    draw.font = "12px system-ui, sans-serif";
    this.shown.forEach((lane, row) => {
      const top = row * LANE;
      draw.fillStyle = color("--ink");
      draw.fillText(lane.agent.length > 14 ? `${lane.agent.slice(0, 13)}…` : lane.agent, 0, top + 20);
      for (const [start, end, kind] of lane.intervals) {
        draw.fillStyle = color(STATES[kind] || "--idle");
        draw.fillRect(place(start), top + 4, Math.max(1, place(end) - place(start)), 12);
      }
      for (const span of lane.spans) {
        draw.fillStyle = ACTIVITIES[span.what] || PALETTE[5];
        const left = Math.max(LABEL, place(span.start));
        draw.fillRect(left, top + 18, Math.max(1, place(span.end) - left), 10);
      }
    });
    draw.fillStyle = color("--dim");
    for (let part = 0; part <= 4; part++) {
      const time = data.start + (part / 4) * (data.end - data.start);
      draw.textAlign = part === 4 ? "right" : part === 0 ? "left" : "center";
      draw.fillText(clock(time), place(time), height - 5);
    }
    draw.textAlign = "left";
  },
  hover(event) {
    if (!this.shown) return;
    const box = this.canvas.getBoundingClientRect();
    const lane = this.shown[Math.floor((event.clientY - box.top) / LANE)];
    const time = this.data.start + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * (this.data.end - this.data.start);
    if (!lane || event.clientX - box.left < LABEL) return hideTip();
    const lower = (event.clientY - box.top) % LANE > 17;
    const span = lower && lane.spans.find((one) => one.start <= time && time <= one.end);
    if (span) {
      const phases = Object.entries(span.phases).map(([name, value]) => `${name} ${value.toFixed(0)} ms`).join(", ");
      return showTip(event, `${span.what} ${span.step}: ${duration(span.end - span.start)}${phases ? `\n${phases}` : ""}`);
    }
    const found = lane.intervals.find(([start, end]) => start <= time && time <= end);
    if (!found) return hideTip();
    showTip(event, `${lane.agent} ${found[2]} for ${duration(found[1] - found[0])}${found[3] ? `\nwaits for ${found[3]}` : ""}`);
  },
};

// -- samples

const SHOWN = [
  ["step", "4rem"], ["batch", "4rem"], ["task", "5rem"], ["run", "3rem"], ["reward", "5rem"], ["advantage", "5.5rem"], ["response", "5rem"], ["staleness", "5rem"], ["logprob", "5rem"], ["workflow", "9rem"], ["text", "minmax(12rem, 1fr)"],
];
const NUMBERS = new Set(["step", "run", "reward", "advantage", "response", "staleness", "logprob"]);
const ROW = 28;
const COLOURS = ["logprob", "advantage", "version", "mask"];
const WINDOW = 2000;

const samples = {
  title: "Samples",
  rows: [],
  last: 0,
  seen: -1,
  outdated: false,
  sort: ["number", -1],
  filter: { text: "", reward: "", workflow: "", kind: "" },
  colour: "logprob",
  uid: null,
  draw(main) {
    this.list = h("div", { class: "card list", tabindex: "0", role: "listbox", "aria-label": "samples" }, h("p", { class: "empty" }, "Reading samples…"));
    this.list.addEventListener("scroll", () => this.paint());
    this.detail = h("div", { class: "card detail", hidden: true });
    this.count = h("span", { class: "dim" });
    this.search = h("input", { type: "search", placeholder: "text or task", value: this.filter.text, oninput: (event) => this.set("text", event.target.value), "aria-label": "text or task" });
    this.workflows = h("select", { "aria-label": "workflow", onchange: (event) => this.set("workflow", event.target.value) }, h("option", { value: "" }, "all workflows"));
    const rewards = h("input", { placeholder: "reward, e.g. >0.5", size: 14, value: this.filter.reward, oninput: (event) => this.set("reward", event.target.value), "aria-label": "reward" });
    const kinds = h("select", { "aria-label": "kind", onchange: (event) => this.set("kind", event.target.value) }, [["", "all"], ["spread", "groups with spread"], ["flat", "groups without spread"], ["truncated", "truncated"], ["stale", "stale"], ["surprising", "least likely first"]].map(([value, text]) => h("option", { value, selected: value === this.filter.kind }, text)));
    this.split = h("div", { class: "samples" }, this.list, this.detail);
    main.append(h("div", { class: "bar" }, this.search, rewards, this.workflows, kinds, this.count), this.split);
    this.load(true);
    if (this.uid) this.open(this.uid);
  },
  set(name, value) {
    this.filter[name] = value;
    if (name === "kind" && value === "surprising") this.sort = ["logprob", 1];
    this.list.scrollTop = 0;
    this.choose();
  },
  update() {
    if ((state.samples !== this.seen || this.outdated) && !this.loading) this.load();
  },
  async load(anew = false) {
    this.loading = true;
    try {
      const all = this.outdated || (anew && !this.rows.length);
      const found = await ask(`api/samples?after=${all ? 0 : this.last}`);
      if (all) [this.rows, this.outdated] = [[], false];
      this.columns = Object.fromEntries(found.columns.map((name, place) => [name, place]));
      this.last = found.last;
      this.seen = found.seen;
      this.rows = [...this.rows, ...found.rows].slice(-10000);
      if (section === this) this.choose();
    } catch (error) {
      fail(this.list, error);
    } finally {
      this.loading = false;
    }
  },
  of(row, name) {
    return row[this.columns[name]];
  },
  groupOf(row) {
    return `${this.of(row, "batch")}/${this.of(row, "task")}`;
  },
  choose() {
    if (!this.columns) return;
    const { text, reward, workflow, kind } = this.filter;
    const names = [...new Set(this.rows.map((row) => this.of(row, "workflow")).filter(Boolean))];
    if (this.workflows.children.length !== names.length + 1)
      this.workflows.replaceChildren(h("option", { value: "" }, "all workflows"), ...names.map((name) => h("option", { value: name, selected: name === workflow }, name)));
    const spread = new Map();
    for (const row of this.rows) {
      const known = spread.get(this.groupOf(row)) || [Infinity, -Infinity];
      const value = this.of(row, "reward") ?? 0;
      spread.set(this.groupOf(row), [Math.min(known[0], value), Math.max(known[1], value)]);
    }
    const flat = (row) => { const [least, most] = spread.get(this.groupOf(row)); return most - least < 1e-9; };
    const fits = comparison(reward);
    const wanted = text.toLowerCase();
    this.chosen = this.rows.filter((row) =>
      (!wanted || `${this.of(row, "text")} ${this.groupOf(row)}`.toLowerCase().includes(wanted)) && fits(this.of(row, "reward")) && (!workflow || this.of(row, "workflow") === workflow) &&
      (kind === "spread" ? !flat(row) : kind === "flat" ? flat(row) : kind === "truncated" ? this.of(row, "truncated") : kind === "stale" ? this.of(row, "staleness") > 0 : true));
    const [column, direction] = this.sort;
    const place = this.columns[column];
    this.chosen.sort((a, b) => direction * compare(a[place], b[place]));
    this.count.textContent = `${this.chosen.length} of ${this.rows.length}`;
    this.header ??= null;
    this.header = h("div", { class: "head" }, SHOWN.map(([name]) => h("span", { class: NUMBERS.has(name) ? "number" : "" }, h("button", { onclick: () => { this.sort = [name, this.sort[0] === name ? -this.sort[1] : NUMBERS.has(name) ? -1 : 1]; this.choose(); } }, name + (column === name ? (direction < 0 ? " ↓" : " ↑") : "")))));
    this.sized = h("div", { class: "sized", style: { height: `${this.chosen.length * ROW}px` } });
    this.list.style.setProperty("--columns", SHOWN.map(([, width]) => width).join(" "));
    this.list.replaceChildren(this.header, this.chosen.length ? this.sized : h("p", { class: "empty" }, this.rows.length ? "No sample fits." : "No sample has been trained on yet."));
    this.paint();
  },
  paint() {
    if (!this.chosen?.length) return;
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 8);
    const last = Math.min(this.chosen.length, first + Math.ceil(this.list.clientHeight / ROW) + 16);
    const rows = [];
    for (let place = first; place < last; place++) {
      const row = this.chosen[place];
      const uid = this.of(row, "uid");
      rows.push(h("div", { class: "row", role: "option", "aria-selected": String(uid === this.uid), style: { top: `${place * ROW}px` }, onclick: () => this.open(uid) }, SHOWN.map(([name]) => {
        const value = this.of(row, name);
        return h("span", { class: NUMBERS.has(name) ? "number" : "" }, NUMBERS.has(name) ? number(value) : String(value ?? "–"));
      })));
    }
    this.sized.replaceChildren(...rows);
  },
  move(by) {
    if (!this.chosen?.length) return;
    const now = this.chosen.findIndex((row) => this.of(row, "uid") === this.uid);
    const next = Math.min(this.chosen.length - 1, Math.max(0, now + by));
    this.list.scrollTop = Math.max(0, next * ROW - this.list.clientHeight / 2);
    this.open(this.of(this.chosen[next], "uid"));
  },
  close() {
    this.uid = null;
    this.detail.hidden = true;
    this.split.classList.remove("open");
    history.replaceState(null, "", "#samples");
    this.paint();
  },
  async open(uid) {
    this.uid = uid;
    history.replaceState(null, "", `#samples/${encodeURIComponent(uid)}`);
    this.split.classList.add("open");
    this.detail.hidden = false;
    this.paint();
    try {
      const found = await ask(`api/sample?uid=${encodeURIComponent(uid)}`);
      if (this.uid === uid) this.show(found);
    } catch (error) {
      fail(this.detail, error);
    }
  },
  show(one) {
    const eid = one.eid || {};
    const facts = { batch: eid.batch, task: eid.task, run: eid.run, turn: eid.step, reward: number(one.reward), weights: (one.versions || []).map(([from, generation, step]) => `${generation}.${step}${from ? ` from token ${from}` : ""}`).join(", "), temperature: one.temperature, truncated: one.truncate_status, ...one.metrics };
    const members = this.columns ? this.rows.filter((row) => this.groupOf(row) === `${eid.batch}/${eid.task}`) : [];
    const most = Math.max(1e-9, ...members.map((row) => Math.abs(this.of(row, "reward") ?? 0)));
    const colours = h("div", { class: "bar" }, "colour by", COLOURS.map((name) => h("button", { "aria-pressed": String(name === this.colour), onclick: () => { this.colour = name; this.show(one); } }, name)), h("button", { onclick: () => this.close() }, "close"));
    fill(
      this.detail,
      colours,
      h("dl", { class: "facts" }, Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : String(value))))),
      members.length > 1 ? h("div", {}, h("h3", {}, "Group: reward and advantage"), h("div", { class: "group" }, members.map((row) => h("button", { "aria-pressed": String(this.of(row, "uid") === this.uid), title: this.of(row, "text"), onclick: () => this.open(this.of(row, "uid")) }, `${number(this.of(row, "reward"))} · ${number(this.of(row, "advantage"), 2)}`, h("i", { style: { width: `${(100 * Math.abs(this.of(row, "reward") ?? 0)) / most}%` } }))))) : null,
      conversation(one),
      expected(one.info?.truth),
      h("h3", {}, "Tokens"),
      tokens(one, this.colour),
      Object.keys(one.info || {}).length ? h("details", {}, h("summary", {}, "info"), h("pre", {}, JSON.stringify(one.info, null, 1))) : null,
    );
  },
};

function comparison(text) {
  const found = /^\s*(>=|<=|>|<|=)?\s*(-?[\d.]+)\s*$/.exec(text);
  if (!found) return () => true;
  const wanted = Number(found[2]);
  const of = { ">": (x) => x > wanted, "<": (x) => x < wanted, ">=": (x) => x >= wanted, "<=": (x) => x <= wanted, "=": (x) => Math.abs(x - wanted) < 1e-6 }[found[1] || "="];
  return (value) => value !== null && of(value);
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
}

function conversation(one) {
  const shown = (role, text) => h("div", { class: "message" }, h("b", {}, role), "\n", text);
  if (one.messages?.length)
    return one.messages.map((message) => shown(message.role || "?", [typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content) : "", message.tool_calls ? `calls ${JSON.stringify(message.tool_calls)}` : ""].filter(Boolean).join("\n")));
  return [one.prompt_text ? shown("asked", one.prompt_text) : null, one.response_text !== null && one.response_text !== undefined ? shown("answered", one.response_text) : null];
}

const expected = (truth) => (truth === null || truth === undefined ? null : h("div", { class: "message expected" }, h("b", {}, "expected"), "\n", String(truth)));

function tokens(one, colour) {
  const place = h("div", { class: "tokens" });
  const start = one.prompt_length || 0;
  const mask = one.action_mask;
  const versions = one.versions || [];
  const steps = [...new Set(versions.map(([, generation, step]) => `${generation}.${step}`))];
  const values = (colour === "advantage" ? one.advantages : one.logprobs) || [];
  const most = Math.max(1e-6, ...values.map(Math.abs).filter(Number.isFinite).slice(0, 100000));
  const versionAt = (token) => versions.filter(([from]) => from <= token).at(-1);
  const tint = (token) => {
    if (colour === "mask") return mask ? (mask[token] ? "#2f9e6940" : "") : "#2f9e6940";
    if (colour === "version") { const version = versionAt(token); return version ? `${PALETTE[steps.indexOf(`${version[1]}.${version[2]}`) % PALETTE.length]}44` : ""; }
    const value = values[token];
    if (value === null || value === undefined) return "";
    const strength = Math.round(200 * Math.min(1, colour === "logprob" ? -value / Math.max(4, most) : Math.abs(value) / most)).toString(16).padStart(2, "0");
    return (colour === "advantage" && value > 0 ? "#2f9e69" : colour === "advantage" ? "#c2302b" : "#e07b39") + strength;
  };
  let shown = 0;
  const more = () => {
    const until = Math.min(one.tokens.length, shown + WINDOW);
    const added = [];
    for (; shown < until; shown++) {
      const token = shown - start;
      const text = one.token_texts?.[shown] ?? `⟨${one.tokens[shown]}⟩`;
      const element = h("span", { class: token < 0 ? "prompt" : mask && !mask[token] ? "out" : "" }, text);
      if (token >= 0) {
        element.style.background = tint(token);
        if (token > 0 && versions.some(([from]) => from === token)) element.classList.add("mark");
        const version = versionAt(token);
        const facts = [`token ${token}, id ${one.tokens[shown]}: ${JSON.stringify(text)}`, one.logprobs ? `logprob ${number(one.logprobs[token], 4)}` : "", one.advantages ? `advantage ${number(one.advantages[token], 4)}` : "", version ? `weights ${version[1]}.${version[2]}` : "", mask ? (mask[token] ? "trained on" : "not trained on") : ""].filter(Boolean).join("\n");
        element.addEventListener("pointerenter", (event) => showTip(event, facts));
        element.addEventListener("pointerleave", hideTip);
      }
      added.push(element);
    }
    button.remove();
    place.append(...added);
    if (shown < one.tokens.length) place.append(button);
  };
  const button = h("button", { onclick: () => more() }, "further tokens");
  more();
  return place;
}

// -- learning

const learning = {
  title: "Learning",
  draw(main) {
    this.charts = h("div", { class: "charts" });
    this.names = h("datalist", { id: "metrics" });
    this.chosen = h("div", { class: "charts" });
    const field = h("input", { type: "search", list: "metrics", placeholder: "any metric, e.g. time/batch", "aria-label": "metric", onchange: (event) => this.add(event.target.value) });
    main.append(h("div", { class: "bar" }, field, this.names), this.chosen, this.charts);
    this.changes = -1;
    this.at = 0;
    this.load();
  },
  update() {
    if (state.curves !== this.changes && performance.now() - this.at > 4000) this.load();
  },
  async load() {
    this.at = performance.now();
    this.changes = state?.curves ?? -1;
    try {
      const found = await ask("api/curves");
      if (section !== this) return;
      this.names.replaceChildren(...found.names.map((name) => h("option", { value: name })));
      const beside = (title) => Object.entries(found.others).flatMap(([run, pictures]) => pictures.filter((one) => one.title === title).map((one) => [run, one.curves]));
      this.charts.replaceChildren(...(found.pictures.length ? found.pictures.map((one) => chart(one.title, one.about, one.curves, beside(one.title))) : [h("p", { class: "empty" }, "No metric has been written yet.")]));
    } catch (error) {
      fail(this.charts, error);
    }
  },
  async add(name) {
    if (!name) return;
    const found = await ask(`api/curve?name=${encodeURIComponent(name)}`);
    this.chosen.prepend(found.points.length ? chart(name, "", { [name]: found.points }, []) : h("p", { class: "dim" }, `${name} is not known.`));
  },
};

function chart(title, about, curves, beside) {
  const [width, height, left, bottom, top] = [360, 170, 44, 18, 8];
  const lines = [...Object.entries(curves).map(([name, points], n) => ({ name, points, colour: PALETTE[n % PALETTE.length], dash: "" })), ...beside.flatMap(([run, own]) => Object.entries(own).map(([name, points], n) => ({ name: `${run}: ${name}`, points, colour: PALETTE[n % PALETTE.length], dash: "4 3" })))];
  const every = lines.flatMap((line) => line.points);
  let [low, high] = [Math.min(...every.map(([, y]) => y)), Math.max(...every.map(([, y]) => y))];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const [first, last] = [Math.min(...every.map(([x]) => x)), Math.max(...every.map(([x]) => x))];
  const x = (value) => left + ((value - first) / Math.max(1e-9, last - first)) * (width - left - 8);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  for (const part of [0, 0.5, 1]) {
    const value = low + part * (high - low);
    svg.append(s("line", { class: "axis", x1: left, x2: width - 8, y1: y(value), y2: y(value) }));
    const label = s("text", { x: left - 4, y: y(value) + 3, "text-anchor": "end" });
    label.textContent = Math.abs(value) < 1e-9 * (high - low) ? 0 : Number(value.toPrecision(3));
    svg.append(label);
  }
  for (const [value, anchor] of [[first, "start"], [last, "end"]]) {
    const label = s("text", { x: x(value), y: height - 5, "text-anchor": anchor });
    label.textContent = value;
    svg.append(label);
  }
  for (const line of lines) {
    const path = line.points.map(([at, value], n) => `${n ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    svg.append(s("path", { d: path, stroke: line.colour, "stroke-dasharray": line.dash }));
    if (line.points.length < 30) for (const [at, value] of line.points) svg.append(s("circle", { cx: x(at), cy: y(value), r: 2, fill: line.colour }));
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + (((event.clientX - box.left) / box.width) * width - left) / (width - left - 8) * (last - first);
    const told = lines.map((line) => { const near = line.points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best), line.points[0]); return `${line.name} ${number(near[1], 4)} (step ${near[0]})`; });
    showTip(event, told.join("\n"));
  });
  svg.addEventListener("pointerleave", hideTip);
  const legend = lines.length > 1 ? h("p", { class: "legend" }, lines.map((line) => h("span", {}, h("i", { style: { background: line.colour } }), line.name))) : null;
  return h("figure", { class: "card chart", style: { margin: "0" } }, h("h3", {}, title, " ", h("small", {}, about)), svg, legend);
}

// -- evaluations

const evaluations = {
  title: "Evaluations",
  draw(main) {
    this.list = h("div", { class: "card wide" });
    this.detail = h("div", { class: "card detail", hidden: true });
    main.append(h("div", { class: "bar" }, h("button", { onclick: () => this.load() }, "look again")), this.detail, this.list);
    this.load();
  },
  async load() {
    try {
      const { sets } = await ask("api/evaluations");
      if (section === this) fill(this.list, ...(sets.length ? sets.map((one) => this.table(one)) : [h("p", { class: "empty" }, "No answer to an evaluation is kept: none has ended yet, the run's folder is not on this machine, or monitor.eval_answers_max_bytes is 0.")]));
    } catch (error) {
      fail(this.list, error);
    }
  },
  table(one) {
    const from = Math.max(0, one.labels.length - 8);
    const head = ["question", "", "expected", ...one.labels.slice(from).map((label) => `at ${label}`)];
    const rows = one.questions.map((row) => h("tr", { tabindex: "0", class: "pick", onclick: () => this.open(one.set, row.task), onkeydown: (event) => event.key === "Enter" && this.open(one.set, row.task) }, h("td", { class: "number" }, row.task), h("td", {}, row.question), h("td", {}, row.expected ?? "–"), row.rewards.slice(from).map((reward) => h("td", { class: "number" }, number(reward)))));
    const rest = one.left_out ? h("p", { class: "dim" }, `${one.left_out} further questions are not kept (monitor.eval_answers_max_bytes).`) : null;
    return h("section", {}, h("h3", {}, one.set, " ", h("small", {}, "mean reward of each question")), h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", {}, name)))), h("tbody", {}, rows)), rest ?? "");
  },
  async open(set, task) {
    this.detail.hidden = false;
    try {
      const found = await ask(`api/evaluation?set=${encodeURIComponent(set)}&task=${task}`);
      const last = found.evaluations.at(-1);
      fill(this.detail, h("div", { class: "bar" }, h("b", {}, `${set}, question ${task}`), h("button", { onclick: () => { this.detail.hidden = true; } }, "close")), h("div", { class: "message" }, h("b", {}, "asked"), "\n", last.question), expected(last.expected), ...[...found.evaluations].reverse().flatMap((one) => [h("h3", {}, `at ${one.label} `, h("small", {}, moment(one.time))), ...one.answers.map((answer) => h("div", { class: "message" }, h("b", {}, `run ${answer.run}: reward ${number(answer.reward)}`), "\n", answer.answer ?? "(not kept)")), one.failure ? h("p", { class: "bad" }, one.failure) : null]));
      this.detail.scrollIntoView({ block: "nearest" });
    } catch (error) {
      fail(this.detail, error);
    }
  },
};

// -- sync and engines

const PHASES = { wait: PALETTE[5], pause: PALETTE[4], transfer: PALETTE[0], apply: PALETTE[2], resume: PALETTE[1] };

const sync = {
  title: "Sync",
  draw(main) {
    this.engines = h("div", { class: "card wide" });
    this.last = h("div", { class: "card" });
    this.history = h("div", { class: "card wide" });
    main.append(h("h2", {}, "Engines"), this.engines, h("h2", {}, "Last sync"), this.last, h("h2", {}, "Syncs"), this.history, h("p", { class: "legend" }, Object.entries(PHASES).map(([name, colour]) => h("span", {}, h("i", { style: { background: colour } }), name))));
    this.at = 0;
  },
  update() {
    const engines = state.agents.filter((one) => one.role === "engine");
    const rows = engines.map((one) => {
      const member = state.sync.members[one.detail.id || one.id] || state.sync.members[one.id];
      const version = one.detail.version;
      return h("tr", { class: one.alive ? "" : "bad" }, h("td", {}, one.id), h("td", {}, one.detail.state || one.state), h("td", {}, version ? version.join(".") : "–"), h("td", {}, member ? member.state : ""), h("td", { class: "number" }, number(one.detail.load)), h("td", { class: "number" }, (one.detail.tokens ?? 0).toLocaleString()), h("td", { class: "number" }, number(one.detail.restarts)));
    });
    this.engines.replaceChildren(rows.length ? h("table", {}, h("thead", {}, h("tr", {}, ["engine", "state", "weights", "in the gate", "load", "tokens", "restarts"].map((name) => h("th", {}, name)))), h("tbody", {}, rows)) : h("p", { class: "dim" }, "None."));
    const counts = Object.entries(state.sync.counts).filter(([, count]) => count).map(([name, count]) => `${count} ${name.replace("_", " ")}`).join(", ");
    this.last.replaceChildren(h("p", {}, `weights ${state.sync.version}${counts ? ` · ${counts}` : ""}`, h("br"), h("span", { class: "dim" }, Object.entries(state.sync.phases).map(([name, value]) => `${name} ${value.toFixed(0)} ms`).join(", "))), phases(state.sync.phases, Infinity), ...(state.sync.trouble ? [h("p", { class: "bad" }, state.sync.trouble)] : []));
    if (performance.now() - this.at > 5000) this.load();
  },
  async load() {
    this.at = performance.now();
    const found = await ask("api/timeline?seconds=3600").catch(() => ({ spans: [] }));
    const syncs = found.spans.filter((one) => one.what === "sync").slice(-30).reverse();
    const longest = Math.max(1, ...syncs.map((one) => Object.values(one.phases).reduce((sum, value) => sum + value, 0)));
    this.history.replaceChildren(syncs.length ? h("table", {}, h("tbody", {}, syncs.map((one) => h("tr", {}, h("td", {}, `progress ${one.step}`), h("td", { class: "dim" }, clock(one.end)), h("td", { class: "number" }, `${((one.end - one.start) * 1000).toFixed(0)} ms`), h("td", { style: { width: "60%" } }, phases(one.phases, longest)))))) : h("p", { class: "dim" }, "None in the last hour."));
  },
};

function phases(values, longest) {
  const total = Object.values(values).reduce((sum, value) => sum + value, 0);
  const share = longest === Infinity ? 100 : (100 * total) / longest;
  return h("div", { class: "phases", style: { width: `${share}%` }, title: Object.entries(values).map(([name, value]) => `${name} ${value.toFixed(0)} ms`).join(", ") }, Object.entries(values).map(([name, value]) => h("i", { style: { background: PHASES[name] || PALETTE[5], flex: `${Math.max(0.01, value)} 0 0` } })));
}

// -- dead letters

const dead = {
  title: "Dead letters",
  draw(main) {
    this.place = h("div", { class: "card wide" });
    this.said = h("p", { class: "dim" });
    main.append(h("div", { class: "bar" }, h("button", { onclick: () => this.load() }, "look again"), this.said), this.place);
    this.load();
  },
  async load() {
    if (!state?.live) fill(this.place, h("p", { class: "empty" }, "Reading dead letters… The private broker of a run that does not run now is started for it, which takes some seconds."));
    try {
      const { letters } = await ask("api/dead");
      const operate = state?.operate;
      const again = (batch) => h("button", { onclick: () => this.replay(batch) }, "replay");
      const rows = letters.map((one) => h("tr", {}, h("td", {}, one.kind), h("td", {}, one.queue), h("td", {}, one.batch), h("td", {}, one.operator), h("td", {}, one.reason), h("td", { class: "number" }, `${one.bytes} bytes`), operate ? h("td", {}, ["batch_closed", "batch_ready"].includes(one.kind) ? again(one.batch) : "") : null));
      this.place.replaceChildren(rows.length ? h("table", {}, h("thead", {}, h("tr", {}, ["kind", "from", "batch", "operator", "reason", "size", ...(operate ? [""] : [])].map((name) => h("th", {}, name)))), h("tbody", {}, rows)) : h("p", { class: "empty" }, "There are no dead letters."));
    } catch (error) {
      fail(this.place, error);
    }
  },
  async replay(batch) {
    try {
      const done = await act("api/dead/replay", { batches: [batch] });
      this.said.textContent = [...done.republished, ...done.problems].join("; ") || "nothing to replay";
    } catch (error) {
      this.said.textContent = error.message;
    }
    this.load();
  },
};

// -- human review

const review = {
  title: "Review",
  draw(main) {
    this.place = h("div", {});
    this.said = h("p", { class: "dim", role: "status" });
    main.append(this.said, this.place);
    this.shown = null;
    this.load();
  },
  update() {
    if (state.reviews !== this.shown && !this.place.contains(document.activeElement)) this.load();
  },
  async load() {
    this.shown = state?.reviews ?? 0;
    try {
      const { reviews } = await ask("api/reviews");
      this.place.replaceChildren(...(reviews.length ? reviews.map((one) => this.card(one)) : [h("p", { class: "empty" }, "No run waits for a verdict. The operator human_review chooses those that do.")]));
    } catch (error) {
      fail(this.place, error);
    }
  },
  card(one) {
    const calls = one.calls.flatMap((call) => [h("div", { class: "message" }, h("b", {}, "asked"), "\n", call.prompt), h("div", { class: "message" }, h("b", {}, "answered"), "\n", call.response)]);
    const parts = Object.entries({ reward: one.reward, ...one.parts }).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
    const reward = h("input", { type: "number", step: "any", "aria-label": "new reward", placeholder: "reward" });
    const note = h("input", { "aria-label": "note", placeholder: "note", style: { width: "12rem" } });
    // an empty field is NaN, which JSON writes as null, and the server refuses
    const give = (verdict) => h("button", { onclick: () => this.give(one.request, { verdict, note: note.value, ...(verdict === "reward" ? { reward: reward.valueAsNumber } : {}) }) }, verdict);
    const left = one.deadline - state.now;
    const until = `${one.default}${one.default_reward === null ? "" : ` ${one.default_reward}`} counts in ${duration(left)}`;
    return h("section", { class: "card", style: { "margin-top": "1rem" } }, h("h3", {}, `${one.uid}: ${one.reasons.join("; ")}`), h("p", { class: "dim" }, `${parts} · ${until}`), ...calls, expected(one.expected), state.operate ? h("div", { class: "verdict" }, give("keep"), give("drop"), reward, give("reward"), note) : h("p", { class: "dim" }, "Verdicts are given with --operate, or by `trinity-mq review`."));
  },
  async give(request, verdict) {
    try {
      const done = await act(`api/reviews/${request}`, verdict);
      this.said.textContent = done.reason || `${verdict.verdict}: done`;
    } catch (error) {
      this.said.textContent = error.message;
    }
    this.load();
  },
};

// -- runs

const runs = {
  title: "Runs",
  draw(main) {
    this.place = h("div", { class: "card wide" });
    this.broker = h("div", { class: "card wide" });
    main.append(h("h2", {}, "Folders beside this one"), this.place, h("h2", {}, "On this broker"), this.broker);
    this.load();
  },
  async load() {
    try {
      const found = await ask("api/runs");
      this.place.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ["run", "state", "step", "accuracy", "reward", "last metric", "folder"].map((name) => h("th", {}, name)))), h("tbody", {}, found.runs.map((one) => h("tr", {}, h("td", {}, one.here ? h("b", {}, one.name) : one.name), h("td", {}, one.state), h("td", {}, one.step), h("td", {}, one.accuracy), h("td", {}, one.reward), h("td", {}, one.age === null ? "–" : `${duration(one.age)} ago`), h("td", { class: "dim" }, one.folder))))), h("p", { class: "dim" }, "trinity-mq dash FOLDER opens another one; --beside FOLDER draws its curves here."));
      this.broker.replaceChildren(found.broker.length ? h("table", {}, h("thead", {}, h("tr", {}, ["run", "consumers", "messages", "dead letters", "queues"].map((name) => h("th", {}, name)))), h("tbody", {}, found.broker.map((one) => h("tr", {}, h("td", {}, one.run), ...["consumers", "messages", "dead", "queues"].map((name) => h("td", {}, String(one[name]))))))) : h("p", { class: "dim" }, found.unknown || "None."));
    } catch (error) {
      fail(this.place, error);
    }
  },
};

// -- sections of the page and keyboard keys

const SECTIONS = { flow, timeline, samples, learning, evaluations, sync, dead, review, runs };

function show() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const chosen = SECTIONS[name] || flow;
  if (chosen === samples && rest.length) samples.uid = decodeURIComponent(rest.join("/"));
  for (const link of $("nav").children) link.toggleAttribute("aria-current", link.hash === `#${Object.keys(SECTIONS).find((one) => SECTIONS[one] === chosen)}`);
  hideTip();
  section = chosen;
  const main = $("main");
  main.replaceChildren();
  chosen.draw(main);
  if (state) chosen.update?.();
}

function go(name) {
  location.hash = name;
}

const KEYS = [["1 – 9", "sections"], ["j, k", "next and previous sample"], ["/", "search samples"], ["Esc", "close"], ["?", "these keys"]];

addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else if (section === samples && samples.uid) samples.close();
  }
  if (typing || event.metaKey || event.ctrlKey || event.altKey) return;
  const names = Object.keys(SECTIONS);
  if (/^[1-9]$/.test(event.key) && names[event.key - 1]) go(names[event.key - 1]);
  else if (event.key === "?") $("help").showModal();
  else if (section === samples && ["j", "ArrowDown"].includes(event.key)) { event.preventDefault(); samples.move(1); }
  else if (section === samples && ["k", "ArrowUp"].includes(event.key)) { event.preventDefault(); samples.move(-1); }
  else if (event.key === "/") { event.preventDefault(); if (section !== samples) go("samples"); setTimeout(() => samples.search.focus()); }
});

$("nav").append(...Object.entries(SECTIONS).map(([name, one], place) => h("a", { href: `#${name}` }, one.title, h("kbd", {}, String(place + 1)))));
$("help").append(h("h2", {}, "Keys"), h("table", {}, h("tbody", {}, KEYS.map(([keys, words]) => h("tr", {}, h("td", {}, h("kbd", {}, keys)), h("td", {}, words))))), h("form", { method: "dialog" }, h("button", {}, "close")));
addEventListener("hashchange", () => { if (!(section === samples && location.hash.startsWith("#samples/"))) show(); });
addEventListener("resize", () => { if (section === timeline && timeline.data) timeline.paint(); });
show();
connect();
