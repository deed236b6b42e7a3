"use strict";
// Draft trees: a list of rounds, arrow keys from node to node, and a slider that grows the tree node by node.
(() => {
  const rounds = [...document.querySelectorAll("details.tree")];
  if (!rounds.length) return;

  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  const attach = (round) => {
    const svg = round.querySelector("svg.draft");
    const nodes = new Map([...svg.querySelectorAll(".n")].map((node) => [node.dataset.i, node]));
    const edges = new Map([...svg.querySelectorAll(".edge")].map((edge) => [edge.dataset.i, edge]));
    const facts = element("p", { className: "facts" });
    facts.setAttribute("aria-live", "polite");
    const last = nodes.size - 2;
    const slider = element("input", { type: "range", min: 0, max: last, value: last });
    const shown = element("span");
    const children = (i) => [...nodes.values()].filter((node) => node.dataset.p === i && !node.classList.contains("late"));
    let here = "0";

    const select = (i, focus) => {
      if (!nodes.has(i) || nodes.get(i).classList.contains("late")) return;
      svg.querySelectorAll(".path, .here").forEach((part) => part.classList.remove("path", "here"));
      nodes.get(here).tabIndex = -1;
      here = i;
      const node = nodes.get(i);
      node.tabIndex = 0;
      node.classList.add("here");
      const texts = [];
      for (let at = i; nodes.has(at); at = nodes.get(at).dataset.p) {
        texts.unshift(nodes.get(at).dataset.t);
        nodes.get(at).classList.add("path");
        edges.get(at)?.classList.add("path");
        if (at === "0") break;
      }
      facts.replaceChildren(element("code", { textContent: texts.join(" ") }), element("br"), node.dataset.f);
      if (focus) {
        node.focus({ preventScroll: true });
        node.scrollIntoView({ block: "nearest", inline: "nearest" });
      }
    };

    const grow = () => {
      const size = Number(slider.value);
      const accepted = [...nodes.values()].filter((n) => n.classList.contains("acc")).map((n) => Number(n.dataset.i));
      const whole = accepted.every((i) => i <= size);
      for (const part of [...nodes.values(), ...edges.values()]) {
        const i = Number(part.dataset.i);
        part.classList.toggle("late", i < 0 ? !whole : i > size);
      }
      shown.textContent = `${size} of ${last} nodes, in the order in which the builder chose them`;
      if (nodes.get(here).classList.contains("late")) select("0", false);
    };

    svg.addEventListener("click", (event) => {
      const node = event.target.closest(".n");
      if (node) select(node.dataset.i, true);
    });
    svg.addEventListener("focusin", (event) => {
      const node = event.target.closest(".n");
      if (node && node.dataset.i !== here) select(node.dataset.i, false);
    });
    svg.addEventListener("keydown", (event) => {
      const parent = nodes.get(here).dataset.p;
      const beside = here === "0" ? [] : children(parent).sort((a, b) => a.getBoundingClientRect().y - b.getBoundingClientRect().y);
      const at = beside.findIndex((node) => node.dataset.i === here);
      const first = children(here).sort((a, b) => Number(b.classList.contains("acc")) - Number(a.classList.contains("acc")))[0];
      const goal = {
        ArrowLeft: parent,
        ArrowRight: first?.dataset.i,
        ArrowUp: beside[at - 1]?.dataset.i,
        ArrowDown: beside[at + 1]?.dataset.i,
        Home: "0",
        End: "-1",
      }[event.key];
      if (goal === undefined) return;
      event.preventDefault();
      select(goal, true);
    });
    slider.addEventListener("input", grow);

    round.insertBefore(element("label", { className: "grow" }, slider, shown), svg.parentElement);
    round.append(facts);
    select("0", false);
    grow();
  };

  const list = element("select", { ariaLabel: "Round" });
  rounds.forEach((round, i) => list.append(element("option", { value: i, textContent: round.querySelector("summary").textContent })));
  const show = (number) => {
    const chosen = (number + rounds.length) % rounds.length;
    rounds.forEach((round, i) => {
      round.hidden = i !== chosen;
      round.open = i === chosen;
    });
    list.value = chosen;
    const goal = rounds[chosen].querySelector(".n.bonus").getBoundingClientRect();
    const frame = rounds[chosen].querySelector(".scroll");
    frame.scrollTop += goal.y - frame.getBoundingClientRect().y - frame.clientHeight / 2;
  };
  list.addEventListener("change", () => show(Number(list.value)));
  const step = (by, text) => {
    const button = element("button", { type: "button", textContent: text });
    button.addEventListener("click", () => show(Number(list.value) + by));
    return button;
  };
  const hint = element("span", { textContent: "Arrow keys walk through the tree; Home is the root, End the bonus token." });
  rounds[0].before(element("div", { className: "tools" }, step(-1, "Previous round"), list, step(1, "Next round"), hint));
  rounds.forEach(attach);
  show(0);
})();
