'use strict';
// Data is only assigned to textContent, so that no text can become markup.
const data = JSON.parse(document.getElementById('data').textContent);
const { about, tokens, layers, totals } = data;
const size = tokens.shown.length;
const routed = layers.filter((layer) => layer.routed);
// One layer for each router: the blocks of a routed loop share one, so the first stands for all.
const choices = routed.filter((layer) => routed.find((other) => other.router === layer.router) === layer);
const unit = about.loops ? 'loop' : 'routed block';
const RAMP = [[243, 241, 236], [143, 179, 201], [31, 95, 139], [12, 43, 66]];
const FATES = [
  ['skips', '#f3f1ec'],
  ['skips, but is in the top C of the window', '#f2b28a'],
  ['selected by the rule, but no room', '#b88fc0'],
  ['processed', '#1f5f8b'],
];
const CLASS_COLOURS = {
  'start of text': '#d9d6ce', whitespace: '#f3f1ec', keyword: '#8fb9e3', identifier: '#fff3c4',
  number: '#f7b787', string: '#a8dcc4', docstring: '#cfe6a8', comment: '#cfcfcf',
  operator: '#e3b3d3', article: '#d8b98a', preposition: '#b9b6e8',
  word: '#fff3c4', punctuation: '#e3b3d3', other: '#f28f8f',
};

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text !== null && text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

const get = (id) => document.getElementById(id);
const number = (x, digits = 2) => (x === null || x === undefined ? 'n/a' : x.toFixed(digits));
const percent = (x, digits = 1) => (x === null || x === undefined ? 'n/a' : `${(100 * x).toFixed(digits)}%`);
const signed = (x) => (x === null || x === undefined ? 'n/a' : (x < 0 ? '−' : '+') + Math.abs(x).toFixed(2));
const sigmoid = (x) => 1 / (1 + Math.exp(-x));

function table(head, rows) {
  const top = element('tr', null, ...head.map((text) => element('th', text)));
  const body = rows.map((row) => element('tr', null, ...row.map((text) => element('td', text))));
  return element('table', null, element('thead', null, top), element('tbody', null, ...body));
}

function blend(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const mixed = RAMP[low].map((c, i) => Math.round(c + (at - low) * (RAMP[low + 1][i] - c)));
  return [`rgb(${mixed.join(',')})`, share > 0.5 ? '#fff' : '#1d2733'];
}

function fate(layer, i) {
  if (layer.entered[i]) return 3;
  if (layer.refused[i]) return 2;
  return layer.top_c[i] ? 1 : 0;
}

function scale(values) {
  const sorted = values.filter((x) => x !== null).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const low = sorted[Math.floor(0.02 * (sorted.length - 1))];
  const high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
  return [low, high > low ? high : low + 1];
}

// A colouring has a name, the layers to choose from, and make(layer) -> paint function and legend.
function ramp(values, [low, high], digits, none) {
  const paint = (i) => (values[i] === null ? ['#fff', '#9a9488'] : blend((values[i] - low) / (high - low)));
  return { paint, ramp: [number(low, digits), number(high, digits)], none };
}

const WAYS = [
  {
    name: `how many ${unit}s process the token`, of: [], needs: choices.length,
    make: () => ({
      paint: (i) => blend(tokens.passed[i] / choices.length),
      keys: totals.blocks_entered.map((_, n) => [`${n} of ${choices.length}`, blend(n / choices.length)[0]]),
    }),
  },
  {
    name: 'whether the layer processes it', of: routed,
    make: (layer) => ({
      paint: (i) => [FATES[fate(layer, i)][1], fate(layer, i) === 3 ? '#fff' : '#1d2733'],
      keys: FATES.filter((_, kind) => tokens.shown.some((_, i) => fate(layer, i) === kind)),
    }),
  },
  { name: "the router's score", of: routed, make: (layer) => ramp(layer.score, scale(layer.score), 2) },
  {
    name: 'the relative change that the block computes', of: layers,
    make: (layer) => ramp(layer.relative, [0, scale(layer.relative)[1]], 2, layer.routed ? 'white: skips' : ''),
  },
  {
    name: 'entropy of the next token', of: [], needs: 1,
    make: () => ramp(tokens.entropy, [0, scale(tokens.entropy)[1]], 1),
  },
  {
    name: 'loss on the next token', of: [], needs: 1,
    make: () => ramp(tokens.loss, [0, scale(tokens.loss)[1]], 1, 'white: none'),
  },
  {
    name: 'kind of token', of: [], needs: 1,
    make: () => ({
      paint: (i) => [CLASS_COLOURS[data.classes[tokens.class[i]]], '#1d2733'],
      keys: totals.classes.map((row) => [row.class, CLASS_COLOURS[row.class]]),
    }),
  },
].filter((way) => way.needs || way.of.length);

const spans = [];
let current = -1;
let pinned = false; // the box keeps its token

function drawText() {
  const inside = document.createDocumentFragment();
  for (let i = 0; i < size; i++) {
    if (i && i % about.sequence_length === 0) {
      const mark = element('span', `window ${i / about.sequence_length + 1}`);
      mark.className = 'window';
      inside.append(mark);
    }
    const span = element('span', tokens.shown[i]);
    span.dataset.i = i;
    spans.push(span);
    inside.append(span);
  }
  get('text').append(inside);
}

function paint() {
  const way = WAYS[get('colour').value];
  get('layer_label').hidden = !way.of.length;
  const drawn = way.make(layers[get('layer').value]);
  spans.forEach((span, i) => { [span.style.background, span.style.color] = drawn.paint(i); });
  const legend = (drawn.keys || []).map(([text, colour]) => {
    const patch = element('i');
    patch.style.background = colour;
    return element('span', null, patch, text);
  });
  if (drawn.ramp) {
    const strip = element('i');
    strip.className = 'ramp';
    strip.style.background = `linear-gradient(to right, ${RAMP.map((c) => `rgb(${c})`).join(',')})`;
    legend.push(element('span', null, drawn.ramp[0], strip, `${drawn.ramp[1]} and above`));
    if (drawn.none) legend.push(element('span', drawn.none));
  }
  get('legend').replaceChildren(...legend);
}

function offerLayers() {
  const way = WAYS[get('colour').value];
  const before = get('layer').value;
  const options = way.of.map((layer) => new Option(layer.name + (layer.routed ? '' : ' (not routed)'), layer.layer));
  get('layer').replaceChildren(...options);
  if (way.of.some((layer) => String(layer.layer) === before)) get('layer').value = before;
  paint();
}

function ruleText(layer, i) {
  if (layer.rule_logit === undefined) return '';
  if (about.logits_of === 'threshold') return number(layer.threshold);
  return sigmoid(layer.rule_logit[i]).toFixed(2);
}

function select(i) {
  if (!(i >= 0 && i < size)) return;
  if (spans[current]) spans[current].classList.remove('current');
  current = i;
  spans[i].classList.add('current');
  const window = Math.floor(i / about.sequence_length);
  const place = about.windows > 1 ? ` (window ${window + 1}, place ${i % about.sequence_length})` : '';
  const side = [
    element('h3', `“${tokens.shown[i].replace(/\n/g, '')}” · ${data.classes[tokens.class[i]]}`),
    element('div', `token ${i}${place}${tokens.bytes[i] ? `, bytes ${tokens.bytes[i]}` : ''}`),
    element('div', `entropy of the next token ${number(tokens.entropy[i])} nats`),
    element('div', i + 1 < size
      ? `loss on “${tokens.shown[i + 1].replace(/\n/g, '')}”, which follows: ${number(tokens.loss[i])} nats`
      : 'nothing follows here, so there is no loss'),
  ];
  const shows = ['layer', 'processed'];
  if (routed.length) shows.push('top-C', 'score', 'gate');
  if (about.rule_column) shows.push(about.rule_column);
  shows.push('change');
  if (routed.length) shows.push('× gate');
  const rows = layers.map((layer) => {
    const change = number(layer.relative[i]);
    if (!layer.routed) {
      const blank = routed.length ? ['', '', '', ...(about.rule_column ? [''] : [])] : [];
      return [layer.name, 'all', ...blank, change, ...(routed.length ? [change] : [])];
    }
    const moved = layer.relative[i] === null ? null : Math.abs(layer.gate[i]) * layer.relative[i];
    return [
      layer.name, layer.entered[i] ? 'yes' : layer.refused[i] ? 'no room' : 'no',
      layer.top_c[i] ? 'yes' : 'no', number(layer.score[i]), number(layer.gate[i]),
      ...(about.rule_column ? [ruleText(layer, i)] : []),
      layer.entered[i] ? change : '–', layer.entered[i] ? number(moved) : '–',
    ];
  });
  if (pinned) {
    const note = element('div', 'pinned; click again or press Escape to unpin');
    note.className = 'pinned';
    side.push(note);
  }
  get('side').replaceChildren(...side, table(shows, rows));
}

function listen() {
  get('colour').append(...WAYS.map((way, i) => new Option(way.name, i)));
  get('colour').addEventListener('change', offerLayers);
  get('layer').addEventListener('change', paint);
  const pointed = (event) => select(Number(event.target.dataset.i ?? NaN));
  get('text').addEventListener('mouseover', (event) => { if (!pinned) pointed(event); });
  get('text').addEventListener('click', (event) => {
    const i = Number(event.target.dataset.i ?? NaN);
    pinned = i >= 0 && !(pinned && i === current);
    select(i >= 0 ? i : current);
  });
  get('text').addEventListener('focus', () => select(Math.max(current, 0)));
  get('text').addEventListener('keydown', (event) => {
    if (event.key === 'Escape') {
      pinned = false;
      select(current);
    }
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    pinned = true;
    select(Math.min(Math.max(current + by, 0), size - 1));
    spans[current].scrollIntoView({ block: 'nearest' });
  });
}

// data-if="name" keeps an element if about[name] is set, and data-if="name=value" if it has that
// value. data-show="name" shows about[name].
function fillIn() {
  for (const part of document.querySelectorAll('[data-if]')) {
    const [name, value] = part.dataset.if.split('=');
    if (value === undefined ? !about[name] : about[name] !== value) part.remove();
  }
  for (const part of document.querySelectorAll('[data-show]')) {
    const value = about[part.dataset.show];
    part.textContent = typeof value === 'number' ? value.toLocaleString('en') : value;
  }
}

function tile(value, text) {
  const made = element('div', null, element('b', value), element('span', text));
  made.className = 'tile';
  return made;
}

function drawTop() {
  document.title = `Routing of ${about.text} by ${about.run}`;
  const tiles = [
    tile(size.toLocaleString('en'), `tokens, cut into ${about.windows} ${about.windows > 1 ? 'windows' : 'window'} of at most ${about.sequence_length}`),
    tile(`${number(totals.loss)} nats`, 'mean loss on the next token'),
    tile(`${number(totals.entropy)} nats`, 'mean entropy of the next token'),
  ];
  if (routed.length) {
    tiles.push(
      about.loops
        ? tile(percent(totals.blocks_entered[1].tokens / size), 'of the tokens go through only one loop')
        : tile(percent(totals.enter_none), 'of the tokens skip every routed block'),
      tile(percent(totals.enter_all), `of the tokens pass every ${unit} (${choices.length})`),
      tile(signed(totals.entropy_correlation), `rank correlation of the number of ${unit}s that process a token with its entropy`),
    );
  }
  get('tiles').append(...tiles);
}

function drawTables() {
  const spread = ([mean, low, middle, high]) => [mean, low, middle, high].map((x) => number(x));
  const head = ['layer', 'tokens processed', ...(routed.length ? ['in the top C', 'both', 'no room', 'score and change, rank correlation'] : []),
    'change, mean', '10%', 'median', '90%'];
  get('layers').append(table(head, totals.layers.map((layer) => [
    layers[layer.layer].name, layer.routed ? percent(layer.entered) : 'all',
    ...(layer.routed ? [percent(layer.top_c), percent(layer.both), percent(layer.refused), signed(layer.score_correlation)]
      : routed.length ? ['', '', '', ''] : []),
    ...spread(layer.relative),
  ])));
  get('classes').append(table(
    ['kind', 'tokens', 'share', ...choices.map((layer) => `processed by ${about.loops ? `loop ${layer.router + 1}` : `layer ${layer.layer}`}`), 'mean entropy', 'mean loss'],
    totals.classes.map((row) => [row.class, row.tokens, percent(row.tokens / size),
      ...row.entered.map((x) => percent(x)), number(row.entropy), number(row.loss)]),
  ));
  if (routed.length) {
    get('counts').append(table(
      [`${unit}s passed`, 'tokens', 'share', 'mean entropy, nats'],
      totals.blocks_entered.map((row, n) => [n, row.tokens, percent(row.tokens / size), number(row.entropy)]),
    ));
  }
}

function drawDepth() {
  if (!data.depth) return;
  const { layers: readers, slots, slots_LS, depth_L, first_token_L } = data.depth;
  const most = Math.max(...slots_LS.flat(), 1e-9);
  const made = table(['layer', ...slots, 'all slots', 'first token'], readers.map((reader, i) => [
    reader, ...slots.map(() => ''), percent(depth_L[i]), percent(first_token_L[i]),
  ]));
  made.className = 'map';
  made.querySelectorAll('tbody tr').forEach((row, i) => slots.forEach((slot, j) => {
    const share = slots_LS[i][j];
    const cell = row.children[j + 1];
    if (!share) return; // 0, or null if the layer processed no token
    [cell.style.background, cell.style.color] = blend(share / most);
    cell.title = `layer ${readers[i]} puts ${percent(share)} of its attention on slot ${slot}`;
    if (slots.length <= 16) cell.textContent = (100 * share).toFixed(1);
  }));
  get('depth').append(made);
}

fillIn();
drawTop();
drawText();
listen();
offerLayers();
drawTables();
drawDepth();
select(Math.min(1, size - 1));
