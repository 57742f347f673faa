// Fleet: the tiers as lanes, each worker as a card, and the rates of the last minutes.

import { Meter, Pill, SearchField, Segmented, Stat } from "../parts/controls.js";
import { Empty, Loading } from "../parts/states.js";
import { count, duration, plural, rate, share } from "../lib/format.js";
import { connection, fleet } from "../lib/live.js";
import { useStore } from "../lib/store.js";
import { matches, TIERS, tierSummary } from "../lib/workers.js";
import { html, useState } from "../vendor/htm-preact-3.1.1.js";
import { FleetCharts } from "./fleet_charts.js";
import { DrainDialog } from "./drain_dialog.js";
import { WorkerCard } from "./worker_card.js";

const STATES = [["all", "All"], ["ready", "Ready"], ["draining", "Draining"], ["degraded", "Degraded"], ["unavailable", "Unavailable"]];

function Overview({ page }) {
  const { router, workers } = page;
  const ready = tierSummary(workers).ready;
  return html`<dl class="stats">
    <${Stat} name="Requests running" value=${count(router.requests_running)} />
    <${Stat} name="Requests queued" value=${count(router.requests_queued)} />
    <${Stat} name="Workers ready" value=${`${count(ready)} / ${count(workers.length)}`} />
    <${Stat} name="Router" value=${router.draining ? "Draining" : "Serving"} note=${router.processes > 1 ? `${router.processes} processes` : "1 process"} />
    <${Stat} name="Version" value=${router.version} note=${`up ${duration(router.uptime_ms)}`} />
  </dl>`;
}

function Lane({ tier, workers, total, onDrain }) {
  const [closed, setClosed] = useState(false);
  const summary = tierSummary(workers);
  const id = `lane-${tier.role}`;
  return html`<section class="lane" aria-labelledby=${`${id}-title`}>
    <header>
      <h2 id=${`${id}-title`}>
        <button type="button" class="lane-toggle" aria-expanded=${closed ? "false" : "true"} aria-controls=${id} onClick=${() => setClosed(!closed)}>
          ${tier.title}
        </button>
      </h2>
      <span class="quiet">${tier.task}</span>
      <dl class="lane-figures">
        <div><dt>Ready</dt><dd>${summary.ready} / ${workers.length}</dd></div>
        ${summary.draining > 0 && html`<div class="tone-warn"><dt>Draining</dt><dd>${summary.draining}</dd></div>`}
        ${tier.role !== "kvstore" && html`<div><dt>Running</dt><dd>${count(summary.running)}</dd></div>`}
        ${(tier.role === "prefill" || tier.role === "decode") && html`<div><dt>Speed</dt><dd>${rate(summary.tokens_per_s, " tok/s")}</dd></div>`}
        ${summary.kv_used !== null && html`<div class="lane-kv"><dt>KV</dt><dd>${share(summary.kv_used)} <${Meter} label=${`KV used by ${tier.title}`} value=${summary.kv_used} /></dd></div>`}
      </dl>
    </header>
    <div id=${id} hidden=${closed}>
      ${workers.length
        ? html`<ul class="cards ${workers.length > 24 ? "cards-dense" : ""}">
            ${workers.map((worker) => html`<li key=${worker.instance}><${WorkerCard} worker=${worker} onDrain=${onDrain} /></li>`)}
          </ul>`
        : html`<p class="lane-empty quiet">${total ? `None of ${plural(total, "worker")} matches the filter.` : "No worker of this tier is registered."}</p>`}
    </div>
  </section>`;
}

const consoleOf = (router) => `${location.protocol}//${router.admin_http}/console/`;

function RouterLane({ page }) {
  const routers = page.routers ?? [];
  return html`<section class="lane" aria-labelledby="lane-router-title">
    <header><h2 id="lane-router-title" class="lane-name">Routers</h2><span class="quiet">take requests and place them</span></header>
    <ul class="cards">
      ${routers.map((router) => {
        const [tone, text] = router.draining === null ? ["quiet", "Unknown"] : router.draining ? ["warn", "Draining"] : ["ok", "Serving"];
        return html`<li key=${router.instance}><article class="card card-router" aria-label=${router.instance}>
          <header><h3>${router.instance}</h3><${Pill} tone=${tone}>${text}<//></header>
          <footer>
            <span class="card-foot" title=${router.endpoint}>${router.endpoint}${router.sibling ? " · same port" : ""}</span>
            ${router.own ? html`<span class="quiet">this page</span>` : router.admin_http && html`<a href=${consoleOf(router)}>Its console</a>`}
          </footer>
        </article></li>`;
      })}
    </ul>
  </section>`;
}

/** The view. */
export function FleetView() {
  const page = useStore(fleet, (state) => state.page);
  const error = useStore(connection, (state) => state.error);
  const [text, setText] = useState("");
  const [state, setState] = useState("all");
  const [asked, setAsked] = useState(null);
  if (page === null) {
    return html`<h1 class="visually-hidden">Fleet</h1>
      ${error ? html`<${Empty} title="No connection to the router">${error.message}<//>` : html`<${Loading} what="the fleet" lines=${8} />`}`;
  }
  const shown = page.workers.filter((worker) => matches(worker, text, state));
  return html`
    <h1 class="visually-hidden">Fleet</h1>
    <${Overview} page=${page} />
    <${FleetCharts} />
    <div class="toolbar">
      <${SearchField} label="Search workers" placeholder="Name, node or region" value=${text} onInput=${setText} />
      <${Segmented} legend="State" choices=${STATES} value=${state} onChange=${setState} />
      <span class="quiet toolbar-note" role="status">${plural(shown.length, "worker")} shown</span>
    </div>
    ${TIERS.map((tier) => html`<${Lane}
      key=${tier.role}
      tier=${tier}
      workers=${shown.filter((worker) => worker.role === tier.role)}
      total=${page.workers.filter((worker) => worker.role === tier.role).length}
      onDrain=${setAsked}
    />`)}
    <${RouterLane} page=${page} />
    ${asked && html`<${DrainDialog} worker=${asked} workers=${page.workers} onClose=${() => setAsked(null)} />`}
  `;
}
