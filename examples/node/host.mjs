// A host in Node.js: it starts a session, asks it, and ends it. Nothing but Node is needed.
//
//   node examples/node/host.mjs bmoe session -m model.gguf --decide
//
// Session is what a program of yours would take; main() shows its use. The lines: docs/telemetry.md.

import { spawn } from "node:child_process";
import { createInterface } from "node:readline";

const FINAL = new Set(["DECIDE", "DONE", "ERROR"]);

/** One `bmoe session`. Requests may be sent ahead; each gives a promise of its final line's object. */
export class Session {
  #child;
  #pending = new Map(); // id → {resolve, reject, onToken}
  #nextId = 1;
  #serving = null; // the id of the last BMOE_BEGIN: whose tokens BMOE_PROGRESS tells
  #opened;
  #ended;

  constructor(command, args) {
    this.#child = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
    this.#child.stdin.on("error", () => {}); // it ended: `ended` tells how
    this.#opened = {};
    /** Resolves with BMOE_READY's object when requests are served. */
    this.ready = new Promise((resolve, reject) => Object.assign(this.#opened, { resolve, reject }));
    this.ready.catch(() => {}); // who does not wait for it hears of it from the requests
    this.#ended = new Promise((resolve) => this.#child.on("close", (code, signal) => resolve({ code, signal })));
    this.#child.on("error", (error) => this.#fail(error));
    this.#ended.then(({ code, signal }) => this.#fail(new Error(`the session ended with ${signal ?? code}`)));
    createInterface({ input: this.#child.stdout, crlfDelay: Infinity }).on("line", (line) => this.#take(line));
  }

  decide(request) {
    return this.#ask({ cmd: "decide", ...request });
  }

  /** onToken is called with each BMOE_PROGRESS's object. */
  generate(request, onToken = () => {}) {
    return this.#ask({ cmd: "generate", ...request }, onToken);
  }

  /** Stop the request being served; its promise resolves with cancelled true, or with what came before. */
  cancel() {
    this.#send({ cmd: "cancel" });
  }

  /** Let it serve what was sent, and wait for its end. */
  async close() {
    this.#send({ cmd: "close" });
    return this.#ended;
  }

  get pid() {
    return this.#child.pid;
  }

  #ask(request, onToken) {
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#pending.set(id, { resolve, reject, onToken });
      this.#send({ ...request, id });
    });
  }

  #send(request) {
    this.#child.stdin.write(`${JSON.stringify(request)}\n`);
  }

  #take(line) {
    const blank = line.indexOf(" ");
    const tag = line.slice(0, blank).replace(/^BMOE_/, "");
    const record = JSON.parse(line.slice(blank + 1));
    if (tag === "READY") this.#opened.resolve(record);
    else if (tag === "BEGIN") this.#serving = record.id;
    else if (tag === "PROGRESS") this.#pending.get(this.#serving)?.onToken?.(record);
    else if (FINAL.has(tag)) this.#settle(tag, record);
    // Tags that are not known are passed over: later versions may add some.
  }

  #settle(tag, record) {
    const asked = this.#pending.get(record.id);
    this.#pending.delete(record.id);
    if (tag !== "ERROR") asked?.resolve(record);
    else if (asked) asked.reject(new Error(record.msg));
    else this.#fail(new Error(record.msg));
  }

  #fail(error) {
    this.#opened.reject(error);
    for (const { reject } of this.#pending.values()) reject(error);
    this.#pending.clear();
  }
}

async function main([command, ...args]) {
  const session = new Session(command, args);
  const ready = await session.ready;
  console.error(`${ready.arch}, ${ready.n_ctx} tokens of context, open after ${ready.load_s.toFixed(2)} s`);
  const report = { ready };

  // Two decisions sent at once: the second continues the first one's prefix.
  const history = "Task: turn on Wi-Fi. History: ";
  const choices = ["A", "B", "é"];
  const asked = [
    session.decide({ prefix: history, suffix: "Screen: home. A) Settings B) Camera. Which letter?", choices }),
    session.decide({ prefix: `${history}opened Settings. `, suffix: "A) Network B) Display. Which letter?", choices }),
  ];
  report.decisions = await Promise.all(asked);

  // What is wrong with a request rejects it alone.
  report.refusal = await session.decide({ prefix: "p", suffix: "s", choices: "AB" }).catch((error) => error.message);

  // A turn, as it comes.
  const deltas = [];
  report.turn = await session.generate({ prompt: "Say something.", n_predict: 16 }, (step) => deltas.push(step.delta_text));
  report.deltas = deltas;

  // A turn that is stopped after its third token.
  const stopped = session.generate({ prompt: "Say a lot.", n_predict: 100000 }, (step) => {
    if (step.step === 3) session.cancel();
  });
  report.stopped = await stopped;

  report.end = await session.close();
  console.log(JSON.stringify(report));
}

if (process.argv[1] === new URL(import.meta.url).pathname) {
  main(process.argv.slice(2)).catch((error) => {
    console.error(`host: ${error.message}`);
    process.exitCode = 1;
  });
}
