// Requests to the server: responses are cached, outdated requests are aborted, and requests are repeated where the server
// is busy or took an older request for a newer one.

const CACHE_BYTES = 96 * 2 ** 20;
const GRACE = 150; // ms to wait for a running request before a newer one aborts it

export class RequestError extends Error {
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

export async function request(path, options = {}) {
  for (let attempt = 0; ; attempt++) {
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError" || options.signal?.aborted) throw error;
      throw new RequestError(0, "The server does not answer. Is it still running?");
    }
    if (response.ok) return response;
    const { problem } = await response.json().catch(() => ({ problem: response.statusText }));
    // An older request that was aborted can reach the server after the newer one and cancel it there.
    const overtaken = response.status === 409;
    if (!(overtaken || response.status === 503) || attempt === 8) throw new RequestError(response.status, problem);
    const wait = overtaken ? 50 : 1000 * Number(response.headers.get("Retry-After") ?? 1);
    await sleep(wait * (0.5 + Math.random()), options.signal);
  }
}

export const json = async (path, options) => (await request(path, options)).json();

const TYPES = { U8: Uint8Array, I8: Int8Array, F32: Float32Array };

// The tensors of a safetensors file: {name: {data, shape}}, and `about`.
export function parseSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = { about: JSON.parse(header.__metadata__.veca) };
  delete header.__metadata__;
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    const [start, end] = data_offsets.map((offset) => offset + 8 + length);
    tensors[name] = { data: new TYPES[dtype](buffer.slice(start, end)), shape };
  }
  return tensors;
}

const cache = new Map(); // path → {tensors, bytes}, the least recently used first
let cachedBytes = 0;

export const cached = (path) => cache.get(path)?.tensors;

// The tensors at a path; they never change.
export async function load(path, options) {
  let entry = cache.get(path);
  if (entry) cache.delete(path);
  else {
    const buffer = await (await request(path, options)).arrayBuffer();
    entry = { tensors: parseSafetensors(buffer), bytes: buffer.byteLength };
    cachedBytes += entry.bytes;
  }
  cache.set(path, entry);
  for (const [old, { bytes }] of cache) {
    if (cachedBytes <= CACHE_BYTES || cache.size <= 2) break;
    cache.delete(old);
    cachedBytes -= bytes;
  }
  return entry.tensors;
}

// One request at a time: of those made meanwhile, only the newest is sent next.
export class LatestRequest {
  #current = null;
  #turn = 0;

  abort() {
    this.#turn++;
    this.#current?.controller.abort();
  }

  async run(send) {
    const turn = ++this.#turn;
    const previous = this.#current;
    if (previous) {
      const wait = GRACE - (performance.now() - previous.since);
      if (wait > 0) await Promise.race([previous.done, sleep(wait)]);
      if (turn !== this.#turn) return undefined;
      previous.controller.abort();
    }
    const controller = new AbortController();
    let finish;
    const running = { controller, since: performance.now(), done: new Promise((resolve) => (finish = resolve)) };
    this.#current = running;
    try {
      return await send(controller.signal);
    } catch (error) {
      if (error.name === "AbortError" || controller.signal.aborted) return undefined;
      throw error;
    } finally {
      finish();
      if (this.#current === running) this.#current = null;
    }
  }
}
