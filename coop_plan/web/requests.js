// Requests to the service: graphs by content, and plans as jobs that are followed and cancelled.

const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

const FIRST_LOOK = 0.1; // seconds until the state of a job is requested; doubled up to the last
const LAST_LOOK = 1;
const FULL = [429, 503];

// An answer that is not the wanted one; `field` is the id of the field that is wrong, or "".
export class Refusal extends Error {
  constructor(message, { field = "", status = 0, problem = {} } = {}) {
    super(message);
    Object.assign(this, { field, status, problem });
  }
}

function wrongField(status, pointer, withToken) {
  if (status === 401 || (status === 403 && withToken)) return "token";
  const name = (pointer ?? "").split("/")[1] ?? "";
  const own = ["graph", "time_limit", "host_budget"].includes(name) ? name : "";
  return { budget: "budgets", method: "methods" }[name] ?? own;
}

export class Service {
  constructor(token) {
    this.token = token; // returns the token, or ""
  }

  async send(address, { headers = {}, ...rest } = {}) {
    const token = this.token();
    const all = token ? { ...headers, Authorization: `Bearer ${token}` } : headers;
    let answer;
    try {
      answer = await fetch(address, { ...rest, headers: all });
    } catch (error) {
      throw new Refusal(`the service did not answer: ${error.message}`);
    }
    if (answer.ok) return answer;
    const { status } = answer;
    const problem = await answer.json().catch(() => ({}));
    let message = problem.detail || problem.title || answer.statusText;
    if (status === 401) message = token ? "the service does not know this token" : "the service needs a token";
    const again = Number(answer.headers.get("Retry-After")) || 1;
    throw new Refusal(message, { status, problem: { ...problem, again }, field: wrongField(status, problem.pointer, token) });
  }

  async get(address) {
    return (await this.send(address)).json();
  }

  put(digest, document) {
    return this.send(`/graphs/${digest}`, { method: "PUT", headers: { "Content-Type": "application/json" }, body: document });
  }

  // Stores a graph and returns its digest, or null if the service cannot store it now. Browsers
  // compute SHA-256 in secure contexts only; elsewhere the service names it, by a first upload.
  async upload(text) {
    const document = new TextEncoder().encode(text);
    let digest = `sha256:${"0".repeat(64)}`;
    if (globalThis.crypto?.subtle) {
      const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", document));
      digest = `sha256:${Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    }
    for (;;) {
      try {
        await this.put(digest, document);
        return digest;
      } catch (error) {
        const named = error.problem?.digest;
        if (error.status === 507) return null;
        if (!named || named === digest) throw error;
        digest = named;
      }
    }
  }

  // The plan of a request. `seen(state)` gets each state of its job, with its `address`, and throws
  // to end the wait.
  async plan(request, seen) {
    const headers = { "Content-Type": "application/json", Prefer: "respond-async, wait=0" };
    const body = JSON.stringify(request);
    for (;;) {
      let answer;
      try {
        answer = await this.send("/plan", { method: "POST", headers, body });
      } catch (error) {
        if (!FULL.includes(error.status)) throw error;
        seen({ state: "queued", message: error.message });
        await pause(error.problem.again);
        continue;
      }
      if (answer.status !== 202) return answer.json();
      await this.follow(answer.headers.get("Location"), seen);
    }
  }

  // Returns when the job has a plan or a refusal, which is the answer to the same request.
  async follow(address, seen) {
    for (let seconds = FIRST_LOOK; ; seconds = Math.min(2 * seconds, LAST_LOOK)) {
      await pause(seconds);
      const state = await this.get(address);
      seen({ ...state, address });
      if (state.state === "cancelled") throw new Refusal("cancelled");
      if (state.state === "failed") throw new Refusal(state.problem?.detail ?? "the solve failed");
      if (state.state === "done") return;
    }
  }
}
