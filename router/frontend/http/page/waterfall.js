// Where one answer's time went, from the timing that comes with its end: a bar for each stage.

import { make, size, time } from "./dom.js";

const PATHS = {
  disaggregated: (t) => `prefilled on ${t.prefill_worker}, KV pulled, decoded on ${t.decode_worker}`,
  local: (t) => `prefilled and decoded on ${t.decode_worker}`,
  recomputed: (t) => `the hand-off failed: computed again on ${t.decode_worker}`,
  prefill_only: (t) => `prefilled on ${t.prefill_worker}, nothing left to decode`,
};

/** The stages in order: {name, side, start, length, note}. Those of the whole tile it. */
function stagesOf(timing, usage) {
  const output = usage?.completion_tokens ?? 0;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const stages = [];
  let at = 0;
  const add = (name, side, length, note) => {
    stages.push({ name, side, start: at, length, note });
    at += length;
  };
  add("queue", "router", timing.queue_s, "until workers were found");
  const prompt = usage ? `${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}` : "";
  add("prefill", timing.kv_path === "local" ? "decode" : "prefill", timing.prefill_s, prompt);
  add("first write", "router", timing.first_write_s, "first token to you");
  if (output > 1) add("hand-off gap", "kv", timing.handoff_gap_s, "first to second token");
  if (timing.decode_s > 0 && output > 2) {
    const itl = timing.decode_s / (output - 2);
    add("decode", "decode", timing.decode_s, `${output} tokens, ${time(itl)} each`);
  }
  const moved = timing.transfer;
  if (moved) {
    const speed = moved.read_s > 0 ? ` at ${size(moved.num_bytes / moved.read_s)}/s` : "";
    const end = timing.queue_s + timing.prefill_s + moved.exposed_s;
    stages.splice(2, 0, {
      name: "KV transfer",
      side: "kv",
      start: Math.max(0, end - moved.total_s),
      length: moved.total_s,
      note: `${size(moved.num_bytes)} over ${moved.transport}${speed}, ${time(moved.exposed_s)} not hidden`,
    });
  }
  return stages;
}

export function waterfall(timing, usage) {
  const stages = stagesOf(timing, usage);
  const whole = Math.max(timing.total_s, ...stages.map((each) => each.start + each.length), 1e-6);
  const rows = stages.map((each) => {
    const bar = make("i", { class: `bar-fill side-${each.side}` });
    bar.style.marginInlineStart = `${(100 * each.start) / whole}%`;
    bar.style.width = `${(100 * each.length) / whole}%`;
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, each.name),
      make("td", { class: "track", "aria-hidden": "true" }, make("div", {}, bar)),
      make("td", { class: "n" }, time(each.length)),
      make("td", { class: "note" }, each.note),
    );
  });
  const path = PATHS[timing.kv_path]?.(timing) ?? "";
  const more = timing.num_attempts > 1 ? `, ${timing.num_attempts} attempts` : "";
  return make(
    "div",
    { class: "waterfall" },
    make("table", {}, make("caption", {}, `Where ${time(timing.total_s)} went`), make("tbody", {}, ...rows)),
    make("p", { class: "hint" }, `${path}${more}`),
  );
}

/** The same in a line. */
export function summary(timing, usage) {
  const output = usage?.completion_tokens ?? 0;
  const after = timing.handoff_gap_s + timing.decode_s;
  const speed = output > 1 && after > 0 ? ` · ${((output - 1) / after).toFixed(1)} tokens/s` : "";
  return `first token ${time(timing.ttft_s)} · ${output} tokens${speed}`;
}
