// What an adapter is asked and what it says: the JavaScript half of protocol.py, with the same roles and lines.

import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";

const REPORT_MS = 50;
const NOTE = "x".repeat(60);
const FOLDER = process.env.PEER_FOLDER;

export const dsn = process.env.PEER_DSN;
export const fair = Boolean(process.env.PEER_FAIR);

const now = () => (performance.timeOrigin + performance.now()) / 1000;
const say = (record) => process.stdout.write(JSON.stringify(record) + "\n");

// What a library prints must not get between the lines.
console.log = console.info = console.warn = console.error;

/** A package of this peer's own folder. */
export async function load(name) {
  const home = join(FOLDER, "node_modules", name);
  const { main } = JSON.parse(readFileSync(join(home, "package.json"), "utf8"));
  return import(pathToFileURL(join(home, main)));
}

function version(name) {
  const file = join(FOLDER, "node_modules", name, "package.json");
  return existsSync(file) ? `${name} ${JSON.parse(readFileSync(file, "utf8")).version}` : name;
}

// --- Handlers ---------------------------------------------------------------------------------------

let count = 0;
let first = 0;
let last = 0;
let watched = [];

export async function handle(payload) {
  last = now();
  first ||= last;
  count += 1;
  if (payload.sent) watched.push([payload.group, payload.sent, last]);
  if (payload.ms) await new Promise((resolve) => setTimeout(resolve, payload.ms));
}

function report() {
  let said = -1;
  setInterval(() => {
    if (count === said) return;
    said = count;
    say({ count, first, last, starts: watched });
    watched = [];
  }, REPORT_MS);
}

// --- Roles ------------------------------------------------------------------------------------------

/** `peer` has about, left, setup(), open(), enqueue(payloads) and work(slots). */
export async function main(peer) {
  const role = process.argv[2];
  if (role === "about") {
    const defaults = { fairness: "", always_fair: false };
    say({ ...defaults, ...peer.about, left: peer.left, version: version(peer.about.package) });
  } else if (role === "setup") {
    await peer.setup();
    say({ done: true });
    setTimeout(() => process.exit(0), 50);
  } else if (role === "enqueue") {
    await peer.open();
    say({ ready: true });
    for await (const line of createInterface({ input: process.stdin })) {
      say(await answer(peer, JSON.parse(line)));
    }
    process.exit(0);
  } else if (role === "work") {
    process.on("SIGTERM", () => process.exit(0));
    // Ends when whoever started us is gone, however that went.
    process.stdin.on("end", () => process.exit(0)).resume();
    report();
    await peer.work(Number(process.env.PEER_SLOTS ?? 0));
  }
}

async function answer(peer, request) {
  let enqueued = 0;
  let seconds = 0;
  while (enqueued < request.count) {
    const batch = [];
    for (let number = enqueued; number < Math.min(enqueued + request.batch, request.count); number++) {
      batch.push({ group: request.group || `group ${number % 100}`, ms: request.ms, sent: 0, note: NOTE });
    }
    const start = now();
    if (request.watched) for (const payload of batch) payload.sent = start;
    await peer.enqueue(batch);
    seconds += now() - start;
    enqueued += batch.length;
    if (seconds > request.seconds) break;
    if (request.pause) await new Promise((resolve) => setTimeout(resolve, request.pause * 1000));
  }
  return { enqueued, seconds };
}
