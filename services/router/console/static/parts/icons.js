// Line icons of 16 units; they take the text's colour and say nothing to a screen reader.

import { html } from "../vendor/htm-preact-3.1.1.js";

const PATHS = {
  fleet: "M2 3h12v4H2zM2 9h12v4H2zM4.5 5h.01M4.5 11h.01",
  requests: "M2 4h12M2 8h12M2 12h8",
  why: "M8 2v4M8 6 4 10v4M8 6l4 4v4",
  cache: "M8 1.5c3.3 0 6 1 6 2.3S11.3 6 8 6 2 5.100 2 3.800 4.700 1.500 8 1.500M2 3.800v8.400C2 13.500 4.700 14.500 8 14.500s6-1 6-2.300V3.800M2 8c0 1.300 2.700 2.300 6 2.300S14 9.300 14 8",
  jobs: "M3 4l1 1 2-2M3 8.500l1 1 2-2M3 13l1 1 2-2M8 4h6M8 8.500h6M8 13h6",
  playground: "M2 3h12v8H7l-3 3v-3H2z",
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M5.500 5.500V2.500h8v8h-3M2.500 5.500h8v8h-8z",
  check: "M3 8.500 6.500 12 13 4.500",
  warning: "M8 2 1.500 13.500h13zM8 6.500v3.500M8 12h.01",
  back: "M10 3 5 8l5 5",
  next: "M6 3l5 5-5 5",
  down: "M3 6l5 5 5-5",
  pause: "M5.500 3v10M10.500 3v10",
  play: "M4.500 2.500v11l9-5.500z",
  stop: "M3.500 3.500h9v9h-9z",
  send: "M2 8 14 2.500 10.500 14 7.500 9z",
  light: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6M8 1v1.500M8 13.500V15M1 8h1.500M13.500 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  dark: "M13.500 9.500A6 6 0 0 1 6.500 2.500 6 6 0 1 0 13.500 9.500",
  system: "M2 3h12v8H2zM6 14h4",
  help: "M6 6a2 2 0 1 1 2.700 1.900c-.5.200-.7.500-.7 1.100v.5M8 12h.01",
  search: "M7 2.500a4.500 4.500 0 1 0 0 9 4.500 4.500 0 0 0 0-9M10.500 10.500l3 3",
  key: "M5.500 7a3.500 3.500 0 1 0 0 .01M9 7h5.500v3M12 7v2",
};

/** An icon of the table above. */
export const Icon = ({ name }) =>
  html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;
