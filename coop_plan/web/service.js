// Page of the service: plans of a graph for several budgets and methods, with memory maps.

import { Pareto, hue } from "./pareto.js";
import { replay } from "./replay.js";
import { bytes, element, percent } from "./units.js";
import { mapsView } from "./views.js";

const SHARES = [100, 90, 80, 70, 60, 50, 40, 30];
const LEAST = "min";
const METHODS = ["coop-offline", "coop", "dtr", "keep-all"];
const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

const bearer = (token) => (token ? { Authorization: `Bearer ${token}` } : {});

// Returns the plan, or the service's problem; repeats the request while the plan is being made.
async function requestPlan(body, token) {
  const kind = { "Content-Type": "application/json", Prefer: "respond-async, wait=20" };
  const headers = { ...kind, ...bearer(token) };
  for (;;) {
    const answer = await fetch("/plan", { method: "POST", headers, body: JSON.stringify(body) });
    if (answer.status !== 202) return answer.json();
    await pause(1);
  }
}

export function serviceView() {
  const state = { graph: null, digest: null, cells: [], run: 0 };
  const status = element("p", { class: "status", role: "status" }, "No graph yet.");
  const results = element("div");
  const file = element("input", { type: "file", accept: ".json,application/json", id: "graph" });
  const token = element("input", {
    type: "password",
    id: "token",
    autocomplete: "off",
    onchange: () => list(),
  });
  const stored = element("select", { id: "stored", onchange: () => stored.value && pickStored() });
  const boxes = METHODS.map((name, i) => {
    const box = element("input", { type: "checkbox", value: name, checked: i < 2 });
    return [box, element("label", {}, box, ` ${name}`)];
  });
  const go = element("button", { disabled: true }, "Plan");
  const drop = element(
    "section",
    { class: "panel", "aria-label": "request" },
    element("p", {}, "Drop a graph (coop-plan/graph/1) here, choose a file, or choose a stored one."),
    element(
      "form",
      { onsubmit: submitted },
      element(
        "div",
        { class: "row" },
        element("label", { for: "graph" }, "Graph ", file),
        element("label", { for: "stored" }, "Stored graph ", stored),
        element("label", { for: "token" }, "Token, if one is needed ", token),
      ),
      element("div", { class: "row" }, ...boxes.map(([, label]) => label), go),
    ),
    status,
  );
  file.addEventListener("change", () => file.files[0] && load(file.files[0]));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) load(event.dataTransfer.files[0]);
  });

  function submitted(event) {
    event.preventDefault();
    if (!go.disabled) sweep();
  }

  function showStatus(text, wrong = false) {
    status.textContent = text;
    status.classList.toggle("wrong", wrong);
  }

  async function get(address) {
    const answer = await fetch(address, { headers: bearer(token.value) });
    if (!answer.ok) throw new Error((await answer.json()).detail || answer.statusText);
    return answer;
  }

  // List the graphs that the service stores.
  async function list() {
    let graphs = [];
    try {
      graphs = await (await get("/graphs")).json();
    } catch (error) {
      if (token.value) showStatus(`no list of graphs: ${error.message}`, true);
    }
    const none = element("option", { value: "" }, graphs.length ? "choose" : "none");
    const each = graphs.map(({ digest, name, ops }) => {
      const text = `${name || digest.slice(7, 19)}, ${ops.toLocaleString("en")} ops`;
      return element("option", { value: digest }, text);
    });
    stored.replaceChildren(none, ...each);
  }

  function pickStored() {
    file.value = "";
    const digest = stored.value;
    const named = { name: digest, text: async () => (await get(`/graphs/${digest}`)).text() };
    load(named, digest);
  }

  // A stored graph is named by its digest; another one is sent with each request.
  async function load(given, digest = null) {
    try {
      const graph = JSON.parse(await given.text());
      if (!Array.isArray(graph.ops) || !Array.isArray(graph.tensors)) throw new Error("no ops");
      Object.assign(state, { graph, digest });
      if (!digest) stored.value = "";
      go.disabled = false;
      const size = `${graph.ops.length} ops, ${graph.tensors.length} tensors`;
      showStatus(`${graph.name || given.name}: ${size}`);
    } catch (error) {
      showStatus(`${given.name} is no graph: ${error.message}`, true);
    }
  }

  async function sweep() {
    state.run += 1;
    const { run, digest } = state;
    const graph = digest ?? state.graph;
    const methods = boxes.filter(([box]) => box.checked).map(([box]) => box.value);
    const least = new Map();
    state.cells = [];
    let done = 0;
    // The smallest budget comes second, so that budgets below it are not requested.
    for (const share of [SHARES[0], LEAST, ...SHARES.slice(1)]) {
      for (const method of methods) {
        const budget = share === LEAST ? LEAST : `${share}%`;
        showStatus(`planning: ${done} of ${(SHARES.length + 1) * methods.length}`);
        const all = state.cells.find((cell) => cell.share === SHARES[0] && cell.method === method);
        if (least.has(method) && Math.ceil((all.budget_bytes * share) / SHARES[0]) < least.get(method)) {
          const why = `the smallest budget that it can meet is ${bytes(least.get(method))}`;
          state.cells.push({ asked: budget, share, method, planned: false, bound: null, why });
          continue;
        }
        let plan;
        try {
          plan = await requestPlan({ graph, budget, method }, token.value);
        } catch (error) {
          showStatus(`the service did not answer: ${error.message}`, true);
          return;
        }
        if (run !== state.run) return;
        done += 1;
        const planned = Array.isArray(plan.steps);
        const base = plan.base_cost_us;
        const proved = planned && plan.lower_bound_us != null && base;
        const bound = proved ? plan.lower_bound_us / base - 1 : null;
        const why = planned ? "" : plan.detail || plan.title;
        if (!planned && plan.status !== 422 && plan.status !== 409) return showStatus(why, true);
        if (planned && share === LEAST) least.set(method, plan.peak_bytes);
        state.cells.push({ ...(planned ? plan : {}), asked: budget, share, method, planned, bound, why, plan });
      }
    }
    showStatus(`${done} plans`);
    show(methods);
  }

  function show(methods) {
    const planned = state.cells.filter((cell) => cell.planned);
    const place = element("div", { class: "opened" });
    const value = element("output", { for: "budget" });
    const slider = element("input", {
      type: "range",
      id: "budget",
      min: SHARES[SHARES.length - 1],
      max: SHARES[0],
      step: 10,
      value: 60,
      "aria-label": "budget, percent of the peak of keeping everything",
      oninput: () => pick(Number(slider.value)),
    });

    function pick(share) {
      const own = state.cells.filter((cell) => cell.share === share);
      if (share !== LEAST) slider.value = share;
      value.textContent = share === LEAST ? "the smallest" : `${share} %`;
      const found = own.filter((cell) => cell.planned);
      const drawings = found.map((cell) => ({
        title: cell.method,
        figures: cell.plan,
        map: replay(state.graph, cell.plan),
      }));
      const refused = own.filter((cell) => !cell.planned);
      place.replaceChildren(
        ...refused.map((cell) => element("p", { class: "wrong" }, `${cell.method}: ${cell.why}`)),
        drawings.length ? mapsView(drawings) : "",
        element("div", { class: "row bar" }, ...found.map(download)),
        commands(own[0]),
      );
    }

    const names = methods.map((method, i) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = hue(i);
      return element("li", {}, swatch, method);
    });
    results.replaceChildren(
      element(
        "section",
        { class: "panel", "aria-label": "overhead over peak" },
        element("ul", { class: "legend" }, ...names),
        new Pareto(planned, methods, (cell) => pick(cell.share)).node,
        element("div", { class: "row" }, element("label", { for: "budget" }, "Budget"), slider, value),
      ),
      place,
    );
    pick(60);
  }

  function download(cell) {
    const save = () => {
      const data = new Blob([JSON.stringify(cell.plan)], { type: "application/json" });
      const link = element("a", { href: URL.createObjectURL(data), download: "plan.json" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    };
    const text = `Download ${cell.method}, ${bytes(cell.peak_bytes)}, ${percent(cell.overhead)}`;
    return element("button", { type: "button", onclick: save }, text);
  }

  list();
  return element("div", {}, drop, results);
}

function commands({ asked, method }) {
  const question = `'{"graph": '"$(cat graph.json)"', "budget": "${asked}", "method": "${method}"}'`;
  const curl = `curl -H 'Content-Type: application/json' -o plan.json --data ${question} ${location.origin}/plan`;
  const python = [
    "import coop_plan",
    "",
    `with coop_plan.Client("${location.origin}") as client:`,
    '    graph = coop_plan.load_graph("graph.json")',
    `    plan = client.plan(graph, "${asked}", method="${method}")`,
  ].join("\n");
  return element(
    "section",
    { class: "panel", "aria-label": "equivalent code" },
    element("h2", {}, "Equivalent code"),
    element("pre", { tabindex: "0" }, curl),
    element("pre", { tabindex: "0" }, python),
  );
}

export function start() {
  document.querySelector("main").append(serviceView());
}
