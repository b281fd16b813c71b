// Opens ComfyUI's own page in chromium, loads the pack's templates as the template browser does, and tells what it saw as JSON.
// Input on stdin: {url, chromium, modules, vue, folder, templates: [{name, run, steps}], language}. Used by test_browser.py and by hand.
import { createRequire } from "node:module";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const job = JSON.parse(readFileSync(0, "utf8"));
const { chromium } = createRequire(join(job.modules, "package.json"))("playwright-core");
mkdirSync(job.folder, { recursive: true });

const switches = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const browser = await chromium.launch({
  executablePath: job.chromium,
  args: [...switches, "--disable-component-update", "--disable-sync", "--autoplay-policy=no-user-gesture-required"],
});
const context = await browser.newContext({ viewport: { width: 1500, height: 680 }, deviceScaleFactor: 1 });
await context.route("**/*", (route) =>
  ["127.0.0.1", "localhost"].includes(new URL(route.request().url()).hostname) || !route.request().url().startsWith("http")
    ? route.continue()
    : route.abort(),
);
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

const page = await context.newPage();
const errors = [];
page.on("pageerror", (error) => errors.push(String(error)));
await page.goto(job.url, { waitUntil: "domcontentloaded" });
await page.waitForFunction(() => window.app?.graph && window.LiteGraph?.registered_node_types?.Magi2Sampler, null, { timeout: 90000 });
await page.waitForTimeout(1500);

async function load(name) {
  const served = await page.evaluate(async (name) => {
    const base = `/api/workflow_templates/ComfyUI-MAGI2/${name}`;
    const [graph, picture] = await Promise.all([fetch(`${base}.json`), fetch(`${base}.jpg`)]);
    await window.app.loadGraphData(await graph.json());
    return { thumbnail: picture.status, listed: (await (await fetch("/api/workflow_templates")).json())["ComfyUI-MAGI2"] };
  }, name);
  await page.waitForTimeout(1000);
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
  await page.waitForTimeout(800);
  return served;
}

async function facts() {
  return page.evaluate(async () => {
    const { output, workflow } = await window.app.graphToPrompt();
    const missing = window.app.graph._nodes.filter((node) => node.has_errors || !window.LiteGraph.registered_node_types[node.type]);
    const titles = Object.fromEntries(window.app.graph._nodes.map((node) => [node.id, node.title]));
    const dialog = [...document.querySelectorAll('[role="dialog"]')].map((item) => item.innerText);
    return { prompt: output, workflow, missing: missing.map((node) => node.type), titles, dialog };
  });
}

async function execute(name, steps) {
  await page.evaluate((steps) => {
    for (const node of window.app.graph._nodes)
      for (const widget of node.widgets ?? []) if (node.type === "Magi2Sampler" && widget.name === "steps") widget.value = steps;
    window.seen = { progress: 0, status: [], preview: 0 };
    const api = window.app.api;
    api.addEventListener("progress_state", () => (window.seen.progress += 1));
    api.addEventListener("progress_text", (event) => window.seen.status.push(String(event.detail?.text ?? "")));
    api.addEventListener("b_preview_with_metadata", () => (window.seen.preview += 1));
  }, steps);
  const result = page.evaluate(
    () =>
      new Promise((resolve) => {
        for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
          window.app.api.addEventListener(kind, (event) => {
            window.seen.over = true;
            resolve({ kind, detail: event.detail });
          });
      }),
  );
  await page.evaluate(() => void window.app.queuePrompt(0, 1));
  const shots = (async () => {
    const halfway = (steps) => window.seen.preview >= steps / 2 || window.seen.over;
    await page.waitForFunction(halfway, steps, { timeout: 400000 });
    await page.waitForTimeout(400);
    await page.screenshot({ path: join(job.folder, `${name}_running.png`) });
  })();
  const ended = await result;
  await shots;
  await page.waitForTimeout(2500);
  return { ended, ...(await page.evaluate(() => ({ seen: window.seen, videos: document.querySelectorAll("video").length }))) };
}

const report = { errors, templates: {} };
for (const template of job.templates) {
  const served = await load(template.name);
  const told = await facts();
  await page.screenshot({ path: join(job.folder, `${template.name}_open.png`) });
  const run = template.run ? await execute(template.name, template.steps) : null;
  if (template.run) await page.screenshot({ path: join(job.folder, `${template.name}_done.png`) });
  report.templates[template.name] = { ...served, ...told, run };
}
await browser.close();
console.log(JSON.stringify(report));
