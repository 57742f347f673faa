// A request's phases as bars on one axis.

import { Segmented } from "../parts/controls.js";
import { duration } from "../lib/format.js";
import { barsOf, firstTokenMs, marksOf, PHASE_NOTES, PHASES, ticks } from "../lib/timeline.js";
import { html, useState } from "../vendor/htm-preact-3.1.1.js";

const SCALES = [["whole", "Whole request"], ["start", "Until first token"]];
const percent = (value) => `${Math.min(100, Math.max(0, value * 100))}%`;

function Row({ bar, end_ms }) {
  const length_ms = bar.end_ms - bar.start_ms;
  const width = Math.min(end_ms, bar.end_ms) - Math.min(end_ms, bar.start_ms);
  return html`<li class="bar-line">
    <span class="bar-label" title=${PHASE_NOTES[bar.phase]}>${PHASES[bar.phase]}${bar.worker && html` <span class="quiet">${bar.worker}</span>`}${bar.attempt > 1 && html` <span class="quiet">· attempt ${bar.attempt}</span>`}</span>
    <span class="bar-track" aria-hidden="true"><span class="bar bar-${bar.phase}" style=${{ left: percent(bar.start_ms / end_ms), width: percent(width / end_ms) }}></span></span>
    <span class="bar-length"><span class="visually-hidden">from ${duration(bar.start_ms)}, </span>${duration(length_ms)}</span>
  </li>`;
}

/** The bars, with a switch to look at the time before the first token alone. */
export function TimelineBars({ timeline, now_ms }) {
  const [scale, setScale] = useState("whole");
  const first_ms = firstTokenMs(timeline);
  const zoomed = scale === "start" && first_ms !== null && first_ms > 0;
  const bars = barsOf(timeline, now_ms).filter((bar) => !zoomed || bar.start_ms < first_ms);
  const end_ms = Math.max(zoomed ? first_ms : Math.max(now_ms, ...bars.map((bar) => bar.end_ms)), 0.001);
  return html`<section class="timeline" aria-labelledby="timeline-title">
    <div class="section-head">
      <h3 id="timeline-title">Timeline</h3>
      ${first_ms !== null && html`<${Segmented} legend="Scale of the timeline" choices=${SCALES} value=${scale} onChange=${setScale} />`}
    </div>
    <div class="timeline-plot">
      <ol class="bar-lines">${bars.map((bar, n) => html`<${Row} key=${n} bar=${bar} end_ms=${end_ms} />`)}</ol>
      <div class="timeline-over" aria-hidden="true">
        ${ticks(end_ms).map((tick) => html`<span key=${tick} class="tick" style=${{ left: percent(tick / end_ms) }}><span>${duration(tick)}</span></span>`)}
        ${marksOf(timeline).filter((mark) => mark.at_ms <= end_ms).map((mark, n) => html`<span key=${`m${n}`} class="mark mark-${mark.kind}" style=${{ left: percent(mark.at_ms / end_ms) }} title=${mark.text}></span>`)}
      </div>
    </div>
    <details class="meanings"><summary>What the bars mean</summary>
      <dl class="keys">${[...new Set(bars.map((bar) => bar.phase))].map((phase) => html`<div key=${phase}><dt>${PHASES[phase]}</dt><dd>${PHASE_NOTES[phase]}</dd></div>`)}</dl>
    </details>
  </section>`;
}
