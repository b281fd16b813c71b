// Two things the page does not do by itself: it shows the running MAGI-2 job to a browser that did not queue it (after a reload, and in
// a second browser), and it writes what Save Latent and Status tell on the node. The browser that queued the prompt sees the bar, the
// status line and the preview on the node itself; everything runs without this file.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const ownPrompts = new Set();
let badge = null;

function show(text, share) {
  if (!badge) {
    badge = document.createElement("div");
    badge.id = "magi2-progress";
    badge.setAttribute("role", "status");
    // the middle of the lower edge: the corners hold the side bar and the canvas menu
    Object.assign(badge.style, {
      position: "fixed", left: "50%", bottom: "16px", transform: "translateX(-50%)", zIndex: "1000", padding: "6px 12px",
      borderRadius: "6px", font: "13px sans-serif", color: "#fff", pointerEvents: "none", whiteSpace: "nowrap",
    });
    document.body.append(badge);
  }
  const percent = Math.round(100 * Math.min(1, Math.max(0, share || 0)));
  badge.style.background = `linear-gradient(90deg, #2a6e4f ${percent}%, #333 ${percent}%)`;
  badge.textContent = `MAGI-2 ${text}`;
}

function hide() {
  badge?.remove();
  badge = null;
}

function update(job) {
  if (!job || job.done || ownPrompts.has(job.prompt_id)) {
    hide();
  } else {
    show(job.text ?? "", job.total ? job.step / job.total : 0);
  }
}

async function refresh() {
  try {
    const answer = await api.fetchApi("/magi2/status");
    update(answer.ok ? (await answer.json()).job : null);
  } catch {
    hide(); // a server that is gone, or has no such route
  }
}

const RESULT = "magi2_result";
const TELLING = {
  Magi2SaveLatent: (output) => output?.latents?.map((file) => [file.subfolder, file.filename].filter(Boolean).join("/")),
  Magi2Status: (output) => output?.text,
};

/** Text on the node, in a field that is neither saved nor sent. */
function write(node, lines) {
  let widget = node.widgets?.find((item) => item.name === RESULT);
  if (!widget) {
    widget = app.widgets.STRING(node, RESULT, ["STRING", { multiline: true }], app).widget;
    widget.label = " ";
    widget.serialize = false;
    Object.assign(widget.options, { serialize: false, read_only: true });
    if (widget.element) widget.element.readOnly = true;
    const [width, height] = node.computeSize();
    const wide = Math.max(node.size[0], width, lines.length > 1 ? 460 : 0);
    const rows = lines.reduce((sum, line) => sum + Math.ceil(line.length / (wide / 8)), 0);
    node.setSize([wide, Math.max(node.size[1], height + 18 * Math.min(rows > 2 ? rows : 0, 25))]);
  }
  widget.value = lines.join("\n");
  app.graph.setDirtyCanvas(true, true);
}

app.registerExtension({
  name: "magi2.progress",
  beforeRegisterNodeDef(nodeType, nodeData) {
    const tell = TELLING[nodeData.name];
    if (!tell) return;
    const before = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      before?.apply(this, arguments);
      const lines = tell(output)?.flatMap((text) => String(text).split("\n"));
      if (lines?.length && app.widgets?.STRING) write(this, lines);
    };
  },
  async setup() {
    api.addEventListener("execution_start", (event) => ownPrompts.add(event.detail.prompt_id));
    api.addEventListener("magi2.progress", (event) => update(event.detail));
    api.addEventListener("reconnecting", hide);
    api.addEventListener("reconnected", refresh);
    await refresh();
  },
});
