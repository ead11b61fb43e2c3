// Page of the service: plans of a graph for several budgets and methods, with memory maps.

import { Pareto, legendOf } from "./pareto.js";
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
    if (answer.status === 401) throw new Error(token.value ? "the token is not known" : "a token is needed");
    if (!answer.ok) throw new Error((await answer.json()).detail || answer.statusText);
    return answer;
  }

  // The digest of the graph's document, once the service has it; null where the page may not compute
  // it (browsers hash in secure contexts only) or the service refuses it: the graph is sent then.
  async function uploaded(text) {
    if (!globalThis.crypto?.subtle) return null;
    const document = new TextEncoder().encode(text);
    const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", document));
    const digest = `sha256:${Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    const headers = { "Content-Type": "application/json", ...bearer(token.value) };
    const answer = await fetch(`/graphs/${digest}`, { method: "PUT", headers, body: document });
    return answer.ok ? digest : null;
  }

  // List the graphs that the service stores.
  async function list() {
    let graphs = [];
    try {
      graphs = await (await get("/graphs")).json();
      if (status.classList.contains("wrong")) showStatus("No graph yet.");
    } catch (error) {
      showStatus(`no list of graphs: ${error.message}`, true);
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
      const text = await given.text();
      const graph = JSON.parse(text);
      if (!Array.isArray(graph.ops) || !Array.isArray(graph.tensors)) throw new Error("no ops");
      Object.assign(state, { graph, digest, text });
      if (!digest) stored.value = "";
      go.disabled = false;
      const size = `${graph.ops.length} ops, ${graph.tensors.length} tensors`;
      showStatus(`${graph.name || given.name}: ${size}`);
    } catch (error) {
      showStatus(`${given.name} is no graph: ${error.message}`, true);
    }
  }

  async function sweep() {
    const methods = boxes.filter(([box]) => box.checked).map(([box]) => box.value);
    if (!methods.length) return showStatus("Choose at least one method.", true);
    state.run += 1;
    const { run } = state;
    try {
      state.digest ??= await uploaded(state.text);
    } catch (error) {
      return showStatus(`the service did not answer: ${error.message}`, true);
    }
    const graph = state.digest ?? state.graph;
    if (state.digest) location.hash = new URLSearchParams({ graph: state.digest, methods });
    const least = new Map();
    state.cells = [];
    let [done, plans] = [0, 0];
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
        if (!planned && plan.status !== 409) return showStatus(why, true);
        plans += planned;
        if (planned && share === LEAST) least.set(method, plan.peak_bytes);
        state.cells.push({ ...(planned ? plan : {}), asked: budget, share, method, planned, bound, why, plan });
      }
    }
    const refused = done - plans;
    showStatus(`${plans} plans${refused ? `, ${refused} budgets that cannot be met` : ""}`);
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

    const names = legendOf(methods);
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

  // After a reload the address has the graph and the methods.
  async function restore() {
    await list();
    const asked = new URLSearchParams(location.hash.slice(1));
    const digest = asked.get("graph");
    if (!digest) return;
    const methods = (asked.get("methods") ?? "").split(",");
    for (const [box] of boxes) box.checked = methods.includes(box.value);
    await load({ name: digest, text: async () => (await get(`/graphs/${digest}`)).text() }, digest);
    if (state.graph) sweep();
  }

  restore();
  return element("div", {}, drop, results);
}

function commands({ asked, method }) {
  const question = `(echo '{"budget": "${asked}", "method": "${method}", "graph": '; cat graph.json; echo '}')`;
  const curl = `${question} | curl -H 'Content-Type: application/json' -o plan.json --data-binary @- ${location.origin}/plan`;
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
