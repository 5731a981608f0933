// pg-boss: workers that fetch in batches, woken by NOTIFY.

import { dsn, fair, handle, load, main } from "./protocol.mjs";

const GROUP_LIMIT = 4;
let boss;

async function start(options) {
  const { PgBoss } = await load("pg-boss");
  boss = new PgBoss({ connectionString: dsn, ...options });
  boss.on("error", (error) => console.error(error));
  await boss.start();
}

await main({
  about: {
    package: "pg-boss",
    configuration: "batches of 500 by 2 local workers, useListenNotify, burstWhenBatchFull, poll 0.5 s",
    fairness: `groupConcurrency: at most ${GROUP_LIMIT} of a group at once`,
    lacks: ["fair order between groups"],
    docs: ["https://timgit.github.io/pg-boss/#/./api/workers", "https://timgit.github.io/pg-boss/#/./api/jobs"],
  },
  left: "select count(*) from pgboss.job where name = 'work' and state < 'completed'",

  async setup() {
    await start({ supervise: false, schedule: false });
    await boss.createQueue("work", { notify: true });
    await boss.stop();
  },

  open: () => start({ supervise: false, schedule: false }),

  enqueue: (payloads) =>
    boss.insert("work", payloads.map((data) => (fair ? { data, group: { id: data.group } } : { data }))),

  async work(slots) {
    await start({ useListenNotify: true, max: 20 });
    // A worker goes on at once after a full batch only, and not after one of a single job.
    const size = slots ? { localConcurrency: slots / 2, batchSize: 2 } : { localConcurrency: 2, batchSize: 500 };
    const options = { pollingIntervalSeconds: 0.5, burstWhenBatchFull: true, ...size };
    if (fair) options.groupConcurrency = GROUP_LIMIT;
    await boss.work("work", options, (jobs) => Promise.all(jobs.map((job) => handle(job.data))));
  },
});
