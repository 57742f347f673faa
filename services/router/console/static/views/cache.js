// Cache: where KV lies, where prompts got theirs, what was evicted too early, and where sessions are.

import { Meter, Stat } from "../parts/controls.js";
import { Icon } from "../parts/icons.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { getJson } from "../lib/api.js";
import { bytes, compact, count, DASH, ratio, share } from "../lib/format.js";
import { useInterval, useResource } from "../lib/store.js";
import { html, useState } from "../vendor/htm-preact-3.1.1.js";

const REFRESH_MS = 5000;
const PAGE_SESSIONS = 100;
const TIERS = {
  prefill: "Pages of prefill workers",
  decode: "Pages of decode workers",
  memory: "Memory of kvstores",
  pool: "Pool of the nodes",
  disk: "Disks of kvstores",
};
const SOURCES = [
  ["local", "Own pages", "series-1"],
  ["peer", "Other prefill workers", "series-2"],
  ["dram", "Kvstore memory", "series-3"],
  ["pool", "Kvstore pool", "series-4"],
  ["nvme", "Kvstore disks", "series-5"],
];

/** Tokens of prompts by where their KV came from: `[name, tokens, colour]`, what was computed last. */
export function sourcesOf({ prompt_tokens, cached_tokens }) {
  const parts = SOURCES.map(([key, name, colour]) => [name, cached_tokens[key] ?? 0, colour]);
  const cached = parts.reduce((sum, [, tokens]) => sum + tokens, 0);
  return [...parts, ["Computed", Math.max(0, prompt_tokens - cached), "series-none"]];
}

function Sources({ page }) {
  const parts = sourcesOf(page);
  const total = Math.max(page.prompt_tokens, parts.reduce((sum, [, tokens]) => sum + tokens, 0));
  if (total === 0) return html`<${Empty} title="No prompt was computed yet." />`;
  return html`<div class="stacked" aria-hidden="true">
      ${parts.map(([name, tokens, colour]) => html`<span key=${name} class="stacked-part fill-${colour}" style=${{ width: `${(tokens / total) * 100}%` }}></span>`)}
    </div>
    <ul class="legend">
      ${parts.map(([name, tokens, colour]) => html`<li key=${name}><i class="swatch swatch-${colour}" aria-hidden="true"></i>${name} <b>${share(tokens / total)}</b> <span class="quiet">${compact(tokens)} tokens</span></li>`)}
    </ul>`;
}

function Tiers({ tiers }) {
  const rows = tiers.filter((tier) => tier.blocks_used || tier.blocks_total || tier.bytes_total);
  if (!rows.length) return html`<${Empty} title="No tier keeps KV." />`;
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label="Table of tiers"><table class="table">
    <caption class="visually-hidden">Tiers of the cache</caption>
    <thead><tr><th scope="col">Tier</th><th scope="col" class="cell-meter">Occupancy</th><th scope="col" class="cell-end">Blocks</th><th scope="col" class="cell-end">Of</th><th scope="col" class="cell-end">Bytes</th><th scope="col" class="cell-end">Of</th><th scope="col" class="cell-end">Hits <span class="unit">blocks</span></th></tr></thead>
    <tbody>${rows.map((tier) => {
      const part = ratio(tier.bytes_used, tier.bytes_total) ?? ratio(tier.blocks_used, tier.blocks_total);
      return html`<tr key=${tier.tier}>
        <th scope="row">${TIERS[tier.tier] ?? tier.tier}</th>
        <td class="cell-meter"><div class="meter-line"><${Meter} label=${`Occupancy of ${TIERS[tier.tier] ?? tier.tier}`} value=${part} /><span>${share(part)}</span></div></td>
        <td class="cell-end">${count(tier.blocks_used)}</td><td class="cell-end quiet">${count(tier.blocks_total)}</td>
        <td class="cell-end">${bytes(tier.bytes_used)}</td><td class="cell-end quiet">${bytes(tier.bytes_total)}</td>
        <td class="cell-end">${count(tier.hits_blocks)}</td>
      </tr>`;
    })}</tbody>
  </table></div>
  <p class="quiet">Hits of prefill and decode workers are those of requests of this router. All else is of the whole cluster.</p>`;
}

const Policies = ({ policies }) => html`<section aria-labelledby="policies-title" class="panel">
  <h2 id="policies-title">Eviction policies</h2>
  <ul class="legend">${policies.map((one) => html`<li key=${`${one.instance} ${one.tier}`}>${one.instance} <span class="quiet">${one.tier}</span> <b>${one.policy}</b></li>`)}</ul>
</section>`;

function Sessions({ sessions, number, onNext, onBack, busy }) {
  const first = number * PAGE_SESSIONS + 1;
  const last = first + sessions.page.length - 1;
  return html`<section aria-labelledby="sessions-title" class="panel">
    <div class="section-head">
      <h2 id="sessions-title">Sessions <span class="quiet">${count(sessions.total)}</span></h2>
      <div class="pager">
        <span class="quiet" role="status">${sessions.page.length ? `${count(first)} to ${count(last)} of ${count(sessions.total)}` : ""}</span>
        <button type="button" class="button button-small" disabled=${number === 0 || busy} onClick=${onBack}><${Icon} name="back" />Previous</button>
        <button type="button" class="button button-small" disabled=${!sessions.next || busy} onClick=${onNext}>Next<${Icon} name="next" /></button>
      </div>
    </div>
    ${sessions.page.length === 0
      ? html`<${Empty} title="No session.">A request with a session's name appears here: its next turn finds its KV.<//>`
      : html`<div class="table-scroll table-tall" tabindex="0" role="region" aria-label="Table of sessions"><table class="table table-sticky">
          <caption class="visually-hidden">Sessions and their workers</caption>
          <thead><tr><th scope="col">Session</th><th scope="col">Tenant</th><th scope="col">Prefill</th><th scope="col">Decode</th><th scope="col">Kvstore</th><th scope="col" class="cell-end">Tokens</th></tr></thead>
          <tbody>${sessions.page.map((row) => html`<tr key=${`${row.tenant} ${row.session}`}>
            <th scope="row" class="clip" title=${row.session}>${row.session}</th><td class="clip">${row.tenant || DASH}</td>
            <td>${row.prefill || DASH}</td><td>${row.decode || DASH}</td><td>${row.kvstore || DASH}</td><td class="cell-end">${count(row.tokens)}</td>
          </tr>`)}</tbody>
        </table></div>`}
  </section>`;
}

/** The view. Page N of the sessions begins behind cursor N of those that were passed. */
export function CacheView() {
  const [cursors, setCursors] = useState([""]);
  const after = cursors.at(-1);
  const { data, error, loading, reload } = useResource((signal) => getJson("cache", { sessions_after: after, limit: PAGE_SESSIONS }, signal), [after]);
  useInterval(() => loading || reload(), REFRESH_MS);
  if (data === null) {
    return html`<h1 class="visually-hidden">Cache</h1>
      ${error ? html`<${Failure} what="The cache" error=${error} onRetry=${reload} />` : html`<${Loading} what="the cache" lines=${8} />`}`;
  }
  const cached = SOURCES.reduce((sum, [key]) => sum + (data.cached_tokens[key] ?? 0), 0);
  return html`<h1 class="visually-hidden">Cache</h1>
    ${error && html`<${Failure} what="The newest state" error=${error} onRetry=${reload} />`}
    <dl class="stats">
      <${Stat} name="Cached share of prompts" value=${share(ratio(cached, data.prompt_tokens))} note=${`${compact(cached)} of ${compact(data.prompt_tokens)} tokens`} />
      <${Stat} name="Evicted" value=${compact(data.evicted_blocks)} note="blocks of kvstores" />
      <${Stat} name="Evicted and wanted again" value=${compact(data.evicted_wanted_blocks)} note=${data.evicted_blocks ? `${share(ratio(data.evicted_wanted_blocks, data.evicted_blocks))} of the evicted` : "blocks"} />
      <${Stat} name="Sessions" value=${count(data.sessions.total)} />
    </dl>
    <section aria-labelledby="sources-title" class="panel"><h2 id="sources-title">Where prompts got their KV <span class="quiet">requests of this router</span></h2><${Sources} page=${data} /></section>
    <section aria-labelledby="tiers-title" class="panel"><h2 id="tiers-title">Tiers</h2><${Tiers} tiers=${data.tiers} /></section>
    ${data.policies.length > 0 && html`<${Policies} policies=${data.policies} />`}
    <${Sessions} sessions=${data.sessions} number=${cursors.length - 1} busy=${loading}
      onNext=${() => setCursors([...cursors, data.sessions.next])} onBack=${() => setCursors(cursors.slice(0, -1))} />`;
}
