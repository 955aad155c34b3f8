// A page that is served looks whether its run has gone on, and then loads itself anew, with what was chosen in it.

const CHOICES = ["main-metric", "smoothing", "log-scale", "find-curve", "find-rollout", "rollout-kind", "rollout-order",
  "rollout-run"];

const viewKey = () => `view of ${location.pathname}`;

function keepView() {
  const choices = {};
  for (const id of CHOICES) {
    const node = byId(id);
    if (node) choices[id] = node.type === "checkbox" ? node.checked : node.value;
  }
  sessionStorage.setItem(viewKey(), JSON.stringify({ choices, zoom, top: scrollY }));
}

// What was chosen before the page was loaded anew; null in one that is opened.
function takeView() {
  if (!document.body.dataset.version) return null;
  const kept = sessionStorage.getItem(viewKey());
  sessionStorage.removeItem(viewKey());
  return kept && JSON.parse(kept);
}

function restoreChoices({ choices }) {
  for (const [id, value] of Object.entries(choices)) {
    const node = byId(id);
    if (!node) continue;
    if (node.type === "checkbox") node.checked = value;
    else if (!node.options || [...node.options].some(option => option.value === value)) node.value = value;
  }
}

// Nothing is taken away from somebody who reads a rollout, draws over a curve, or types.
function isInUse() {
  return byId("sample")?.open || isDragging || document.activeElement?.type === "search";
}

async function followRun() {
  const { version, refreshS } = document.body.dataset;
  if (!version) return;
  const words = byId("live").textContent;
  for (;;) {
    await new Promise(done => setTimeout(done, 1000 * refreshS));
    const now = await fetch("version").then(answer => answer.ok ? answer.text() : null, () => null);
    byId("live").textContent = now === null ? "Its server has ended: these are the last numbers it had." : words;
    if (now === null || now === version || isInUse()) continue;
    keepView();
    location.reload();
    return;
  }
}
