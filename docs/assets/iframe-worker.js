// Search of pages that are opened from disk. Browsers start no worker from file://, so the script of the worker runs in a
// hidden frame. Named as the polyfill that the plugin "offline" would load from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #pending = [];

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.addEventListener("load", () => {
        const pending = this.#pending;
        this.#pending = null;
        pending.forEach((data) => this.postMessage(data));
      });
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.#pending) this.#pending.push(data); // until the script listens
      else this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
