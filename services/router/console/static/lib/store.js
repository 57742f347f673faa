// Observable state, and the hooks by which components follow it.

import { useEffect, useLayoutEffect, useReducer, useRef, useState } from "../vendor/htm-preact-3.1.1.js";

/** A value with listeners. `set` merges a part and calls every listener. */
export class Store {
  constructor(state) {
    this.state = state;
    this.listeners = new Set();
  }

  set(part) {
    this.state = { ...this.state, ...part };
    for (const listener of [...this.listeners]) listener();
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

/** The selected part of a store; the component renders again when it is another value. */
export function useStore(store, select) {
  const [, refresh] = useReducer((n) => n + 1, 0);
  const selected = select(store.state);
  const latest = useRef();
  latest.current = { select, selected };
  useLayoutEffect(() => {
    const check = () => {
      if (latest.current.select(store.state) !== latest.current.selected) refresh();
    };
    check(); // what changed between the first render and the subscription
    return store.subscribe(check);
  }, [store]);
  return selected;
}

/** The result of an asynchronous load: `{ data, error, loading, reload }`. Data stays while it loads again. */
export function useResource(load, inputs) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    setState((old) => ({ ...old, loading: true }));
    load(abort.signal).then(
      (data) => abort.signal.aborted || setState({ data, error: null, loading: false }),
      (error) => abort.signal.aborted || setState((old) => ({ data: old.data, error, loading: false })),
    );
    return () => abort.abort();
  }, [...inputs, round]);
  return { ...state, reload: () => setRound((n) => n + 1) };
}

/** Call `tick` each `interval_ms` while the component is there and the page is visible. */
export function useInterval(tick, interval_ms) {
  const latest = useRef(tick);
  latest.current = tick;
  useEffect(() => {
    const timer = setInterval(() => document.hidden || latest.current(), interval_ms);
    return () => clearInterval(timer);
  }, [interval_ms]);
}
