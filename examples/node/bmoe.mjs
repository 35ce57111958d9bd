// libbmoe in a Node.js process, through koffi (npm install koffi). A host takes this file along.
//
//   const engine = new Library("/usr/local/lib/libbmoe.so.4").open("model.gguf");
//   const [a, b] = engine.decide("Which is a fruit? A) apple B) table.", ["A", "B"]);
//   engine.close();
//
// Calls block the thread they are made on: a server makes them on a worker. The contract: bmoe.h.

import koffi from "koffi";

const ABI = 4;
const OK = 0;
const TOO_SMALL = -4;

const Handle = koffi.pointer("bmoe_engine", koffi.opaque());
const Span = koffi.struct("bmoe_span", { begin: "size_t", end: "size_t" });
const Message = koffi.struct("bmoe_message", { role: "const char *", content: "const char *", content_bytes: "size_t" });
const OpenParams = koffi.struct("bmoe_open_params", {
  size_bytes: "size_t",
  n_ctx: "int32_t",
  n_ubatch: "int32_t",
  n_threads: "int32_t",
  kv_type: "int32_t",
  inspect: "int32_t",
  log_level: "int32_t",
  chat_template: "const char *",
  chat_template_bytes: "size_t",
  log: "void *",
  log_user: "void *",
  progress: "void *",
  progress_user: "void *",
  poll: "void *",
  poll_user: "void *",
  stream: "int32_t",
  io_threads: "int32_t",
  cache_bytes: "int64_t",
  no_direct: "int32_t",
  prefetch: "int32_t",
  no_repack: "int32_t",
  n_expert_used: "int32_t",
  dense: "int32_t",
  router: "void *",
  router_user: "void *",
  layer: "void *",
  layer_user: "void *",
  prefill_device: "const char *",
  prefill_min_tokens: "int32_t",
  prefill_loaders: "int32_t",
});

/** What of bmoe.h is described here, for the test that compares it with the compiler's view. */
export const STRUCTS = { Span, Message, OpenParams };

export class BmoeError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export class Library {
  constructor(path) {
    const library = koffi.load(path);
    const bmoe = (signature) => library.func(signature);
    const found = bmoe("int32_t bmoe_abi_version()")();
    if (found !== ABI) throw new Error(`${path} has ABI ${found}, this file is written for ${ABI}`);
    this.initParams = bmoe("void bmoe_open_params_init(_Out_ bmoe_open_params *)");
    this.openModel = bmoe("int32_t bmoe_open(_Out_ bmoe_engine **, const char *, bmoe_open_params *, void *, size_t)");
    this.close = bmoe("void bmoe_close(bmoe_engine *)");
    this.lastError = bmoe("const char *bmoe_last_error(bmoe_engine *)");
    this.render = bmoe(
      "int32_t bmoe_render(bmoe_engine *, bmoe_message *, size_t, int32_t, int32_t, void *, size_t, _Out_ size_t *, " +
        "void *, size_t, _Out_ size_t *)",
    );
    this.tokenize = bmoe(
      "int32_t bmoe_tokenize(bmoe_engine *, void *, size_t, void *, size_t, int32_t, void *, size_t, _Out_ size_t *)",
    );
    this.prefill = bmoe("int32_t bmoe_prefill(bmoe_engine *, void *, size_t, void *)");
    this.logits = bmoe("int32_t bmoe_logits(bmoe_engine *, void *, size_t, _Out_ size_t *)");
    this.dropState = bmoe("int32_t bmoe_state_drop(bmoe_engine *)");
  }

  /** options: fields of bmoe_open_params that are numbers, for example { n_ctx: 2048, stream: 1 }. */
  open(model, options = {}) {
    const params = {};
    this.initParams(params);
    const error = Buffer.alloc(512);
    const engine = [null];
    const status = this.openModel(engine, model, { ...params, ...options }, error, error.length);
    if (status !== OK) throw new BmoeError(status, error.toString("utf8", 0, error.indexOf(0)));
    return new Engine(this, engine[0]);
  }
}

/** A whole text as data: no control token is made of it. */
function dataSpan(bytes) {
  return new BigUint64Array([0n, BigInt(bytes.length)]);
}

export class Engine {
  #bmoe;
  #handle;

  constructor(library, handle) {
    this.#bmoe = library;
    this.#handle = handle;
  }

  close() {
    this.#bmoe.close(this.#handle);
  }

  /** Log-probability of each choice's first token over the whole vocabulary, after one prefill of the question. */
  decide(question, choices) {
    const firsts = choices.map((choice) => this.#firstToken(choice));
    if (new Set(firsts).size < firsts.length) throw new Error("two choices begin with the same token");
    this.#check(this.#bmoe.dropState(this.#handle));
    const tokens = this.#promptTokens(question);
    this.#check(this.#bmoe.prefill(this.#handle, tokens, tokens.length, null));
    return logProbabilities(this.#logits(), firsts);
  }

  #promptTokens(question) {
    const content = Buffer.from(question, "utf8");
    const message = { role: "user", content, content_bytes: content.length };
    const nBytes = [0];
    const nSpans = [0];
    const render = (text, spans) =>
      this.#bmoe.render(this.#handle, [message], 1, 0, 1, text, text.length, nBytes, spans, spans.length / 2, nSpans);
    this.#wanted(render(Buffer.alloc(0), new BigUint64Array(0)));
    const text = Buffer.alloc(Number(nBytes[0]));
    const spans = new BigUint64Array(2 * Number(nSpans[0]));
    this.#check(render(text, spans));
    return this.#tokenize(text, spans, 1);
  }

  #tokenize(text, spans, addBos) {
    const n = [0];
    const tokenize = (tokens) =>
      this.#bmoe.tokenize(this.#handle, text, text.length, spans, spans.length / 2, addBos, tokens, tokens.length, n);
    this.#wanted(tokenize(new Int32Array(0)));
    const tokens = new Int32Array(Number(n[0]));
    this.#check(tokenize(tokens));
    return tokens;
  }

  #firstToken(choice) {
    const bytes = Buffer.from(choice, "utf8");
    const tokens = this.#tokenize(bytes, dataSpan(bytes), 0);
    if (tokens.length === 0) throw new Error(`the choice ${JSON.stringify(choice)} has no token to be scored by`);
    return tokens[0];
  }

  #logits() {
    const n = [0];
    this.#wanted(this.#bmoe.logits(this.#handle, new Float32Array(0), 0, n));
    const row = new Float32Array(Number(n[0]));
    this.#check(this.#bmoe.logits(this.#handle, row, row.length, n));
    return row;
  }

  #check(status) {
    if (status < 0) throw new BmoeError(status, this.#bmoe.lastError(this.#handle));
  }

  #wanted(status) {
    if (status !== TOO_SMALL) this.#check(status);
  }
}

/** By the arithmetic that bmoe itself uses, to the last bit: docs/c-api.md. */
export function logProbabilities(logits, tokens) {
  const top = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  let sum = 0;
  let lost = 0; // Kahan's sum
  for (const logit of logits) {
    const term = Math.exp(logit - top) - lost;
    const next = sum + term;
    lost = next - sum - term;
    sum = next;
  }
  const grid = 2 ** 32;
  const norm = Math.round(Math.log(sum) * grid) / grid;
  return tokens.map((token) => logits[token] - top - norm);
}
