"use strict";
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
for (const gallery of document.querySelectorAll(".gallery")) {
  const tools = gallery.querySelector(".tools"), list = gallery.querySelector(".cards");
  const cards = [...list.children], count = tools.querySelector("output");
  if (!tools.querySelector("select")) continue;
  const chosen = name => tools.elements[name] ? tools.elements[name].value : "";
  const update = () => {
    const group = chosen("group"), key = chosen("key"), sign = chosen("order") === "low" ? 1 : -1;
    const value = card => key === "" ? 0 : parseFloat(card.dataset["key" + key]);
    const sorted = cards.slice().sort((a, b) => {
      const u = value(a), v = value(b);
      if (isNaN(u) || isNaN(v)) return isNaN(u) - isNaN(v);  // what has no number comes last
      return sign * (u - v);
    });
    for (const card of cards) card.hidden = group !== "" && card.dataset.group !== group;
    list.replaceChildren(...sorted);
    const shown = cards.filter(card => !card.hidden).length;
    count.textContent = shown === cards.length ? `${shown} images` : `${shown} of ${cards.length} images`;
    if (tools.elements.order) tools.elements.order.disabled = key === "";
  };
  tools.hidden = false;
  tools.addEventListener("change", update);
  tools.addEventListener("submit", event => event.preventDefault());
  update();
}
