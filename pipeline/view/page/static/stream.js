/**
 * Server-sent events with a token: `EventSource` can send no header, so this reads them by `fetch`. Each connection
 * begins with a snapshot.
 */

const SILENT_MS = 6000; // the server sends something every half a second
const LONGEST_MS = 5000;

/** Follows a run until the page is closed. */
export class Stream {
  /**
   * @param {(kind: string, data: any) => void} take an event
   * @param {(words: string) => void} tell how the connection is; "": well
   * @param {(again: boolean) => void} ask for a token; again: the one that was given is none
   */
  constructor(take, tell, ask) {
    this.take = take;
    this.tell = tell;
    this.ask = ask;
    this.token = sessionStorage.getItem("diloco-token") ?? "";
    this.heard = 0;
    this.tries = 0;
    /** @type {AbortController | null} */
    this.under = null;
    document.addEventListener("visibilitychange", () => this.wake());
    addEventListener("online", () => this.wake());
    addEventListener("pageshow", () => this.wake());
    setInterval(() => this.wake(), 2000);
  }

  /** @param {string} token */
  give(token) {
    this.token = token;
    this.follow();
  }

  /** A page that slept does not wait for a connection that is none any more. */
  wake() {
    if (this.under && document.visibilityState === "visible" && Date.now() - this.heard > SILENT_MS) {
      this.under.abort();
    }
  }

  /** @returns {Promise<void>} */
  async follow() {
    this.under?.abort();
    const under = (this.under = new AbortController());
    while (this.under === under) {
      const refused = await this.once(under.signal);
      if (this.under !== under) return;
      if (refused) {
        this.under = null;
        sessionStorage.removeItem("diloco-token");
        return this.ask(this.token !== "");
      }
      if (under.signal.aborted) return this.follow();
      this.tries += 1;
      if (this.tries > 1) this.tell("no connection: what is shown is old; trying again");
      await new Promise((go) => setTimeout(go, Math.min(LONGEST_MS, 250 * 2 ** this.tries)));
    }
  }

  /** @param {AbortSignal} signal @returns {Promise<boolean>} whether the token was refused */
  async once(signal) {
    this.heard = Date.now();
    /** @type {Record<string, string>} */
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    try {
      const answer = await fetch("/page/events", { headers, signal, cache: "no-store", credentials: "omit" });
      if (answer.status === 401) return true;
      if (!answer.ok || !answer.body) return this.tell(await answer.text()), false;
      if (this.token) sessionStorage.setItem("diloco-token", this.token);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return false;
        this.heard = Date.now();
        rest += value;
        const whole = rest.split("\n\n");
        rest = /** @type {string} */ (whole.pop());
        for (const event of whole) this.event(event);
      }
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof DOMException)) throw error;
      return false; // it broke, or was broken off
    }
  }

  /** @param {string} text of one event */
  event(text) {
    const fields = Object.fromEntries(text.split("\n").map((line) => {
      const colon = line.indexOf(": ");
      return [line.slice(0, colon), line.slice(colon + 2)];
    }));
    this.take(fields.event, JSON.parse(fields.data));
    this.tries = 0;
    this.tell("");
  }
}
