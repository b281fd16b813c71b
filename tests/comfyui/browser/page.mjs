// Opens ComfyUI's own page in chromium, loads the pack's templates as the template browser does, and tells what it saw as JSON.
// Input on stdin: {url, chromium, modules, vue, folder, templates: [{name, run, player}], follow: {name, run}, single, language}. `run` holds widget
// values, {"Magi2Sampler": {"steps": 3}}; `follow` is run, and looked at from a second page and after a reload; `single` is the type of
// a node that is run alone. Used by test_browser.py and by hand.
import { createRequire } from "node:module";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const job = JSON.parse(readFileSync(0, "utf8"));
const { chromium } = createRequire(join(job.modules, "package.json"))("playwright-core");
mkdirSync(job.folder, { recursive: true });

const LONG = 240000;
const errors = [];
const switches = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const browser = await chromium.launch({
  executablePath: job.chromium,
  args: [...switches, "--disable-component-update", "--disable-sync", "--autoplay-policy=no-user-gesture-required"],
});
const settings = {
  "Comfy.TutorialCompleted": true,
  "Comfy.InstalledVersion": "1.58.1",
  "Comfy.VueNodes.Enabled": job.vue,
  "Comfy.Workflow.WorkflowTabsPosition": "Topbar",
  "Comfy.Locale": job.language ?? "en",
  "Comfy.Graph.CanvasInfo": false,
  "Comfy.Minimap.Visible": false,
};
await fetch(`${job.url}/api/settings`, { method: "POST", body: JSON.stringify(settings), headers: { "Content-Type": "application/json" } });

const ready = (page) =>
  page.waitForFunction(() => window.app?.graph && window.LiteGraph?.registered_node_types?.Magi2Sampler, null, { timeout: 90000 });

/** A page of a browser of its own: other cookies, another client of the server. */
async function open() {
  const context = await browser.newContext({ viewport: { width: 1500, height: 680 }, deviceScaleFactor: 1 });
  await context.route("**/*", (route) =>
    ["127.0.0.1", "localhost"].includes(new URL(route.request().url()).hostname) || !route.request().url().startsWith("http")
      ? route.continue()
      : route.abort(),
  );
  const page = await context.newPage();
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("dialog", (dialog) => dialog.accept());
  await page.goto(job.url, { waitUntil: "domcontentloaded" });
  await ready(page);
  return page;
}

const shot = (page, name) => page.screenshot({ path: join(job.folder, `${name}.png`) });

async function load(page, name) {
  const served = await page.evaluate(async (name) => {
    const base = `/api/workflow_templates/ComfyUI-MAGI2/${name}`;
    const [graph, picture] = await Promise.all([fetch(`${base}.json`), fetch(`${base}.jpg`)]);
    await window.app.loadGraphData(await graph.json());
    return { thumbnail: picture.status, listed: (await (await fetch("/api/workflow_templates")).json())["ComfyUI-MAGI2"] };
  }, name);
  await page.waitForTimeout(800);
  await page.evaluate(() => {
    const { ds, canvas } = window.app.canvas;
    const boxes = window.app.graph._nodes.map((node) => node.getBounding());
    const left = Math.min(...boxes.map((box) => box[0]));
    const top = Math.min(...boxes.map((box) => box[1]));
    const right = Math.max(...boxes.map((box) => box[0] + box[2]));
    const bottom = Math.max(...boxes.map((box) => box[1] + box[3]));
    const scale = Math.min(1, (canvas.clientWidth - 120) / (right - left), (canvas.clientHeight - 200) / (bottom - top));
    ds.scale = scale;
    ds.offset = [80 / scale - left, 150 / scale - top];
    window.app.canvas.setDirty(true, true);
  });
  await page.waitForTimeout(600);
  return served;
}

const facts = (page) =>
  page.evaluate(async () => {
    const { output, workflow } = await window.app.graphToPrompt();
    const nodes = window.app.graph._nodes;
    const missing = nodes.filter((node) => node.has_errors || !window.LiteGraph.registered_node_types[node.type]);
    const overlapping = nodes.flatMap((one, index) =>
      nodes.slice(index + 1).flatMap((other) => {
        const [[x, y, w, h], [left, top, wide, high]] = [one.getBounding(), other.getBounding()];
        return x < left + wide && left < x + w && y < top + high && top < y + h ? [`${one.title} / ${other.title}`] : [];
      }),
    );
    const dialog = [...document.querySelectorAll('[role="dialog"]')].map((item) => item.innerText);
    return { prompt: output, workflow, missing: missing.map((node) => node.type), overlapping, dialog };
  });

/** Sets the widgets, queues the graph and notes what the page shows until it is over: window.seen, window.ended. */
async function queue(page, widgets) {
  await page.evaluate((widgets) => {
    for (const node of window.app.graph._nodes)
      for (const widget of node.widgets ?? []) widget.value = widgets[node.type]?.[widget.name] ?? widget.value;
    const api = window.app.api;
    const seen = (window.seen = { said: [], shown: [], bar: 0, title: [], preview: 0, latents: [], badge: false });
    const add = (list, text) => list.includes(text) || list.push(text);
    if (!window.listens) {
      api.addEventListener("progress_text", (event) => add(window.seen.said, String(event.detail?.text ?? "")));
      api.addEventListener("b_preview_with_metadata", () => (window.seen.preview += 1));
      api.addEventListener("executed", (event) => window.seen.latents.push(...(event.detail?.output?.latents ?? [])));
      for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
        api.addEventListener(kind, (event) => (window.ended = { kind, detail: event.detail }));
      window.listens = true;
    }
    window.ended = null;
    const look = setInterval(() => {
      const text = document.body.innerText;
      for (const said of seen.said) if (said && text.includes(said)) add(seen.shown, said);
      seen.bar = Math.max(seen.bar, ...window.app.graph._nodes.map((node) => node.progress ?? 0));
      add(seen.title, document.title);
      seen.badge ||= document.getElementById("magi2-progress") !== null;
      if (window.ended) clearInterval(look);
    }, 50);
    void window.app.queuePrompt(0, 1);
  }, widgets);
}

const players = (page) =>
  page.evaluate(() =>
    [...document.querySelectorAll("video, audio")]
      // the Vue nodes draw the controls of a sound themselves, around an element without a size
      .filter((item) => [item, item.parentElement].some((box) => box.getBoundingClientRect().width > 40 && box.getBoundingClientRect().height > 20))
      .map((item) => ({ tag: item.localName, source: decodeURIComponent(item.currentSrc || item.src), seconds: item.duration, width: item.videoWidth })),
  );

/** Node type -> what our script has written on the node, and whether the page shows it. */
const results = (page) =>
  page.evaluate(() => {
    const fields = [...document.querySelectorAll("textarea")].filter((item) => item.getBoundingClientRect().width > 40);
    const told = window.app.graph._nodes.flatMap((node) => {
      const widget = node.widgets?.find((item) => item.name === "magi2_result");
      return widget ? [[node.type, { text: widget.value, shown: fields.some((item) => item.value === widget.value) }]] : [];
    });
    return Object.fromEntries(told);
  });

async function runSingle(page, type) {
  await page.evaluate((type) => {
    window.app.graph.clear();
    const node = window.LiteGraph.createNode(type);
    node.pos = [200, 200];
    window.app.graph.add(node);
  }, type);
  await queue(page, {});
  await page.waitForFunction(() => window.ended, null, { timeout: 60000 });
  await page.waitForTimeout(1000);
  await shot(page, type);
  return { ended: await page.evaluate(() => window.ended), results: await results(page) };
}

async function execute(page, { name, run, player }) {
  await queue(page, run);
  const halfway = () => window.ended || (window.app.graph._nodes.some((node) => node.progress >= 0.4) && window.seen.preview);
  await page.waitForFunction(halfway, null, { timeout: LONG });
  await page.waitForTimeout(150);
  await shot(page, `${name}_running`);
  await page.waitForFunction(() => window.ended, null, { timeout: LONG });
  if (player) {
    const loaded = (tag) => [...document.querySelectorAll(tag)].some((item) => item.duration > 0);
    await page.waitForFunction(loaded, player, { timeout: 15000 }).catch(() => null); // that there is none is told below
  }
  await page.waitForTimeout(1000);
  await shot(page, `${name}_done`);
  const { ended, seen } = await page.evaluate(() => ({ ended: window.ended, seen: window.seen }));
  const { prompt, workflow } = await facts(page);
  return { ended, seen, players: await players(page), results: await results(page), prompt, workflow };
}

const badge = (page) => page.evaluate(() => document.getElementById("magi2-progress")?.textContent ?? null);

/** The badge while it moves: two different texts of it, and the buttons it lies on. */
async function watch(page, name) {
  await page.waitForFunction(() => /step \d+\/\d+/.test(document.getElementById("magi2-progress")?.textContent ?? ""), null, { timeout: 30000 });
  const first = await badge(page);
  await page.waitForFunction((first) => document.getElementById("magi2-progress")?.textContent !== first, first, { timeout: 30000 });
  const second = await badge(page);
  await shot(page, name);
  const covers = await page.evaluate(() => {
    const box = document.getElementById("magi2-progress")?.getBoundingClientRect();
    const meets = (other) => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom;
    const buttons = [...document.querySelectorAll("button")].filter((item) => item.getBoundingClientRect().width > 0);
    return buttons.filter((item) => meets(item.getBoundingClientRect())).map((item) => item.ariaLabel || item.innerText || item.className);
  });
  return { texts: [first, second], covers };
}

async function follow(page, { name, run }) {
  await load(page, name);
  await queue(page, run);
  await page.waitForFunction(() => window.seen.shown.some((text) => text.includes("step")), null, { timeout: LONG });
  const own = await badge(page);
  const other = await open();
  const second = await watch(other, "second_page");
  await page.reload({ waitUntil: "domcontentloaded" });
  await ready(page);
  const reloaded = await watch(page, "reloaded_page");
  await page.evaluate(() => window.app.api.interrupt(null));
  const gone = () => document.getElementById("magi2-progress") === null;
  for (const each of [page, other]) await each.waitForFunction(gone, null, { timeout: 30000 });
  return { own, second, reloaded };
}

const page = await open();
await page.waitForTimeout(1000);
const report = { errors, templates: {} };
for (const template of job.templates) {
  const served = await load(page, template.name);
  const told = await facts(page);
  await shot(page, `${template.name}_open`);
  report.templates[template.name] = { ...served, ...told, run: template.run ? await execute(page, template) : null };
}
if (job.single) report.single = await runSingle(page, job.single);
if (job.follow) report.follow = await follow(page, job.follow);
await browser.close();
console.log(JSON.stringify(report));
