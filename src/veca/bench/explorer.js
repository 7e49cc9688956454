// Milliseconds from an event to a performance mark that the page sets once it has drawn the result.
const timeToMark = (name, dispatch) => new Promise((resolve) => {
  const start = performance.now();
  new PerformanceObserver((list, observer) => {
    const mark = list.getEntriesByName(name)[0];
    if (mark) { observer.disconnect(); requestAnimationFrame(() => resolve(mark.startTime - start)); }
  }).observe({ type: "mark" });
  dispatch();
});

window.timers = {
  dropImage([bytes, name]) {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([new Uint8Array(bytes)], name, { type: "image/jpeg" }));
    const event = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
    return timeToMark("veca-picture", () => document.body.dispatchEvent(event));
  },
  moveSlider([selector, value]) {
    const slider = document.querySelector(selector);
    slider.value = value;
    return timeToMark("veca-shown", () => slider.dispatchEvent(new Event("input", { bubbles: true })));
  },
};
