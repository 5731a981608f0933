// graphile-worker: LISTEN/NOTIFY; a local queue fetches and completes jobs in batches.

import { dsn, fair, handle, load, main } from "./protocol.mjs";

const library = process.argv[2] === "about" ? {} : await load("graphile-worker");
const logger = library.Logger && new library.Logger(() => () => {});
let utils;

await main({
  about: {
    package: "graphile-worker",
    configuration: "concurrentJobs 24, localQueue of 500, complete and fail batched, pool of 10",
    fairness: "queueName = group: one job of a group at a time, in order",
    lacks: ["fair order between groups", "a cap above one per group", "history (jobs are deleted)"],
    docs: [
      "https://worker.graphile.org/docs/performance",
      "https://worker.graphile.org/docs/config",
      "https://worker.graphile.org/docs/library/add-job",
    ],
  },
  left: "select count(*) from graphile_worker._private_jobs",

  async setup() {
    await library.runMigrations({ connectionString: dsn, logger });
  },

  async open() {
    utils = await library.makeWorkerUtils({ connectionString: dsn, logger });
  },

  enqueue: (payloads) =>
    utils.addJobs(
      payloads.map((payload) => ({
        identifier: "work",
        payload,
        ...(fair ? { queueName: payload.group } : {}),
      })),
    ),

  async work(slots) {
    const worker = { connectionString: dsn, concurrentJobs: slots || 24, maxPoolSize: 10, logger };
    // What is fetched ahead cannot be overtaken: with few slots nothing is.
    if (!slots) Object.assign(worker, { localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 });
    await library.run({ preset: { worker }, taskList: { work: handle }, noHandleSignals: true });
  },
});
