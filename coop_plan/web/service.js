// The page of the service: a graph in, plans for many budgets and methods, their maps.

import { Pareto, hue } from "./pareto.js";
import { replay } from "./replay.js";
import { bytes, element, percent } from "./units.js";
import { mapsView } from "./views.js";

const SHARES = [100, 90, 80, 70, 60, 50, 40, 30];
const LEAST = "min";
const METHODS = ["coop-offline", "coop", "dtr", "keep-all"];
const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

const bearer = (token) => (token ? { Authorization: `Bearer ${token}` } : {});

// A plan, or the problem that the service answers with; a plan that takes longer is asked for again.
async function ask(body, token) {
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
  const said = element("p", { class: "told", role: "status" }, "No graph yet.");
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
    { class: "panel", "aria-label": "the question" },
    element("p", {}, "Drop a graph (coop-plan/graph/1) here, choose a file, or pick one that is kept here."),
    element(
      "form",
      { onsubmit: submitted },
      element(
        "div",
        { class: "row" },
        element("label", { for: "graph" }, "Graph ", file),
        element("label", { for: "stored" }, "Kept here ", stored),
        element("label", { for: "token" }, "Token, if one is needed ", token),
      ),
      element("div", { class: "row" }, ...boxes.map(([, label]) => label), go),
    ),
    said,
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

  function tell(text, wrong = false) {
    said.textContent = text;
    said.classList.toggle("wrong", wrong);
  }

  async function get(address) {
    const answer = await fetch(address, { headers: bearer(token.value) });
    if (!answer.ok) throw new Error((await answer.json()).detail || answer.statusText);
    return answer;
  }

  // What PUT /graphs has kept; with tokens, what a token may see.
  async function list() {
    let kept = [];
    try {
      kept = await (await get("/graphs")).json();
    } catch (error) {
      if (token.value) tell(`no list of graphs: ${error.message}`, true);
    }
    const none = element("option", { value: "" }, kept.length ? "choose" : "none");
    const each = kept.map(({ digest, name, ops }) => {
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

  // A graph that is kept is asked about by its digest, another one is sent whole.
  async function load(given, digest = null) {
    try {
      const graph = JSON.parse(await given.text());
      if (!Array.isArray(graph.ops) || !Array.isArray(graph.tensors)) throw new Error("no ops");
      Object.assign(state, { graph, digest });
      if (!digest) stored.value = "";
      go.disabled = false;
      const size = `${graph.ops.length} ops, ${graph.tensors.length} tensors`;
      tell(`${graph.name || given.name}: ${size}`);
    } catch (error) {
      tell(`${given.name} is no graph: ${error.message}`, true);
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
    // The smallest budget comes second: what lies below it need not be asked.
    for (const share of [SHARES[0], LEAST, ...SHARES.slice(1)]) {
      for (const method of methods) {
        const asked = share === LEAST ? LEAST : `${share}%`;
        tell(`planning: ${done} of ${(SHARES.length + 1) * methods.length}`);
        const all = state.cells.find((cell) => cell.share === SHARES[0] && cell.method === method);
        if (least.has(method) && Math.ceil((all.budget_bytes * share) / SHARES[0]) < least.get(method)) {
          const why = `the smallest budget that it can meet is ${bytes(least.get(method))}`;
          state.cells.push({ asked, share, method, planned: false, bound: null, why });
          continue;
        }
        let plan;
        try {
          plan = await ask({ graph, budget: asked, method }, token.value);
        } catch (error) {
          tell(`the service did not answer: ${error.message}`, true);
          return;
        }
        if (run !== state.run) return;
        done += 1;
        const planned = Array.isArray(plan.steps);
        const base = plan.base_cost_us;
        const proved = planned && plan.lower_bound_us != null && base;
        const bound = proved ? Math.max(0, plan.lower_bound_us / base - 1) : null;
        const why = planned ? "" : plan.detail || plan.title;
        if (!planned && plan.status !== 422 && plan.status !== 409) return tell(why, true);
        if (planned && share === LEAST) least.set(method, plan.peak_bytes);
        state.cells.push({ ...(planned ? plan : {}), asked, share, method, planned, bound, why, plan });
      }
    }
    tell(`${done} plans`);
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
      const there = own.filter((cell) => cell.planned);
      const drawings = there.map((cell) => ({
        title: cell.method,
        figures: cell.plan,
        map: replay(state.graph, cell.plan),
      }));
      const refused = own.filter((cell) => !cell.planned);
      place.replaceChildren(
        ...refused.map((cell) => element("p", { class: "wrong" }, `${cell.method}: ${cell.why}`)),
        drawings.length ? mapsView(drawings) : "",
        element("div", { class: "row bar" }, ...there.map(download)),
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
    { class: "panel", "aria-label": "the same by program" },
    element("h2", {}, "The same by program"),
    element("pre", { tabindex: "0" }, curl),
    element("pre", { tabindex: "0" }, python),
  );
}

export function start() {
  document.querySelector("main").append(serviceView());
}
