// Questions to the server: answers are kept, stale questions are withdrawn, others are asked again where the server is busy
// or took an older question for a newer one.

const KEPT = 96 * 2 ** 20; // bytes of answers
const GRACE = 150; // ms an answer on its way is waited for before a newer question withdraws it

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const sleep = (ms, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });

export async function ask(path, options = {}) {
  for (let attempt = 0; ; attempt++) {
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError" || options.signal?.aborted) throw error;
      throw new Problem(0, "The server does not answer. Is it still running?");
    }
    if (response.ok) return response;
    const { problem } = await response.json().catch(() => ({ problem: response.statusText }));
    // An older question that was withdrawn can come to the server after the newer one, and put it aside.
    const overtaken = response.status === 409;
    if (!(overtaken || response.status === 503) || attempt === 8) throw new Problem(response.status, problem);
    const wait = overtaken ? 50 : 1000 * Number(response.headers.get("Retry-After") ?? 1);
    await sleep(wait * (0.5 + Math.random()), options.signal);
  }
}

export const json = async (path, options) => (await ask(path, options)).json();

const TYPES = { U8: Uint8Array, I8: Int8Array, F32: Float32Array };

// The tensors of a safetensors file: {name: {data, shape}}, and `about`.
export function tensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const found = { about: JSON.parse(header.__metadata__.veca) };
  delete header.__metadata__;
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    const [start, end] = data_offsets.map((offset) => offset + 8 + length);
    found[name] = { data: new TYPES[dtype](buffer.slice(start, end)), shape };
  }
  return found;
}

const kept = new Map();
let held = 0;

export const recall = (path) => kept.get(path)?.found;

// The tensors at a path, which never change there.
export async function load(path, options) {
  let entry = kept.get(path);
  if (entry) kept.delete(path);
  else {
    const buffer = await (await ask(path, options)).arrayBuffer();
    entry = { found: tensors(buffer), bytes: buffer.byteLength };
    held += entry.bytes;
  }
  kept.set(path, entry); // the last of the map is the last used
  for (const [old, { bytes }] of kept) {
    if (held <= KEPT || kept.size <= 2) break;
    kept.delete(old);
    held -= bytes;
  }
  return entry.found;
}

// One question at a time: only the newest of those asked meanwhile is asked next.
export class Latest {
  #current = null;
  #turn = 0;

  withdraw() {
    this.#turn++;
    this.#current?.controller.abort();
  }

  async run(question) {
    const turn = ++this.#turn;
    const before = this.#current;
    if (before) {
      const left = GRACE - (performance.now() - before.since);
      if (left > 0) await Promise.race([before.done, sleep(left)]);
      if (turn !== this.#turn) return undefined;
      before.controller.abort();
    }
    const controller = new AbortController();
    let finish;
    const mine = { controller, since: performance.now(), done: new Promise((resolve) => (finish = resolve)) };
    this.#current = mine;
    try {
      return await question(controller.signal);
    } catch (error) {
      if (error.name === "AbortError" || controller.signal.aborted) return undefined;
      throw error;
    } finally {
      finish();
      if (this.#current === mine) this.#current = null;
    }
  }
}
