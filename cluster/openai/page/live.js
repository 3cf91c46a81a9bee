"use strict";
// Draws what /ui/events tells, once a second. Rates are made here, from counters that only rise.

const STATES = ["free", "cached", "private", "shared"];
const HOST_STATES = ["free", "cached", "swapped", "swapped"];
const PHASES = ["queued", "prefill", "parked", "decode"];
const WINDOW_SECONDS = 10;
const $ = (id) => document.getElementById(id);
const seen = [];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function legend(names, counts) {
  const line = element("p", undefined, "legend");
  for (const name of names) {
    line.append(element("i", undefined, name), counts && name in counts ? `${name} ${counts[name]}` : name);
  }
  return line;
}

// --- figures ---

function drawFigures(now) {
  seen.push({ at: performance.now() / 1000, told: now });
  while (seen.length > 2 && seen[seen.length - 1].at - seen[0].at > WINDOW_SECONDS) seen.shift();
  const first = seen[0], last = seen[seen.length - 1], seconds = last.at - first.at;
  const sum = (value) => (typeof value === "object" && value ? Object.values(value).reduce((a, b) => a + b, 0) : value || 0);
  const rise = (name) => sum(last.told[name]) - sum(first.told[name]);
  const mean = (name) => {
    const a = first.told[name], b = last.told[name];
    const count = b ? b.count - (a ? a.count : 0) : 0;
    return count > 0 ? (b.sum - (a ? a.sum : 0)) / count : null;
  };
  const time = (value) => (value === null ? "–" : value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`);
  const figures = [
    ["running", now.running ?? 0], ["waiting", now.waiting ?? 0], ["swapped", now.swapped ?? 0],
    ["tokens/s", seconds > 0 ? (rise("sampled_tokens") / seconds).toFixed(0) : "–"],
    ["first token", time(mean("time_to_first_token"))],
    ["between tokens", time(mean("inter_token_latency"))],
    ["preemptions", sum(now.preemptions)],
  ];
  $("figures").replaceChildren(...figures.map(([name, value]) => {
    const box = element("div", undefined, "figure");
    box.append(element("b", value), element("span", name));
    return box;
  }));
  const advice = (now.advice ?? []).map((one) => `${one.reason}: ${one.remedy}`);
  $("advice").hidden = !advice.length;
  $("advice").textContent = advice.join("\n");
}

// --- blocks ---

function drawBlocks(map, names, title) {
  const box = element("div");
  const each = map.blocks_per_cell > 1 ? `, a square is ${map.blocks_per_cell}` : "";
  box.append(element("div", `${title}: ${map.blocks} blocks${each}`));
  const cells = Uint8Array.from(atob(map.cells), (letter) => letter.charCodeAt(0));
  const size = cells.length > 1500 ? 6 : 9, columns = Math.max(1, Math.floor(560 / size));
  const canvas = element("canvas");
  canvas.width = Math.min(cells.length, columns) * size;
  canvas.height = Math.ceil(cells.length / columns) * size;
  const context = canvas.getContext("2d"), colours = names.map(colour);
  cells.forEach((state, i) => {
    context.fillStyle = colours[state];
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
  });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", STATES.map((state, i) => `${map.counts[state]} ${names[i]}`).join(", "));
  const counts = {};
  STATES.forEach((state, i) => (counts[names[i]] = (counts[names[i]] || 0) + map.counts[state]));
  box.append(canvas, legend([...new Set(names)], counts));
  return box;
}

// --- the packed batch of the last steps ---

function drawSteps(steps) {
  const box = element("div");
  box.append(element("div", "last steps, newest below: a line is one step's tokens, each piece a request's"));
  const width = 560, height = 7, canvas = element("canvas");
  canvas.width = width;
  canvas.height = Math.max(1, steps.length) * height;
  const context = canvas.getContext("2d");
  steps.forEach((step, line) => {
    const scale = width / Math.max(step.budget, step.tokens.reduce((a, b) => a + b, 0));
    context.fillStyle = colour("free");
    context.fillRect(0, line * height, width, height - 1);
    let x = 0;
    step.rows.forEach((row, i) => {
      const wide = Math.max(1, step.tokens[i] * scale);
      context.fillStyle = `hsl(${(row * 47) % 360} 55% ${step.tokens[i] > 1 ? 62 : 45}%)`;
      context.fillRect(x, line * height, wide > 2 ? wide - 0.5 : wide, height - 1);
      x += wide;
    });
  });
  const last = [...steps].reverse().find((step) => step.seconds !== null);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${steps.length} steps`);
  box.append(canvas);
  if (last) {
    const tokens = last.tokens.reduce((a, b) => a + b, 0);
    box.append(element("p", `step ${last.id}: ${last.rows.length} branches, ${tokens} of ${last.budget} tokens, ${(1000 * last.seconds).toFixed(0)} ms`, "legend"));
  }
  return box;
}

function drawWorkers(workers) {
  $("workers").replaceChildren(...workers.map((worker) => {
    const box = element("div", undefined, "worker");
    box.append(element("h2", `${worker.worker_id}: ${worker.status}${worker.detail ? ", " + worker.detail : ""}`));
    if (worker.device_blocks) {
      const maps = element("div", undefined, "maps"), left = element("div");
      left.append(drawBlocks(worker.device_blocks, STATES, "device"));
      if (worker.host_blocks.blocks) left.append(drawBlocks(worker.host_blocks, HOST_STATES, "host"));
      maps.append(left, drawSteps(worker.steps));
      box.append(maps);
    }
    return box;
  }));
}

// --- requests ---

function drawRequests(requests) {
  $("requests").replaceChildren(...requests.map((one) => {
    const row = element("tr"), name = element("td"), button = element("button", one.id.slice(0, 28));
    button.addEventListener("click", () => showTimeline(one.id));
    name.append(button);
    const bar = element("div", undefined, "bar"), phases = element("td");
    for (const phase of PHASES) {
      const part = element("div", undefined, phase);
      part.style.width = `${(100 * one.seconds[phase]) / Math.max(one.seconds.total, 1e-9)}%`;
      part.title = `${phase} ${one.seconds[phase].toFixed(3)} s`;
      bar.append(part);
    }
    phases.append(bar);
    const notes = [];
    if (one.preemptions) notes.push(`${one.preemptions} preempted`);
    if (one.migrations) notes.push(`${one.migrations} moved`);
    row.append(name, element("td", one.worker ?? "–"), element("td", one.outcome ?? one.status),
      element("td", one.prompt_tokens === null ? "–" : `${one.prompt_tokens} (${one.cached_tokens})`),
      phases, element("td", one.seconds.total.toFixed(2)), element("td", notes.join(", ")));
    return row;
  }));
}

async function showTimeline(id) {
  const reply = await fetch("/v1/requests/" + encodeURIComponent(id), { headers: headers() });
  $("timeline").hidden = false;
  $("timeline").textContent = JSON.stringify(await reply.json(), null, 2);
}

// --- the stream ---

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { authorization: "Bearer " + key } : {};
}

function draw(now) {
  if (now.error) {
    $("state").textContent = now.error;
    return;
  }
  $("state").textContent = `${now.workers.filter((one) => one.status === "ready").length} of ${now.workers.length} workers ready, ${now.unfinished ?? now.running} requests unfinished`;
  drawFigures(now);
  drawWorkers(now.workers);
  drawRequests(now.requests);
}

async function read() {
  // Not EventSource: it cannot send a key.
  const reply = await fetch("/ui/events", { headers: headers() });
  $("key-form").hidden = reply.status !== 401;
  if (!reply.ok) throw new Error((await reply.json()).error?.message ?? reply.statusText);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server closed the stream");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (events.length) draw(JSON.parse(events[events.length - 1].slice("data: ".length)));
  }
}

async function run() {
  for (;;) {
    try {
      await read();
    } catch (error) {
      $("state").textContent = error.message;
      if (!$("key-form").hidden) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  run();
});
run();
