// Lets the site's search work without a server. Browsers start no worker from a file:// address, so the theme's search
// runs in a hidden iframe there. The theme looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      addEventListener("message", event => {
        if (event.source === inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      inside.document.open();
      inside.document.write(`<body><script>
        postMessage = data => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, src) => before.then(() => new Promise(done => {
          document.body.appendChild(Object.assign(document.createElement("script"), { src, onload: done }));
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script>`);
      inside.document.close();
      this.ready = new Promise(done => inside.addEventListener("load", done));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
