'use strict';
// The interface of the page that sample.py --html writes. The model runs in a worker (model.js), so
// that the page stays responsive while it computes.
//
// j is a position in the text and l a sense of the token there, as in model.js. A and B are the two
// words that the page compares.

const byId = id => document.getElementById(id);
const data = JSON.parse(byId('data').textContent);

// ------------------------------------------------------------------------------------------------
// Questions to the worker, and what is shown.

const worker = new Worker(URL.createObjectURL(new Blob([byId('worker').textContent])));
const waiting = [];  // the questions without an answer yet; answers come in the same order

function ask(question, args) {
  worker.postMessage({question, args});
  return new Promise((resolve, reject) => waiting.push({resolve, reject}));
}

worker.onmessage = ({data: {answer, error}}) => {
  const {resolve, reject} = waiting.shift();
  if (error !== undefined) reject(Error(error));
  resolve(answer);  // without effect after reject
};

// What the worker is asked about: a text, edits, the words to compare (null: it chooses) and the
// position of the token whose senses are shown (-1: it chooses).
const state = {string: data.prompt, lines: [], compare: null, place: -1};
let seen = null;  // the last answer to look

// Asks for the prediction with the current state, and draws it. Only one question is open at a
// time; changes meanwhile are in the next. A slider leaves the cards as they are.
let isAsking = false;
let isOld = false;
let areCardsOld = false;

async function refresh({withCards} = {withCards: true}) {
  isOld = true;
  areCardsOld ||= withCards;
  say('');
  if (isAsking) return;
  isAsking = true;
  while (isOld) {
    const question = {...state, withWords: areCardsOld};
    isOld = false;
    areCardsOld = false;
    seen = await ask('look', question);
    draw();
  }
  isAsking = false;
}

// Takes changes of the state, such as {lines}, or says why they are wrong and leaves it as it was.
async function change(changes) {
  let complaint = '';
  try {
    await ask('look', {...state, ...changes});
    Object.assign(state, changes);
  } catch (error) {
    complaint = error.message;
  }
  await refresh();
  say(complaint);
}

function say(text) {
  byId('said').textContent = text;
}

// ------------------------------------------------------------------------------------------------
// Drawing: numbers and elements, the text and the prediction, a card for each sense.

function sum(numbers) {
  return numbers.reduce((x, y) => x + y, 0);
}

function signed(x) {
  const sign = x < 0 ? '−' : '+';
  return sign + Math.abs(x).toFixed(2);
}

// A new element. Children that are strings become text, so markup in a prompt has no effect.
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// A word; kind is a or b, for the colour of one of the two words that are compared.
function makeWord({label}, kind) {
  return make('bdi', {className: kind}, label);
}

function draw() {
  drawTokens();
  drawLegend();
  drawNext();
  if (seen.words !== null) layCards();
  for (const card of byId('cards').children) drawCard(card);
  byId('notes').textContent = seen.notes.join(' ');
  byId('a').value = seen.a.label;
  byId('b').value = seen.b.label;
}

function drawTokens() {
  const strip = byId('tokens');
  const focused = [...strip.children].indexOf(document.activeElement);
  strip.replaceChildren(...seen.tokens.map(tokenButton));
  strip.children[focused]?.focus();
}

function tokenButton({label, isEdited, senses}, j) {
  const effects = senses.map(({adds}) => adds);
  const name = make('bdi', {className: isEdited ? 'edited' : ''}, label);
  const stripes = make('i', {});
  stripes.style.backgroundImage = `linear-gradient(${effects.map(stripe).join(', ')})`;
  const total = make('small', {}, signed(sum(effects)));
  const properties = {type: 'button', ariaPressed: j === seen.place, onclick: () => choose(j)};
  return make('button', properties, name, stripes, total);
}

// The stops of a gradient that paint sense l, stronger for a larger effect.
function stripe(x, l, {length: k}) {
  const colour = x > 0 ? 'a' : 'b';
  const strength = 100 * Math.min(1, Math.abs(x)) ** 0.6;
  const top = 100 * l / k;
  const bottom = 100 * (l + 1) / k;
  return `color-mix(in srgb, var(--${colour}) ${strength}%, transparent) ${top}% ${bottom}%`;
}

function drawLegend() {
  const total = sum(seen.tokens.flatMap(({senses}) => senses.map(({adds}) => adds)));
  byId('legend').replaceChildren(
    'Each stripe is a sense. ', make('span', {className: 'scale'}), ' Blue favours ',
    makeWord(seen.b, 'b'), ', orange ', makeWord(seen.a, 'a'), '. Full colour is 1 logit or more. ',
    `The numbers add up to ${signed(total)}: the logit of `, makeWord(seen.a, 'a'),
    ' minus the logit of ', makeWord(seen.b, 'b'), '.');
  if (seen.nDropped > 0) {
    byId('legend').append(` The first ${seen.nDropped} tokens are left out: ` +
      'the text is longer than the model can read.');
  }
}

function drawNext() {
  const largest = Math.max(...seen.next.flatMap(word => [word.before, word.now]));
  const rows = seen.next.map(word => nextRow(word, largest));
  document.querySelector('#next tbody').replaceChildren(...rows);
}

function nextRow(word, largest) {
  const kinds = {[seen.a.id]: 'a', [seen.b.id]: 'b'};
  const kind = kinds[word.id] ?? '';
  const row = make('tr', {className: kind}, make('th', {scope: 'row'}, makeWord(word, kind)));
  for (const p of [word.before, word.now]) {
    const bar = make('span', {});
    bar.style.width = `${100 * p / largest}%`;
    const number = make('data', {value: p}, `${(100 * p).toFixed(1)}%`);
    row.append(make('td', {}, number), make('td', {}, bar));
  }
  return row;
}

// Makes a card for each sense, largest effect first.
function layCards() {
  const {label, senses} = seen.tokens[seen.place];
  const strengths = senses.map(({unscaled}) => Math.abs(unscaled));
  const order = [...strengths.keys()].sort((l, m) => strengths[m] - strengths[l]);
  byId('word').textContent = label;
  byId('cards').replaceChildren(...order.map(newCard));
}

function newCard(l) {
  const {name, senses} = seen.tokens[seen.place];
  const {alpha, logits} = senses[l];
  const card = make('article', {},
    make('h3', {}, `sense ${l}`, make('span', {className: 'adds'})),
    make('p', {className: 'faint'}, `weight α ${alpha.toFixed(2)} × ${signed(logits)} logits`),
    wordTable(seen.words[l]));
  card.dataset.sense = l;
  if (name !== null) card.querySelector('h3').after(slider(l, name));
  return card;
}

// The words that a sense raises most and lowers most, each with what it adds to their logits.
function wordTable(rows) {
  const head = text => make('th', {scope: 'col', colSpan: 2}, text);
  const cells = ([word, logit]) => [
    make('td', {title: word}, make('bdi', {}, word)), make('td', {}, signed(logit))];
  return make('table', {},
    make('thead', {}, make('tr', {}, head('raises'), head('lowers'))),
    make('tbody', {}, ...rows.map(words => make('tr', {}, ...words.flatMap(cells)))));
}

function slider(l, name) {
  const range = make('input', {
    type: 'range', min: 0, max: 2, step: 0.01, ariaLabel: `Weight of sense ${l} of ${name}`});
  range.addEventListener('input', () => setScale(l, range.value));
  const off = make('button', {type: 'button', ariaLabel: `Turn sense ${l} of ${name} off`}, 'off');
  off.addEventListener('click', () => {
    setScale(l, scaleOf(l) === 0 ? '1' : '0');
    saveLink();
  });
  return make('div', {className: 'slider'}, off, range, make('output', {}));
}

// What a slider changes on its card.
function drawCard(card) {
  const l = Number(card.dataset.sense);
  card.querySelector('.adds').replaceChildren(...effectInWords(seen.tokens[seen.place].senses[l]));
  const range = card.querySelector('input');
  if (range === null) return;
  range.value = scaleOf(l);
  card.querySelector('button').ariaPressed = scaleOf(l) === 0;
  card.querySelector('output').textContent = scaleOf(l).toFixed(2);
}

function effectInWords({adds, unscaled}) {
  const isOff = adds === 0;
  const x = isOff ? unscaled : adds;
  if (Math.abs(x) < 0.005) return ['no effect here'];
  const kind = x < 0 ? 'b' : 'a';
  const size = make('b', {className: kind}, Math.abs(x).toFixed(2));
  return [isOff ? 'would add ' : 'adds ', size, ' for ', makeWord(seen[kind], kind)];
}

// ------------------------------------------------------------------------------------------------
// Lines of edits, and the link: the fragment of the address holds the text and the lines.

// The line of a slider is this and a factor, nurse:10=0.5, or this alone where the factor is 0.
function keyOf(l) {
  return `${seen.tokens[seen.place].name}:${l}`;
}

// What scales sense l: its slider's lines, times all others, such as nurse,king:3-10=0.5.
function scaleOf(l) {
  const own = state.lines.map(line => line.replaceAll(/\s/g, '').split('='));
  const factors = own.filter(([key]) => key === keyOf(l)).map(([, factor = 0]) => Number(factor));
  return factors.reduce((x, y) => x * y, seen.otherFactors[l]);
}

function setScale(l, scale) {
  const others = state.lines.filter(line => line.replaceAll(/=.*|\s/g, '') !== keyOf(l));
  const factor = Number((scale / (seen.otherFactors[l] || 1)).toFixed(4));
  const line = factor === 0 ? keyOf(l) : `${keyOf(l)}=${factor}`;
  state.lines = factor === 1 ? others : [...others, line];
  byId('lines').value = state.lines.join('\n');
  refresh({withCards: false});
}

function linesIn(text) {
  return text.split('\n').map(line => line.trim()).filter(line => line !== '');
}

function saveLink() {
  const fragment = new URLSearchParams({text: state.string, edit: state.lines.join('\n')});
  history.replaceState(null, '', `#${fragment}`);
}

async function followLink() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const text = fragment.get('text') ?? data.prompt;
  const lines = fragment.get('edit') ?? '';
  const most = byId('text').maxLength;  // characters, also of what is typed
  Object.assign(state, {string: text.slice(0, most), lines: [], place: -1});
  byId('text').value = state.string;
  byId('lines').value = lines.slice(0, most);
  await change({lines: linesIn(byId('lines').value)});
  if (Math.max(text.length, lines.length) > most) {
    say(`The link is too long: only the first ${most} characters of its text and edits were read.`);
  }
}

// ------------------------------------------------------------------------------------------------
// Responses to the user.

// Shows the senses of the token at j.
async function choose(j) {
  state.place = j;
  await refresh();
  byId('word').scrollIntoView({block: 'nearest'});
}

byId('text').addEventListener('input', () => {
  Object.assign(state, {string: byId('text').value, place: -1});
  refresh();
});

async function changeLines(lines) {
  await change({lines});
  saveLink();
}

byId('edit').addEventListener('submit', event => {
  event.preventDefault();
  changeLines(linesIn(byId('lines').value));
});

byId('edit').addEventListener('reset', () => changeLines([]));  // the browser empties the box

byId('compare').addEventListener('submit', event => {
  event.preventDefault();
  change({compare: ['a', 'b'].map(id => byId(id).value.trim())});
});

// ------------------------------------------------------------------------------------------------
// Writing: texts before and after the edits, drawn with the same random numbers.

let latestRun = 0;

byId('write').addEventListener('submit', event => {
  event.preventDefault();
  latestRun++;
  const {n, temperature, seed} = event.target.elements;
  const settings = {
    string: state.string,
    n: n.valueAsNumber,
    temperature: temperature.valueAsNumber,
    seed: seed.valueAsNumber,
  };
  byId('written').replaceChildren();
  writeColumn('before', {...settings, lines: []});
  if (state.lines.length > 0) writeColumn('now', {...settings, lines: state.lines});
});

byId('stop').addEventListener('click', () => {
  latestRun++;
});

// Adds a column in which the model continues the text; a later run ends it.
async function writeColumn(title, settings) {
  const run = latestRun;
  const prompt = make('span', {className: 'faint'}, settings.string);
  const continuation = make('b', {});
  const column = make('div', {}, make('h2', {}, title), make('p', {}, prompt, continuation));
  byId('written').append(column);
  let text = await ask('write', {title, settings});
  while (text !== undefined && run === latestRun) {
    continuation.textContent = text;
    text = await ask('write', {title});
  }
}

// ------------------------------------------------------------------------------------------------
// The start, and the interface for other scripts.

async function start() {
  await ask('load', {data, weights: byId('weights').textContent});
  byId('weights').remove();  // the worker has its own copy
  byId('model').textContent = data.about;
  await followLink();
  addEventListener('hashchange', followLink);
  addEventListener('change', saveLink);  // of the text or a slider
  document.body.inert = false;
}

window.rucksack = {
  ready: start(),

  // Resolves to the ten likeliest next tokens, [[token, probability], ...], under edits such as
  // ['nurse:10'].
  async predict(string, lines = []) {
    await window.rucksack.ready;
    const {next} = await ask('look', {string, lines, compare: null, place: -1});
    return next.map(({token, now}) => [token, now]);
  },
};
