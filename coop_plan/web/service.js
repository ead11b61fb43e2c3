// Page of the service: plans of a graph for several budgets and methods, with memory maps.

import { Pareto, legendOf } from "./pareto.js";
import { replay } from "./replay.js";
import { Refusal, Service } from "./requests.js";
import { bytes, element, percent } from "./units.js";
import { download, mapsView } from "./views.js";

const BUDGETS = "80%, 60%, min";
const CHECKED = ["coop-offline", "coop"];
const AT_ONCE = 4; // requests; the service queues its solves
const BUDGET = /^(min|(\d+(\.\d+)?|\.\d+)\s*(%|[a-z]*))$/i;
const FORGOTTEN = "The address of this page keeps all choices, not the token and not the graph itself.";
const HEADS = ["budget", "method", "peak", "overhead", "at least", "time", "plan"];

// Input with a label and a place for the error that is about it.
function fieldOf(id, label, input, hint = null) {
  const error = element("span", { class: "wrong", id: `${id}-error`, role: "alert" });
  input.setAttribute("id", id);
  input.setAttribute("aria-describedby", error.id);
  const tell = (text) => {
    error.textContent = text;
    if (text) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  };
  const node = element("div", { class: "field" }, element("label", { for: id }, label), input, error);
  if (hint) input.setAttribute("placeholder", hint);
  return { node, input, tell };
}

function listed(text) {
  return [...new Set(text.split(",").map((part) => part.trim()).filter(Boolean))];
}

// Time left of a job, by its share that is done, else by its time limit.
function timeLeft({ fraction, elapsed_seconds: elapsed }, { time_limit: limit }) {
  const left = fraction ? elapsed * (1 / fraction - 1) : limit - elapsed;
  return left >= 0 ? `, ${Math.ceil(left)} s left` : "";
}

// Form of a request. `changed()` is called after each change of a choice.
function formOf(methods, changed) {
  const text = (extra = {}) => element("input", { oninput: changed, ...extra });
  const fields = {
    graph: fieldOf("graph", "Graph", element("input", { type: "file", accept: ".json,.gz,application/json" })),
    stored: fieldOf("stored", "Stored graph", element("select")),
    token: fieldOf("token", "Token", element("input", { type: "password", autocomplete: "off" }), "if one is needed"),
    budgets: fieldOf("budgets", "Budgets", text({ value: BUDGETS, size: 28 }), "12GiB, 60%, min"),
    time_limit: fieldOf("time_limit", "Time limit of a plan, s", text({ type: "number", min: 0, step: "any" }), "the method's own"),
    host_budget: fieldOf("host_budget", "Host budget", text(), "no limit"),
  };
  const boxes = methods.map(({ name, summary }) => {
    const box = element("input", { type: "checkbox", value: name, checked: CHECKED.includes(name), onchange: changed });
    return [box, element("label", { title: summary }, box, ` ${name}`)];
  });
  const wrongMethods = element("p", { class: "wrong", id: "methods-error", role: "alert" });
  const group = element(
    "fieldset",
    { "aria-describedby": "methods-error" },
    element("legend", {}, "Methods"),
    element("div", { class: "row" }, ...boxes.map(([, label]) => label)),
    wrongMethods,
  );
  fields.methods = { node: group, tell: (message) => (wrongMethods.textContent = message) };

  const value = (name) => fields[name].input.value.trim();
  const chosen = () => boxes.filter(([box]) => box.checked).map(([box]) => box.value);

  // The options that all plans share.
  function shared() {
    const found = {};
    if (value("time_limit")) found.time_limit = Number(value("time_limit"));
    if (value("host_budget")) found.host_budget = value("host_budget");
    return found;
  }

  // The requests without their graph; null if a field is wrong, which its error says.
  function requests() {
    const budgets = listed(value("budgets"));
    const bad = budgets.find((budget) => !BUDGET.test(budget));
    if (bad) fields.budgets.tell(`"${bad}" is not a budget: use 12GiB, 60% or min`);
    else if (!budgets.length) fields.budgets.tell("give at least one budget");
    if (!chosen().length) fields.methods.tell("choose at least one method");
    const limit = fields.time_limit.input;
    if (!limit.checkValidity()) fields.time_limit.tell("the time limit is a number of seconds");
    if (bad || !budgets.length || !chosen().length || !limit.checkValidity()) return null;
    return budgets.flatMap((budget) => chosen().map((method) => ({ budget, method, ...shared() })));
  }

  function state() {
    const kept = { budgets: value("budgets"), methods: chosen() };
    for (const name of ["time_limit", "host_budget"]) if (value(name)) kept[name] = value(name);
    return kept;
  }

  function restore(kept) {
    for (const name of ["budgets", "time_limit", "host_budget"]) {
      if (kept.has(name)) fields[name].input.value = kept.get(name);
    }
    const named = (kept.get("methods") ?? "").split(",");
    if (kept.has("methods")) for (const [box] of boxes) box.checked = named.includes(box.value);
  }

  const clear = () => Object.values(fields).forEach((field) => field.tell(""));
  return { fields, value, requests, state, restore, clear };
}

export function serviceView({ methods, sample }) {
  const state = { graph: null, digest: null, run: null, maps: new Set(), pending: null };
  const form = formOf(methods, keep);
  const { fields } = form;
  const service = new Service(() => form.value("token"));
  const status = element("p", { class: "status", role: "status" }, "No graph yet.");
  const bar = element("progress", { hidden: true, "aria-label": "plans made" });
  const results = element("div");
  const go = element("button", { disabled: true }, "Plan");
  const stop = element("button", { type: "button", disabled: true, onclick: () => state.run?.cells.forEach(cancel) }, "Cancel");
  const example = element("button", { type: "button", onclick: () => load(JSON.stringify(sample), "the sample") }, "Sample graph");
  const asked = element(
    "section",
    { class: "panel", "aria-label": "request" },
    element("p", {}, "Drop a graph (coop-plan/graph/1) here, choose a file or a stored one, or begin with the sample."),
    element(
      "form",
      { onsubmit: submitted, novalidate: true },
      element("div", { class: "row" }, fields.graph.node, fields.stored.node, fields.token.node, example),
      element("div", { class: "row" }, fields.budgets.node, fields.time_limit.node, fields.host_budget.node),
      fields.methods.node,
      element("div", { class: "row" }, go, stop, bar),
    ),
    status,
    element("p", { class: "help" }, FORGOTTEN),
  );
  fields.graph.input.addEventListener("change", () => opened(fields.graph.input.files[0]));
  fields.stored.input.addEventListener("change", () => pickStored(fields.stored.input.value));
  fields.token.input.addEventListener("change", restore);
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    opened(event.dataTransfer.files[0]);
  });

  function keep() {
    const kept = new URLSearchParams(form.state());
    if (state.digest) kept.set("graph", state.digest);
    if (state.run) kept.set("maps", [...state.maps].join("."));
    history.replaceState(null, "", `#${kept}`);
  }

  // Shows an error at the field that it is about.
  function tell(error, field = "") {
    const place = fields[error.field || field];
    if (place) place.tell(error.message);
    else status.textContent = error.message;
    status.classList.toggle("wrong", !place);
  }

  function showStatus(text) {
    status.textContent = text;
    status.classList.remove("wrong");
  }

  async function list() {
    const graphs = await service.get("/graphs");
    fields.token.tell("");
    const none = element("option", { value: "" }, graphs.length ? "choose" : "none");
    const each = graphs.map(({ digest, name, ops }) =>
      element("option", { value: digest }, `${name || digest.slice(7, 19)}, ${ops.toLocaleString("en")} ops`),
    );
    fields.stored.input.replaceChildren(none, ...each);
    fields.stored.input.value = graphs.some(({ digest }) => digest === state.digest) ? state.digest : "";
  }

  async function opened(file) {
    if (!file) return;
    const packed = file.name.endsWith(".gz");
    const stream = packed ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
    try {
      await load(await new Response(stream).text(), file.name);
    } catch (error) {
      tell(new Refusal(`${file.name} cannot be read: ${error.message}`), "graph");
    }
  }

  // Uploads a graph, so that requests name it by its digest.
  async function load(text, name) {
    begin(null, null);
    showStatus(`uploading ${name}`);
    state.pending = null;
    try {
      const graph = JSON.parse(text);
      const digest = await service.upload(text);
      begin(graph, digest, name);
      await list();
    } catch (error) {
      showStatus("No graph yet.");
      if (error.field === "token") {
        state.pending = () => load(text, name);
        return tell(error);
      }
      const { pointer } = error.problem ?? {};
      tell(new Refusal(`${name} is refused: ${error.message}${pointer ? ` (at ${pointer})` : ""}`), "graph");
    }
  }

  async function pickStored(digest) {
    if (!digest) return;
    try {
      const graph = await service.get(`/graphs/${digest}`);
      fields.graph.input.value = "";
      begin(graph, digest, digest);
    } catch (error) {
      const gone = error.status === 404 ? new Refusal("the service does not have this graph any more: choose it again") : error;
      tell(gone, "graph");
    }
  }

  function begin(graph, digest, name = "") {
    state.run?.cells.forEach(cancel);
    form.clear();
    Object.assign(state, { graph, digest, run: null, maps: new Set() });
    results.replaceChildren();
    go.disabled = !graph;
    if (!graph) return;
    showStatus(`${graph.name || name}: ${graph.ops.length} ops, ${graph.tensors.length} tensors`);
    keep();
  }

  function submitted(event) {
    event.preventDefault();
    if (!go.disabled) sweep();
  }

  // Plans every budget with every method, a few requests at a time; each answer is shown at once.
  async function sweep(shown = []) {
    form.clear();
    const requests = form.requests();
    if (!requests) return;
    state.run?.cells.forEach(cancel);
    const graph = state.digest ?? state.graph;
    const cells = requests.map((request) => ({ request, asked: request.budget, method: request.method, state: "waiting", text: "waiting" }));
    const run = { cells, view: resultsView(cells) };
    Object.assign(state, { run, maps: new Set(shown.filter((place) => place < cells.length)) });
    results.replaceChildren(run.view.node);
    Object.assign(bar, { max: cells.length, value: 0, hidden: false });
    stop.disabled = false;
    keep();
    const waiting = [...cells];
    const work = async () => {
      for (let cell = waiting.shift(); cell; cell = waiting.shift()) {
        await planCell(cell, graph, run);
        if (run === state.run) showProgress(run);
      }
    };
    showProgress(run);
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    if (run !== state.run) return;
    stop.disabled = bar.hidden = true;
  }

  async function planCell(cell, graph, run) {
    const seen = (job) => {
      cell.job = job.address ?? cell.job;
      if (cell.state === "cancelled") throw new Refusal("cancelled");
      cell.text = `${job.message || job.state}${timeLeft(job, cell.request)}`;
      Object.assign(cell, { state: "running" });
      run.view.update(cell);
    };
    try {
      if (cell.state === "cancelled") return;
      cell.plan = await service.plan({ ...cell.request, graph }, seen);
      took(cell);
      if (!state.maps.size && run === state.run) state.maps.add(run.cells.indexOf(cell));
    } catch (error) {
      if (cell.state !== "cancelled") Object.assign(cell, { state: error.status === 409 ? "infeasible" : "failed", text: error.message });
      if (error.field && run === state.run) {
        tell(error); // every request has this fault
        run.cells.forEach(cancel);
      }
    }
    if (run !== state.run) return;
    run.view.update(cell);
    keep();
  }

  function took(cell) {
    const { plan } = cell;
    const proved = plan.lower_bound_us != null && plan.base_cost_us;
    const bound = proved ? plan.lower_bound_us / plan.base_cost_us - 1 : null;
    const { peak_bytes, budget_bytes, overhead } = plan;
    Object.assign(cell, { state: "planned", text: "", bound, peak_bytes, budget_bytes, overhead });
  }

  function cancel(cell) {
    if (!["waiting", "running"].includes(cell.state)) return;
    Object.assign(cell, { state: "cancelled", text: "cancelled" });
    if (cell.job) service.send(cell.job, { method: "DELETE" }).catch(() => {});
    state.run.view.update(cell);
  }

  function showProgress({ cells }) {
    const count = (...states) => cells.filter((cell) => states.includes(cell.state)).length;
    const done = cells.length - count("waiting", "running");
    bar.value = done;
    const refused = [
      [count("infeasible"), "cannot be met"],
      [count("failed"), "failed"],
      [count("cancelled"), "cancelled"],
    ].filter(([number]) => number);
    const words = [`${count("planned")} of ${cells.length} plans`, ...refused.map((pair) => pair.join(" "))];
    showStatus(words.join(", "));
  }

  // Plot, table and maps of a run; `update(cell)` shows a change of one cell.
  function resultsView(cells) {
    const names = [...new Set(cells.map((cell) => cell.method))];
    const place = (cell) => cells.indexOf(cell);
    const plot = new Pareto([], names, (cell) => toggle(cell));
    const maps = element("div", { class: "opened" });
    const body = element("tbody");
    const rows = cells.map(() => element("tr"));
    body.append(...rows);
    const head = element("tr", {}, ...HEADS.map((name) => element("th", { scope: "col" }, name)));

    function toggle(cell) {
      if (!state.maps.delete(place(cell))) state.maps.add(place(cell));
      rows.forEach((_, i) => fill(cells[i]));
      drawMaps();
      keep();
    }

    const label = (cell) => `${cell.method} within ${cell.asked}`;

    function buttons(cell) {
      const button = (text, press, more = {}) =>
        element("button", { type: "button", onclick: press, "aria-label": `${text} of ${label(cell)}`, ...more }, text);
      if (cell.state === "waiting" || cell.state === "running") return [`${cell.text} `, button("cancel", () => cancel(cell))];
      if (!cell.plan) return [element("span", { class: cell.state === "cancelled" ? "" : "wrong" }, cell.state)];
      const save = () => download("plan.json", new Blob([JSON.stringify(cell.plan)], { type: "application/json" }));
      const shown = String(state.maps.has(place(cell)));
      return [button("map", () => toggle(cell), { "aria-pressed": shown }), " ", button("download", save)];
    }

    function fill(cell) {
      const { plan } = cell;
      const values = [
        cell.asked,
        cell.method,
        plan ? bytes(plan.peak_bytes) : "",
        plan ? percent(plan.overhead) : "",
        cell.bound == null ? "" : percent(cell.bound),
        plan ? `${plan.solve_seconds.toFixed(2)} s` : "",
      ].map((value) => element("td", {}, value));
      const row = rows[place(cell)];
      const focused = row.contains(document.activeElement) ? document.activeElement.textContent : null;
      row.replaceChildren(...values, element("td", {}, ...buttons(cell)));
      if (focused) [...row.querySelectorAll("button")].find((other) => other.textContent === focused)?.focus();
    }

    function drawMaps() {
      const shown = [...state.maps].sort((a, b) => a - b).map((i) => cells[i]);
      const drawings = shown
        .filter((cell) => cell.plan)
        .map((cell) => ({ title: label(cell), figures: cell.plan, map: replay(state.graph, cell.plan) }));
      maps.replaceChildren(drawings.length ? mapsView(drawings) : "", commands((shown[0] ?? cells[0]).request));
    }

    const why = element("ul", { class: "help", "aria-label": "failures" });
    const planned = element("section", { class: "panel", "aria-label": "overhead over peak", hidden: true },
      element("ul", { class: "legend" }, ...legendOf(names)), plot.node);

    function update(cell) {
      fill(cell);
      const found = cells.filter((other) => other.plan);
      planned.hidden = !found.length;
      plot.show(found);
      const failures = cells.filter((other) => ["infeasible", "failed"].includes(other.state));
      why.replaceChildren(...failures.map((other) => element("li", {}, `${label(other)}: ${other.text}`)));
      if (cell.plan && state.maps.has(place(cell))) drawMaps();
    }

    cells.forEach(fill);
    const table = element("table", {}, element("thead", {}, head), body);
    const node = element(
      "div",
      {},
      planned,
      element("section", { class: "panel scroll", tabindex: "0", "aria-label": "all plans" }, table, why),
      maps,
    );
    return { node, update };
  }

  // After a reload the address has the choices, and the graph's digest if the service has it.
  async function restore() {
    const kept = new URLSearchParams(location.hash.slice(1));
    try {
      await list();
    } catch (error) {
      return tell(error);
    }
    if (state.pending) return state.pending();
    if (!kept.get("graph") || state.graph) return;
    await pickStored(kept.get("graph"));
    const shown = (kept.get("maps") ?? "").split(".").filter(Boolean).map(Number);
    if (state.graph && kept.has("maps")) await sweep(shown);
  }

  form.restore(new URLSearchParams(location.hash.slice(1)));
  restore();
  return element("div", {}, asked, results);
}

function commands(request) {
  const own = JSON.stringify(request).slice(1, -1);
  const question = `(echo '{${own}, "graph": '; cat graph.json; echo '}')`;
  const curl = `${question} | curl -H 'Content-Type: application/json' -o plan.json --data-binary @- ${location.origin}/plan`;
  const { budget, ...rest } = request;
  const options = Object.entries(rest).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  const python = [
    "import coop_plan",
    "",
    `with coop_plan.Client("${location.origin}") as client:`,
    '    graph = coop_plan.load_graph("graph.json")',
    `    plan = client.plan(graph, ${[JSON.stringify(budget), ...options].join(", ")})`,
  ].join("\n");
  return element(
    "section",
    { class: "panel", "aria-label": "equivalent code" },
    element("h2", {}, "Equivalent code"),
    element("pre", { tabindex: "0" }, curl),
    element("pre", { tabindex: "0" }, python),
  );
}

export function start(data) {
  document.querySelector("main").append(serviceView(data));
}
