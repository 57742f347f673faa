// One job: what became of it, when, where its webhook goes, and the button that ends it.

import { Ago, CopyButton, Pill } from "../parts/controls.js";
import { ConfirmDialog } from "../parts/dialogs.js";
import { Icon } from "../parts/icons.js";
import { Failure, Loading } from "../parts/states.js";
import { announce } from "../parts/toasts.js";
import { getJson, postJson } from "../lib/api.js";
import { bytes, count, DASH, dateTime, duration } from "../lib/format.js";
import { isLive, jobQueue, stateOf } from "../lib/jobs.js";
import { link } from "../lib/route.js";
import { useResource, useStore } from "../lib/store.js";
import { html, useState } from "../vendor/htm-preact-3.1.1.js";

const pathOf = (id, verb = "") => `jobs/${encodeURIComponent(id)}${verb}`;
const when = (at_ms) => (at_ms ? html`<${Ago} at_ms=${at_ms} /> <span class="quiet">${dateTime(at_ms)}</span>` : DASH);

function webhookText({ webhook }) {
  if (!webhook) return DASH;
  if (!webhook.is_due) return webhook.host;
  return `${webhook.host}: not delivered yet after ${webhook.tries === 1 ? "1 try" : `${webhook.tries} tries`}`;
}

function factsOf(job) {
  return [
    ["Tenant", job.tenant || DASH],
    ["Path", html`<span class="mono">${job.path}</span>`],
    ["Group", job.group_id || DASH],
    ["Reference", job.reference || DASH],
    ["Attempts", `${count(job.attempt)}, of them ${count(job.failures)} failed`],
    ["Router", job.router ?? DASH],
    ["Submitted", when(job.created_ms)],
    ["Started", when(job.started_ms)],
    ["Ended", when(job.ended_ms)],
    [isLive(job) ? "Expires" : "Ran for", isLive(job) ? dateTime(job.expires_ms) : duration(job.started_ms && job.ended_ms ? job.ended_ms - job.started_ms : null)],
    ["Status", job.http_status ? `HTTP ${job.http_status}` : DASH],
    ["Output", `${count(job.output_tokens)} tokens`],
    ["Stored", bytes(job.stored_bytes)],
    ["Webhook", webhookText(job)],
  ];
}

const CancelDialog = ({ job, onDone, onClose }) => html`<${ConfirmDialog} title="Cancel this job?" verb="Cancel the job" tone="danger" onClose=${onClose}
  act=${async () => {
    const ended = await postJson(pathOf(job.id, "/cancel"), {});
    announce(ended.state === "cancelled" ? "The job is cancelled." : `The job had ended before: ${stateOf(ended).text.toLowerCase()}.`);
    onDone();
  }}>
  <p>The job of ${job.tenant || "the default tenant"} ends at once and gets no result. What still runs of it is dropped.</p>
<//>`;

/** The panel beside the list. */
export function JobDetail({ id, onClose }) {
  const round = useStore(jobQueue, (state) => state.round);
  const [asked, setAsked] = useState(false);
  const { data: job, error, reload } = useResource((signal) => getJson(pathOf(id), {}, signal), [id, round]);
  const state = job && stateOf(job);
  return html`<section class="detail" aria-labelledby="job-title">
    <header>
      <button type="button" class="button button-icon" aria-label="Close the job" title="Close (Esc)" onClick=${onClose}><${Icon} name="back" /></button>
      <h2 id="job-title" class="mono" title=${id}>${id}</h2>
      ${state && html`<${Pill} tone=${state.tone}>${state.text}<//>`}
      <${CopyButton} text=${id} label="Copy id" />
    </header>
    <div class="detail-body">
      ${error && html`<${Failure} what="The job" error=${error} onRetry=${reload} />`}
      ${job === null && !error && html`<${Loading} what="the job" lines=${8} />`}
      ${job?.error && html`<p class="callout callout-bad">${job.error}</p>`}
      ${job && html`<dl class="facts">${factsOf(job).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
        <div class="button-row">
          ${isLive(job) && html`<button type="button" class="button button-danger" onClick=${() => setAsked(true)}>Cancel the job</button>`}
          ${job.attempt > 0 && html`<a class="button" href=${link("requests", job.id)}><${Icon} name="requests" />Its request, where this router ran it</a>`}
        </div>
        <p class="quiet">Prompt and answer belong to the tenant: <code>slipstream jobs show</code> with its key.</p>`}
    </div>
    ${asked && html`<${CancelDialog} job=${job} onDone=${reload} onClose=${() => setAsked(false)} />`}
  </section>`;
}
