// The web page's details of one worker and, with the token, the buttons for orders (kick, ban).

import { bytes, count, digits, el, rate, seconds } from "./format.js";
import { SPLIT } from "./table.js";

export class Details {
  constructor(token) {
    this.token = token;
    this.dialog = document.getElementById("details");
    this.dialog.addEventListener("close", () => { this.shown = null; });
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  async open(worker) {
    if (!worker) return;
    this.shown = worker.id;
    this.facts = el("dl", { className: "facts" });
    this.place = "shown with the token";
    this.figures = {};
    const close = el("button", { type: "button", onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(el("div", { className: "bar" }, el("h2", { id: "d-name" }, worker.name || "(no name)"), close), this.facts, this.orders(worker));
    this.update(worker);
    this.dialog.showModal();
    if (await this.ask(worker)) this.update(worker);
  }

  update(worker) {
    const facts = [];
    const add = (name, value) => facts.push(el("dt", {}, name), el("dd", {}, value));
    add("Key", el("code", {}, worker.peer));
    add("State", [worker.state, worker.reason].filter(Boolean).join(": "));
    add("Rank, share", `${worker.rank ?? "none"}${worker.stage === null ? "" : ` (stage ${worker.stage})`}, ${count(worker.share)} samples of a step`);
    add("Link", `${worker.reach || "not known"}; up ${rate(worker.sent_Bps)}, down ${rate(worker.received_Bps)}`);
    add("Since its start", `sent ${bytes(worker.sent_bytes)}, received ${bytes(worker.received_bytes)}`);
    for (const [name, , words] of [...SPLIT, ["applying_s", "", "applying"]]) add(`Seconds ${words}`, seconds(worker[name]));
    for (const [name, value] of Object.entries(worker.about ?? {})) add(name, value);
    add("Address", this.place);
    for (const [name, value] of Object.entries(this.figures)) add(name, digits(value, 6));
    const changed = facts.length !== this.facts.children.length || facts.some((each, i) => each.textContent !== this.facts.children[i].textContent);
    if (changed) this.facts.replaceChildren(...facts);
  }

  async ask(worker) {
    const headers = this.token ? { "x-auth-token": this.token } : {};
    const answer = await fetch(`api/v1/workers/${worker.peer}`, { headers }).catch(() => null);
    const told = answer?.ok ? await answer.json() : null;
    if (!told || this.shown !== worker.id) return false;
    if (told.address !== undefined) this.place = told.address || "not known";
    this.figures = told.figures ?? {};
    return true;
  }

  orders(worker) {
    if (!this.token) return el("p", { className: "muted small" }, "To remove a worker, open the address with #token=… that the coordinator printed, or use gridtrain kick.");
    const reason = el("input", { type: "text", maxLength: 200, id: "d-reason" });
    const told = el("p", { role: "status" });
    const order = (verb, words) => el("button", { type: "button", className: "danger", onclick: async (event) => {
      const button = event.currentTarget;
      if (button.dataset.sure !== "yes") { button.dataset.sure = "yes"; button.textContent = `Really ${verb}?`; return; }
      button.disabled = true;
      told.textContent = await this.send(worker, verb, reason.value);
      button.disabled = false; button.dataset.sure = ""; button.textContent = words;
    } }, words);
    return el("div", {}, el("div", { className: "bar" }, el("label", { htmlFor: "d-reason" }, "Reason"), reason,
      order("kick", "Kick"), order("ban", "Ban")), told);
  }

  async send(worker, verb, reason) {
    const answer = await fetch(`api/v1/workers/${worker.peer}/${verb}`, { method: "POST", body: JSON.stringify({ reason }),
      headers: { "x-auth-token": this.token, "content-type": "application/json" } }).catch(() => null);
    if (!answer) return "The coordinator does not answer.";
    const body = await answer.json();
    return answer.ok ? body.done : `${body.reason}: ${body.remedy}`;
  }
}
