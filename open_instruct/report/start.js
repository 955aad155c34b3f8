// The page itself

const REDRAWN_BY = ["smoothing", "log-scale"];
const ROLLOUTS_CHOSEN_BY = ["find-rollout", "rollout-kind", "rollout-order", "rollout-run"];

function startCurves(kept) {
  if (byId("held-out-charts")) addCharts(byId("held-out-charts"), "held_out");
  addCharts(byId("charts"), "curves");
  offerCurves();
  if (kept) restoreChoices(kept);
  chooseCurve();
  findCurves();
  byId("main-metric").addEventListener("input", () => { chooseCurve(); redraw(); });
  byId("find-curve").addEventListener("input", findCurves);
  byId("all-steps").addEventListener("click", () => zoomTo(null));
  for (const id of REDRAWN_BY) byId(id).addEventListener("input", redraw);
  addEventListener("resize", redraw);
  addEventListener("beforeprint", drawAll);
  zoomTo(kept ? kept.zoom : null);
}

function startRollouts() {
  if (!byId("rollout-table")) return;
  for (const id of ROLLOUTS_CHOSEN_BY) byId(id).addEventListener("input", () => showTable());
  byId("rollout-back").addEventListener("click", () => showTable(view.from - ROWS_SHOWN));
  byId("rollout-on").addEventListener("click", () => showTable(view.from + ROWS_SHOWN));
  if (typeof DecompressionStream === "undefined") {
    byId("rollout-count").textContent = "this browser cannot unpack them: take one of 2023 or later";
  } else showTable();
}

function start() {
  const kept = takeView();
  startCurves(kept);
  startRollouts();
  if (kept) scrollTo(0, kept.top);
  followRun();
}

start();
