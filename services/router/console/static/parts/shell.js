// The frame of all views: the name of the cluster, the navigation, the connection, and dialogs over all.

import { DASH, duration } from "../lib/format.js";
import { connection, fleet, retryNow } from "../lib/live.js";
import { link, route, VIEWS } from "../lib/route.js";
import { useInterval, useStore } from "../lib/store.js";
import { chooseTheme, chosenTheme, nextTheme } from "../theme.js";
import { html, useEffect, useErrorBoundary, useRef, useState } from "../vendor/htm-preact-3.1.1.js";
import { CacheView } from "../views/cache.js";
import { FleetView } from "../views/fleet.js";
import { JobsView } from "../views/jobs.js";
import { PlaygroundView } from "../views/playground.js";
import { RequestsView } from "../views/requests.js";
import { WhyView } from "../views/why.js";
import { Pill } from "./controls.js";
import { KeyDialog, ShortcutsDialog } from "./dialogs.js";
import { Icon } from "./icons.js";
import { useShortcuts } from "./shortcuts.js";
import { Toasts } from "./toasts.js";

const COMPONENTS = { fleet: FleetView, requests: RequestsView, why: WhyView, cache: CacheView, jobs: JobsView, playground: PlaygroundView };

function Connection() {
  const { state, error, retry_at_ms } = useStore(connection, (all) => all);
  const [, tick] = useState(0);
  useInterval(() => state === "waiting" && tick((n) => n + 1), 500);
  const left_s = retry_at_ms === null ? 0 : Math.max(0, Math.ceil((retry_at_ms - Date.now()) / 1000));
  const shown = {
    live: ["ok", "Live"],
    connecting: ["busy", "Connecting"],
    waiting: ["bad", "Disconnected"],
    locked: ["warn", "Key needed"],
  }[state];
  return html`<div class="connection">
    <span role="status"><${Pill} tone=${shown[0]} title=${error?.message}>${shown[1]}<//></span>
    ${state === "locked" && html`<button type="button" class="button button-small" onClick=${retryNow}><${Icon} name="key" />Enter a key</button>`}
    ${state === "waiting" &&
    html`<button type="button" class="button button-small" onClick=${retryNow} title=${error?.message}>
      Try now <span class="quiet">(${left_s} s)</span>
    </button>`}
  </div>`;
}

function Heading() {
  const router = useStore(fleet, (state) => state.page?.router ?? null);
  return html`<div class="brand">
    <img src=${new URL("../icon.svg", import.meta.url).href} alt="" width="28" height="28" />
    <div>
      <strong>Slipstream</strong>
      <span class="brand-note" title="model, router, uptime">${router ? `${router.model} · ${router.instance} · up ${duration(router.uptime_ms)}` : DASH}</span>
    </div>
  </div>`;
}

function ThemeButton({ theme, onChange }) {
  return html`<button type="button" class="button button-icon" aria-label="Theme: ${theme}. Change" title="Theme: ${theme} (t)" onClick=${onChange}>
    <${Icon} name=${theme} />
  </button>`;
}

/** A view that fails is replaced by what happened; the others stay usable. */
function Guarded({ view, id, seq }) {
  const [error, reset] = useErrorBoundary((failure) => console.error(failure));
  useEffect(reset, [view, id]);
  if (error) {
    return html`<div class="failure" role="alert"><${Icon} name="warning" />
      <div><p class="empty-title">This view failed</p><p>${error.message}</p></div>
      <button type="button" class="button" onClick=${reset}>Try again</button>
    </div>`;
  }
  return html`<${COMPONENTS[view]} id=${id} seq=${seq} />`;
}

/** The whole page. */
export function Shell() {
  const { view, id, seq } = useStore(route, (state) => state);
  const [help, setHelp] = useState(false);
  const [theme, setTheme] = useState(chosenTheme());
  const main = useRef();
  const changeTheme = () => {
    chooseTheme(nextTheme());
    setTheme(chosenTheme());
  };
  useShortcuts({
    "?": () => setHelp(true),
    "/": () => document.querySelector("[data-search]")?.focus(),
    t: changeTheme,
  });
  useEffect(() => {
    document.title = `${VIEWS.find((one) => one.name === view).title} · Slipstream console`;
  }, [view]);
  return html`
    <header class="top">
      <${Heading} />
      <nav aria-label="Views">
        ${VIEWS.map(
          (one) => html`<a key=${one.name} href=${link(one.name)} aria-current=${one.name === view ? "page" : undefined}>
            <${Icon} name=${one.name} /><span>${one.title}</span>
          </a>`,
        )}
      </nav>
      <div class="top-end">
        <${Connection} />
        <${ThemeButton} theme=${theme} onChange=${changeTheme} />
        <button type="button" class="button button-icon" aria-label="Keys" title="Keys (?)" onClick=${() => setHelp(true)}><${Icon} name="help" /></button>
      </div>
    </header>
    <main id="main" class="view view-${view}" tabindex="-1" ref=${main}><${Guarded} key=${view} view=${view} id=${id} seq=${seq} /></main>
    ${help && html`<${ShortcutsDialog} onClose=${() => setHelp(false)} />`}
    <${KeyDialog} />
    <${Toasts} />
  `;
}
