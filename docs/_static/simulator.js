// The simulator page: reads the sliders, asks the cost model (cost_model.js, generated from the Python), and draws bars and curves.
"use strict"

const NETWORKS = [ // latency in seconds, bandwidth in bytes per second
  ["1 Gbit/s Ethernet", 5e-5, 1.25e8],
  ["10 Gbit/s Ethernet, cloud", 3e-5, 1.25e9],
  ["100 Gbit/s Ethernet with RDMA", 5e-6, 1.25e10],
  ["InfiniBand HDR, 200 Gbit/s", 1.5e-6, 2.5e10],
  ["InfiniBand NDR, 400 Gbit/s", 1.2e-6, 5e10],
]
const LOCAL = [5e-7, 1e10] // between ranks of one host
const ADDITIONS = [2e-9, 3e-10] // seconds for each sparse entry read, and for each dense value written
const DEFAULTS = {latency: Math.log10(3e-5), bandwidth: Math.log10(1.25e9), ranks: 6, here: 0, size: 24, density: -2, bytes: 4, additions: 1}
const CUT = 2 // bars end at this multiple of the dense sum's time
const DENSE = ["dense", "dense_torus"]
const SPARSE = /^(ssar|dsar|allgather|hierarchical)/

const twoDigits = number => Number(number.toPrecision(2))
const field = id => document.getElementById(id)

// Return a number with three digits and a unit.
function shown(number, units, base = 1000) {
  if (!(number > 0)) return `0 ${units[0][0]}`
  const [unit, scale] = units.find(([, scale]) => number >= scale * 0.9995) || units[units.length - 1]
  const scaled = number / scale
  return `${scaled >= 999.5 ? Math.round(scaled).toLocaleString("en") : Number(scaled.toPrecision(3))} ${unit}`.trim()
}
const seconds = number => shown(number, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]])
const rate = number => shown(number * 8, [["Tbit/s", 1e12], ["Gbit/s", 1e9], ["Mbit/s", 1e6]])
const share = number => `${Number((100 * number).toPrecision(3))} %`
const whole = number => Math.round(number).toLocaleString("en")

// Return the arguments of the model, as the controls say.
function settings() {
  const power = id => Number(field(id).value)
  const size = Math.round(2 ** power("size")), density = 10 ** power("density"), ranks = Math.round(2 ** power("ranks"))
  return {
    ranks, size, density, entries: Math.max(1, Math.round(size * density)), bytes: Number(field("bytes").value),
    latency: twoDigits(10 ** power("latency")), bandwidth: twoDigits(8 * 10 ** power("bandwidth")) / 8, here: Math.min(2 ** power("here"), ranks),
    additions: field("additions").checked,
  }
}

function predicted(given, entries = given.entries) {
  const near = [Math.min(LOCAL[0], given.latency), Math.max(LOCAL[1], given.bandwidth)]
  return prediction(given.ranks, given.size, entries, given.bytes, given.latency, given.bandwidth,
    ...(given.additions ? ADDITIONS : [0, 0]), given.here, ...near)
}

// Return the fastest of the sparse algorithms, or of those that are named.
const fastest = (times, wanted = name => SPARSE.test(name)) =>
  Math.min(...Object.keys(times).filter(wanted).map(name => times[name]))

// Return the name of the faster dense sum.
const bestDense = times => DENSE.reduce((best, name) => times[name] < times[best] ? name : best)

// Return the density up to which the best sparse algorithm is faster than the best dense one: 0 if it never is, 1 if it always is.
function crossing(given, wanted) {
  const gains = density => {
    const {times} = predicted(given, Math.max(1, given.size * density))
    return fastest(times, wanted) < times[bestDense(times)]
  }
  const least = Math.max(1 / given.size, 1e-9), grid = 120
  let low = 0
  for (let i = grid; i >= 0 && !low; i--) {
    const density = least ** (1 - i / grid)
    if (gains(density)) low = density
  }
  if (!low || low >= 1) return low
  let high = Math.min(1, low * least ** (-1 / grid))
  for (let i = 0; i < 30; i++) {
    const middle = Math.sqrt(low * high)
    if (gains(middle)) low = middle
    else high = middle
  }
  return low
}

function verdict(given, {times, choice}) {
  const dense = bestDense(times), wins = crossing(given), ratio = times[dense] / times[choice]
  const where = wins <= 0 ? "Sparse sums never win here." : wins >= 1 ? "Sparse sums win at every density." :
    `Sparse sums win below a density of ${share(wins)}.`
  const naive = crossing(given, name => name === "allgather")
  const also = naive >= 1 || wins <= 0 ? "" : naive <= 0 ? " An allgather, as frameworks use it, never does." :
    ` An allgather, as frameworks use it, only below ${share(naive)}.`
  const gain = choice === "dense" ? `auto takes dense: ${seconds(times.dense)}.` : `auto takes ${choice}: ${seconds(times[choice])}, ` +
    `${Number(ratio.toPrecision(2))} times as fast as ${dense} (${seconds(times[dense])}).`
  return [gain, where + also]
}

function row(name, time, dense, choice) {
  const line = document.createElement("tr"), ratio = time / dense
  const head = document.createElement("th"), value = document.createElement("td"), cell = document.createElement("td")
  head.scope = "row"
  head.append(...name.split("_").flatMap((part, i) => i ? ["_", document.createElement("wbr"), part] : [part]))
  if (name === choice) head.append(Object.assign(document.createElement("strong"), {textContent: " auto"}))
  value.textContent = seconds(time)
  const [inside, track, bar, label] = ["div", "div", "div", "span"].map(tag => document.createElement(tag))
  bar.className = `bar${DENSE.includes(name) ? " dense" : ratio < 1 ? " gains" : ""}${name === choice ? " chosen" : ""}${ratio > CUT ? " cut" : ""}`
  bar.style.width = `${Math.max(0.4, 100 * Math.min(ratio / CUT, 1))}%`
  label.textContent = Number(ratio.toPrecision(2)).toLocaleString("en")
  track.className = "track"
  track.append(bar)
  inside.className = "length"
  inside.append(track, label)
  cell.append(inside)
  line.append(head, value, cell)
  return line
}

function drawn(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const name in attributes) element.setAttribute(name, attributes[name])
  if (text !== undefined) element.textContent = text
  return element
}

function curves(given) {
  const [left, right, top, bottom] = [80, 500, 14, 276], densities = []
  for (let power = -6; power <= 0.001; power += 0.1) densities.push(10 ** power)
  const found = densities.map(density => predicted(given, Math.max(1, given.size * density)).times)
  const lines = [
    ["dense", found.map(times => times[bestDense(times)])],
    ["allgather", found.map(times => times.allgather)],
    ["best sparse", found.map(times => fastest(times))],
  ]
  const dense = lines[0][1][0], all = lines.flatMap(([, times]) => times).filter(time => time > 0)
  const lowest = Math.floor(Math.log10(Math.min(...all))), highest = Math.min(Math.ceil(Math.log10(Math.max(...all))), Math.ceil(Math.log10(dense)) + 2)
  const x = density => left + (right - left) * (Math.log10(density) + 6) / 6
  const y = time => bottom - (bottom - top) * (Math.log10(time) - lowest) / (highest - lowest)
  const picture = field("curves"), parts = []
  for (let power = lowest; power <= highest; power++) {
    parts.push(drawn("line", {x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power), class: "grid"}))
    parts.push(drawn("text", {x: left - 6, y: y(10 ** power) + 5, class: "end"}, seconds(10 ** power)))
  }
  for (let power = -6; power <= 0; power++) {
    parts.push(drawn("line", {x1: x(10 ** power), x2: x(10 ** power), y1: top, y2: bottom, class: "grid"}))
    parts.push(drawn("text", {x: x(10 ** power), y: bottom + 20, class: power % 2 ? "middle odd" : "middle"}, share(10 ** power)))
  }
  parts.push(drawn("text", {x: (left + right) / 2, y: bottom + 40, class: "middle"}, "density"))
  const places = []
  for (const [name, times] of lines) {
    const points = times.map((time, i) => [x(densities[i]), y(time)]).filter(([, height]) => height >= top - 1)
    parts.push(drawn("polyline", {points: points.map(point => point.map(value => value.toFixed(1)).join(",")).join(" "), class: `line ${name.split(" ")[0]}`}))
    places.push([Math.min(Math.max(points[points.length - 1][1], top + 6), bottom), name, points[points.length - 1][0]])
  }
  places.sort((a, b) => a[0] - b[0])
  places.forEach((place, i) => { if (i && place[0] < places[i - 1][0] + 17) place[0] = places[i - 1][0] + 17 })
  for (const [height, name] of places) parts.push(drawn("text", {x: right + 8, y: height + 5, class: `name ${name.split(" ")[0]}`}, name))
  const here = x(Math.max(given.entries / given.size, 1e-6))
  parts.push(drawn("line", {x1: here, x2: here, y1: top, y2: bottom, class: "here"}))
  picture.replaceChildren(...parts)
}

function command(given) {
  const float = number => String(Number(number.toPrecision(4)))
  const local = given.here > 1 ? ` --ranks-per-host ${given.here} --local-latency ${float(Math.min(LOCAL[0], given.latency))}` +
    ` --local-bandwidth ${float(Math.max(LOCAL[1], given.bandwidth))}` : ""
  const dtype = {2: "float16", 4: "float32", 8: "float64"}[given.bytes] || "float32"
  return `sparseallreduce simulate --ranks ${given.ranks} --size ${given.size} --density ${float(given.density)}` +
    ` --latency ${float(given.latency)} --bandwidth ${float(given.bandwidth)}${local}${dtype === "float32" ? "" : ` --dtype ${dtype}`}`
}

function update() {
  const given = settings(), found = predicted(given)
  const labels = {
    latency: seconds(given.latency), bandwidth: rate(given.bandwidth), ranks: whole(given.ranks), here: whole(given.here),
    size: whole(given.size), density: `${share(given.entries / given.size)}, k = ${whole(given.entries)}`,
  }
  for (const id in labels) {
    field(id).setAttribute("aria-valuetext", labels[id])
    document.querySelector(`output[for=${id}]`).textContent = labels[id]
  }
  const [gain, where] = verdict(given, found)
  field("verdict").replaceChildren(Object.assign(document.createElement("strong"), {textContent: gain}), ` ${where}`)
  const dense = bestDense(found.times), order = Object.keys(found.times).sort((a, b) => found.times[a] - found.times[b])
  const rows = [dense, ...order.filter(name => name !== dense)]
  field("bars").replaceChildren(...rows.map(name => row(name, found.times[name], found.times[dense], found.choice)))
  curves(given)
  field("curves").setAttribute("aria-label", `Time over density of dense, allgather and the best sparse algorithm. ${gain} ${where}`)
  field("command").textContent = command(given)
  const same = NETWORKS.findIndex(([, latency, bandwidth]) =>
    Math.abs(Math.log10(latency / given.latency)) < 0.02 && Math.abs(Math.log10(bandwidth / given.bandwidth)) < 0.02)
  field("network").value = String(same)
}

// The address keeps the settings, so that they can be sent to somebody.
function remember() {
  const values = Object.keys(DEFAULTS).map(id => `${id}=${field(id).type === "checkbox" ? Number(field(id).checked) : field(id).value}`)
  history.replaceState(null, "", `#${values.join("&")}`)
}

function set(values) {
  for (const id in DEFAULTS) {
    const value = id in values && Number.isFinite(Number(values[id])) ? Number(values[id]) : DEFAULTS[id]
    if (field(id).type === "checkbox") field(id).checked = Boolean(value)
    else field(id).value = String(value)
    if (!field(id).value) field(id).value = String(DEFAULTS[id])
  }
}

function start() {
  field("network").append(new Option("as the sliders say", "-1"), ...NETWORKS.map(([name], i) => new Option(name, String(i))))
  set(Object.fromEntries(new URLSearchParams(location.hash.slice(1))))
  field("network").addEventListener("change", event => {
    const chosen = NETWORKS[Number(event.target.value)]
    if (chosen) {
      field("latency").value = String(Math.log10(chosen[1]))
      field("bandwidth").value = String(Math.log10(chosen[2]))
    }
  })
  field("simulator").addEventListener("input", update)
  field("simulator").addEventListener("change", () => { update(); remember() })
  field("simulator").addEventListener("submit", event => event.preventDefault())
  update()
}

start()
