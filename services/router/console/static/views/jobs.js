// Jobs: the queue of stored jobs of all tenants, the list by pages, and one of them beside it.

import { Pill, SearchField, Segmented, Stat } from "../parts/controls.js";
import { Icon } from "../parts/icons.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { getJson } from "../lib/api.js";
import { clock, count, DASH, dateTime, duration, rate } from "../lib/format.js";
import { JOB_STATES, jobQueue, stateOf } from "../lib/jobs.js";
import { link, open } from "../lib/route.js";
import { useResource, useStore } from "../lib/store.js";
import { html, useEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { JobDetail } from "./job_detail.js";

const PAGE_JOBS = 100;
const STATES = [["", "All"], ...JOB_STATES];

function Queue({ page }) {
  const { counts } = page;
  return html`<dl class="stats">
    <${Stat} name="Queued" value=${count(counts.queued)} note=${page.oldest_waiting_ms === null ? "none waits" : `oldest ${duration(page.oldest_waiting_ms)}`} />
    <${Stat} name="Running" value=${count(counts.running)} note=${`${count(page.running_tokens)} tokens so far`} />
    <${Stat} name="Ended" value=${rate(page.ended_per_min, "/min")} note="in the last minute" />
    <${Stat} name="Succeeded" value=${count(counts.succeeded)} />
    <${Stat} name="Failed" value=${count(counts.failed)} />
    <${Stat} name="Cancelled" value=${count(counts.cancelled)} />
    <${Stat} name="Expired" value=${count(counts.expired)} title="Not ended within the job's own time" />
  </dl>`;
}

const Row = ({ job, opened }) => html`<tr class=${opened ? "is-open" : ""}>
  <th scope="row" class="clip mono"><a href=${link("jobs", job.id)} title=${job.id} aria-current=${opened ? "true" : undefined}>${job.id}</a></th>
  <td><${Pill} tone=${stateOf(job).tone} title=${job.error ?? undefined}>${stateOf(job).text}<//></td>
  <td class="clip" title=${job.tenant}>${job.tenant || DASH}</td>
  <td class="clip mono" title=${job.path}>${job.path}</td>
  <td class="clip" title=${job.group_id}>${job.group_id || DASH}</td>
  <td class="cell-end">${count(job.attempt)}</td>
  <td class="cell-end">${count(job.output_tokens)}</td>
  <td class="mono" title=${dateTime(job.created_ms)}>${clock(job.created_ms)}</td>
  <td class="mono" title=${dateTime(job.started_ms)}>${clock(job.started_ms)}</td>
  <td class="mono" title=${dateTime(job.ended_ms)}>${clock(job.ended_ms)}</td>
</tr>`;

const Table = ({ jobs, id }) => html`<div class="table-scroll table-tall" tabindex="0" role="region" aria-label="Table of jobs"><table class="table table-sticky">
  <caption class="visually-hidden">Jobs, newest first</caption>
  <thead><tr><th scope="col">Job</th><th scope="col">State</th><th scope="col">Tenant</th><th scope="col">Path</th><th scope="col">Group</th><th scope="col" class="cell-end">Attempts</th><th scope="col" class="cell-end">Tokens</th><th scope="col">Submitted</th><th scope="col">Started</th><th scope="col">Ended</th></tr></thead>
  <tbody>${jobs.map((job) => html`<${Row} key=${job.id} job=${job} opened=${job.id === id} />`)}</tbody>
</table></div>`;

/** The list with its filters. Page N begins behind cursor N of those that were passed. */
function List({ id }) {
  const [chosen, setChosen] = useState({ state: "", tenant: "" });
  const [cursors, setCursors] = useState([""]);
  const round = useStore(jobQueue, (state) => state.round);
  const before = cursors.at(-1);
  const { data, error, loading, reload } = useResource(
    (signal) => getJson("jobs", { ...chosen, before, limit: PAGE_JOBS }, signal), [chosen.state, chosen.tenant, before, round]);
  const change = (part) => {
    setChosen({ ...chosen, ...part });
    setCursors([""]);
  };
  const jobs = data?.jobs ?? [];
  return html`<section class="panel" aria-labelledby="jobs-title">
    <div class="section-head">
      <h2 id="jobs-title">Jobs of all tenants</h2>
      <div class="pager">
        <span class="quiet" role="status">${jobs.length ? `page ${count(cursors.length)}` : ""}</span>
        <button type="button" class="button button-small" disabled=${cursors.length === 1 || loading} onClick=${() => setCursors(cursors.slice(0, -1))}><${Icon} name="back" />Newer</button>
        <button type="button" class="button button-small" disabled=${!data?.next_before || loading} onClick=${() => setCursors([...cursors, data.next_before])}>Older<${Icon} name="next" /></button>
      </div>
    </div>
    <div class="toolbar">
      <${SearchField} label="Tenant of jobs" placeholder="Tenant, whole name" value=${chosen.tenant} onInput=${(tenant) => change({ tenant })} />
      <${Segmented} legend="State of jobs" choices=${STATES} value=${chosen.state} onChange=${(state) => change({ state })} />
    </div>
    ${error && html`<${Failure} what="The list of jobs" error=${error} onRetry=${reload} />`}
    ${data === null
      ? !error && html`<${Loading} what="jobs" lines=${8} />`
      : jobs.length
        ? html`<${Table} jobs=${jobs} id=${id} />`
        : html`<${Empty} title=${chosen.state || chosen.tenant ? "No job matches the filters." : "No job."}>Jobs are submitted by <code>slipstream jobs submit</code>, by the SDK and as batches.<//>`}
  </section>`;
}

const NoDatabase = () => html`<${Empty} title="This router keeps no jobs.">It runs without <code>--database</code>, which names where jobs and usage are stored. See docs/jobs.md.<//>`;

/** The view; with an id, that job is open. */
export function JobsView({ id }) {
  const pushed = useStore(jobQueue, (state) => state.page);
  const box = useRef();
  const close = () => {
    open("jobs");
    box.current?.querySelector("[role=region]")?.focus();
  };
  useEffect(() => {
    const escape = (event) => event.key === "Escape" && id && !event.target.closest("dialog, input[type=search]") && close();
    document.addEventListener("keydown", escape);
    return () => document.removeEventListener("keydown", escape);
  }, [id]);
  const title = html`<h1 class="visually-hidden">Jobs</h1>`;
  if (pushed?.has_database === false) return html`${title}<${NoDatabase} />`;
  return html`${title}
    ${pushed === null ? html`<${Loading} what="the queue" lines=${2} />`
      : pushed.unavailable ? html`<${Failure} what="The queue of jobs" error=${{ message: pushed.unavailable }} />` : html`<${Queue} page=${pushed} />`}
    <div class="jobs ${id ? "jobs-open" : ""}" ref=${box}>
      <${List} id=${id} />
      ${id && html`<${JobDetail} key=${id} id=${id} onClose=${close} />`}
    </div>`;
}
