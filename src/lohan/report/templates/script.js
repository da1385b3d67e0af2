// Shows the numbers under the pointer; everything else works without it. It reads what stands
// beside each chart and writes texts only as texts, so nothing from a file can become markup.
"use strict";
for (const chart of document.querySelectorAll(".chart")) {
  const source = chart.querySelector("script");
  const field = chart.querySelector(".field");
  if (!source || !field) continue;
  let content = null, tip = null, hair = null, row = -1;
  const hide = () => { if (tip) { tip.remove(); hair.remove(); tip = hair = null; } };
  const nearest = (step) => {
    const steps = content.steps;
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return step - steps[low] < steps[high] - step ? low : high;
  };
  const show = (found) => {
    row = found;
    if (!tip) {
      tip = document.createElement("div");
      hair = document.createElement("div");
      tip.className = "tip";
      tip.setAttribute("role", "status");
      hair.className = "hair";
      field.append(hair, tip);
    }
    const step = content.steps[row];
    const head = document.createElement("b");
    head.textContent = "step " + step.toLocaleString("en");
    tip.replaceChildren(head);
    content.values[row].forEach((value, number) => {
      if (value === null) return;
      const line = document.createElement("div"), key = document.createElement("span");
      key.className = "key c" + content.colours[number];
      line.append(key, content.names[number] + ": " + value);
      tip.append(line);
    });
    const box = field.getBoundingClientRect();
    const x = (step - content.low) / (content.high - content.low) * box.width;
    hair.style.left = x + "px";
    const wanted = x < box.width / 2 ? x + 10 : x - tip.offsetWidth - 10;
    const least = 8 - box.left, most = document.documentElement.clientWidth - 8 - box.left;
    tip.style.left = Math.max(least, Math.min(wanted, most - tip.offsetWidth)) + "px";
  };
  field.addEventListener("pointermove", (event) => {
    content = content || JSON.parse(source.textContent);
    const box = field.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    show(nearest(content.low + share * (content.high - content.low)));
  });
  field.addEventListener("pointerleave", hide);
  field.tabIndex = 0;
  field.setAttribute("role", "group");
  field.setAttribute("aria-label", "Left and right arrow walk through the steps");
  field.addEventListener("blur", hide);
  field.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!by) return;
    event.preventDefault();
    content = content || JSON.parse(source.textContent);
    show(Math.max(0, Math.min(content.steps.length - 1, row < 0 ? 0 : row + by)));
  });
}
