// Shows the running MAGI-2 job to a browser that did not queue it: after a page reload, and in a second browser.
// The browser that queued the prompt sees the bar, the status line and the preview on the node itself; everything works without this file.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const ownPrompts = new Set();
let badge = null;

function show(text, share) {
  if (!badge) {
    badge = document.createElement("div");
    badge.id = "magi2-progress";
    badge.setAttribute("role", "status");
    Object.assign(badge.style, {
      position: "fixed", right: "16px", bottom: "16px", zIndex: "1000", padding: "6px 12px", borderRadius: "6px",
      font: "13px sans-serif", color: "#fff", pointerEvents: "none",
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

app.registerExtension({
  name: "magi2.progress",
  async setup() {
    api.addEventListener("execution_start", (event) => ownPrompts.add(event.detail.prompt_id));
    api.addEventListener("magi2.progress", (event) => update(event.detail));
    try {
      const answer = await api.fetchApi("/magi2/status");
      if (answer.ok) {
        update((await answer.json()).job);
      }
    } catch {
      // a server without the route: nothing is shown
    }
  },
});
