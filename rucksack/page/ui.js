'use strict';
// The interface of the page that rucksack page writes. The model runs in a worker (model.js), so
// that the page stays responsive while it computes.
//
// j is a position in the text and l a sense of the token there, as in model.js. A and B are the two
// words that the page compares.

const byId = id => document.getElementById(id);
const data = JSON.parse(byId('data').textContent);

// ------------------------------------------------------------------------------------------------
// Questions to the worker, and what is shown.

const worker = new Worker(URL.createObjectURL(new Blob([byId('worker').textContent])));
const waiting = [];  // questions that are not answered yet; answers come in the same order

function ask(question, args) {
  worker.postMessage({question, args});
  return new Promise((resolve, reject) => waiting.push({resolve, reject}));
}

worker.onmessage = ({data: {answer, error}}) => {
  const {resolve, reject} = waiting.shift();
  if (error !== undefined) reject(Error(error));
  resolve(answer);  // has no effect after reject
};

// What is shown, under its names in the link: a text, edits (one per line), the words A
// and B, the position of the token whose senses are shown, and the sense whose weights are shown.
// The page chooses what is empty.
const START = {text: data.prompt, edit: '', a: '', b: '', token: '', sense: ''};
const state = {...START};
let seen = null;  // the last answer to look

function look({text, edit, a, b, token}, withWords) {
  const lines = linesIn(edit);
  const compare = a === '' ? null : [a, b];
  const place = parseInt(token, 10);  // NaN if it is empty
  return ask('look', {string: text, lines, compare, place, withWords});
}

// Asks for the prediction with the current state, and draws it. Only one question is open at a
// time; changes made meanwhile go into the next. A slider leaves the cards as they are.
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
    const answer = look(state, areCardsOld);
    isOld = false;
    areCardsOld = false;
    seen = await answer;
    draw();
  }
  isAsking = false;
  document.body.className = '';
  if (state.edit !== '') countChanged();  // not awaited: it is slow on a long text
}

async function countChanged() {
  byId('changed').textContent = await ask(
    'countChanged', {string: state.text, lines: linesIn(state.edit)});
}

// Applies changes to the state, such as {edit}, or says why they are wrong and leaves it as it was.
async function change(changes) {
  let complaint = '';
  clearWritten();
  try {
    await look({...state, ...changes});
    Object.assign(state, changes);
  } catch (error) {
    complaint = error.message;
  }
  await refresh();
  say(complaint);
  saveLink();
}

function say(text) {
  byId('said').textContent = text;
}

// ------------------------------------------------------------------------------------------------
// Drawing: numbers and elements, the text and the prediction, a card for each sense.

function sum(numbers) {
  return numbers.reduce((x, y) => x + y, 0);
}

function signed(x, digits = 2) {
  const sign = x < 0 ? '−' : '+';
  return sign + Math.abs(x).toFixed(digits);
}

function percent(p) {
  return make('data', {value: p}, `${(100 * p).toFixed(1)}%`);
}

// A new element. Children that are strings become text, so markup in a prompt has no effect.
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// A word, in its colour if it is one of the two that are compared.
function makeWord({id, label}) {
  const kinds = {[seen.a.id]: 'a', [seen.b.id]: 'b'};
  return make('bdi', {className: kinds[id] ?? ''}, label);
}

function draw() {
  drawTokens();
  drawLegend();
  drawNext();
  drawMoved();
  if (seen.words !== null) layCards();
  for (const card of byId('cards').children) drawCard(card);
  drawAlpha();
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
  const total = make('small', {className: 'faint'}, signed(sum(effects)));
  const properties = {type: 'button', ariaPressed: j === seen.place, onclick: () => choose(j)};
  return make('button', properties, name, stripes, total);
}

// The stops of a gradient that paint sense l, stronger for a larger effect.
function stripe(x, l, {length: k}) {
  return `${shade(x > 0 ? 'a' : 'b', Math.abs(x))} ${100 * l / k}% ${100 * (l + 1) / k}%`;
}

// A colour of the page, stronger for a larger x; from 1 on it is full.
function shade(colour, x) {
  const strength = 100 * Math.min(1, x) ** 0.6;
  return `color-mix(in srgb, var(--${colour}) ${strength}%, transparent)`;
}

function drawLegend() {
  const total = sum(seen.tokens.flatMap(({senses}) => senses.map(({adds}) => adds)));
  byId('legend').replaceChildren(
    'Each stripe is a sense. Blue favours ', makeWord(seen.b), ', orange ', makeWord(seen.a),
    '. Full colour is 1 logit or more. A logit is a word’s score: adding 1 makes the word ',
    '2.7 times as likely relative to any other. ',
    `The numbers add up to ${signed(total)}: the logit of `, makeWord(seen.a),
    ' minus the logit of ', makeWord(seen.b), '. A dot marks letters that do not follow a space, ',
    'a star a token with edited senses.');
  if (seen.nDropped > 0) {
    byId('legend').append(` The first ${seen.nDropped} tokens are left out: ` +
      'the text is longer than the model can read.');
  }
}

function drawNext() {
  const largest = Math.max(...seen.next.flatMap(word => [word.before, word.now]));
  document.querySelector('#next tbody').replaceChildren(
    ...seen.next.map(word => nextRow(word, largest)));
}

function nextRow(word, largest) {
  const name = makeWord(word);
  const row = make('tr', {className: name.className}, make('th', {scope: 'row'}, name));
  for (const p of [word.before, word.now]) {
    const bar = make('span', {});
    bar.style.width = `${100 * p / largest}%`;
    row.append(make('td', {}, percent(p)), make('td', {}, bar));
  }
  return row;
}

// The two words that are compared, and the words that the edits move most.
function drawMoved() {
  byId('pair').replaceChildren(...[seen.a, seen.b].map(word =>
    make('span', {}, makeWord(word), ' ', percent(word.before), ' → ', percent(word.now))));
  byId('moved').hidden = state.edit === '';
  byId('most').replaceChildren(...seen.moved.map(word => {
    const points = 100 * (word.now - word.before);
    return make('span', {}, makeWord(word), ` ${signed(points, 1)} `);
  }));
  byId('changed').textContent = '…';  // until countChanged knows
}

// Makes a card for each sense, largest effect first.
function layCards() {
  const {label, senses} = seen.tokens[seen.place];
  const strength = l => Math.abs(senses[l].unscaled);
  const order = [...senses.keys()].sort((l, m) => strength(m) - strength(l));
  byId('word').textContent = label;
  byId('cards').replaceChildren(...order.map(newCard));
}

function newCard(l) {
  const {name, senses} = seen.tokens[seen.place];
  const {alpha, logits} = senses[l];
  const card = make('article', {},
    make('h3', {}, make('button', {type: 'button'}, `sense ${l}`),
      make('span', {className: 'adds'})),
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
    type: 'range', min: 0, max: 2, step: 0.01, ariaLabel: `Scale sense ${l} of ${name}`});
  range.addEventListener('input', () => setScale(l, range.value));
  const off = make('button', {
    type: 'button', className: 'off', ariaLabel: `Turn sense ${l} of ${name} off`}, 'off');
  off.addEventListener('click', () => setScale(l, scaleOf(l) === 0 ? '1' : '0'));
  return make('div', {className: 'slider'}, off, range, make('output', {}));
}

// The weights of the chosen sense on the tokens of the text, darker for a larger weight.
function drawAlpha() {
  const cards = [...byId('cards').children];
  const chosen = cards.find(card => card.dataset.sense === state.sense) ?? cards[0];
  const {sense} = chosen.dataset;
  for (const card of cards) card.ariaCurrent = card === chosen;
  byId('sense').textContent = `sense ${sense}`;
  const row = byId('alpha');
  row.replaceChildren(...seen.tokens.map(({label, senses}, j) => {
    const {alpha} = senses[sense];
    const number = make('data', {value: alpha}, alpha.toFixed(2));
    const cell = make('span', {ariaCurrent: j === seen.place}, make('bdi', {}, label), ' ', number);
    cell.style.backgroundColor = shade('edge', 0.7 * alpha);  // the text stays readable
    return cell;
  }));
  row.scrollTop = row.children[seen.place].offsetTop;
}

// What a slider changes on its card.
function drawCard(card) {
  const l = Number(card.dataset.sense);
  card.querySelector('.adds').replaceChildren(...effectInWords(seen.tokens[seen.place].senses[l]));
  const range = card.querySelector('input');
  if (range === null) return;
  range.value = scaleOf(l);
  card.querySelector('.off').ariaPressed = scaleOf(l) === 0;
  card.querySelector('output').textContent = scaleOf(l).toFixed(2);
}

function effectInWords({adds, unscaled}) {
  const x = adds || unscaled;  // of a sense that is off, what it would add
  if (Math.abs(x) < 0.005) return ['no effect here'];
  const kind = x < 0 ? 'b' : 'a';
  const size = make('b', {className: kind}, Math.abs(x).toFixed(2));
  return [adds === 0 ? 'would add ' : 'adds ', size, ' for ', makeWord(seen[kind])];
}

// ------------------------------------------------------------------------------------------------
// Lines of edits, and the link: the fragment of the address holds the state.

// Splits the edits into the factors of sense l's own lines, nurse:10=0.5 or nurse:10, and others.
function linesOf(l) {
  const key = `${seen.tokens[seen.place].name}:${l}`;
  const others = [];
  const factors = [];
  for (const line of linesIn(state.edit)) {
    const [start, factor = 0] = line.replaceAll(/\s/g, '').split('=');
    if (start === key) factors.push(Number(factor));
    else others.push(line);
  }
  return {key, factors, others};
}

// What scales sense l: its slider's lines, times all others, such as nurse,king:3-10=0.5.
function scaleOf(l) {
  return linesOf(l).factors.reduce((x, y) => x * y, seen.otherFactors[l]);
}

function setScale(l, scale) {
  const {key, others} = linesOf(l);
  const factor = Number((scale / (seen.otherFactors[l] || 1)).toFixed(4));
  if (factor !== 1) others.push(factor === 0 ? key : `${key}=${factor}`);
  state.edit = others.join('\n');
  clearWritten();
  byId('lines').value = state.edit;
  refresh({withCards: false});
}

function linesIn(text) {
  return text.split('\n').map(line => line.trim()).filter(line => line !== '');
}

function saveLink() {
  const used = Object.entries(state).filter(([name, value]) => name === 'text' || value !== '');
  try {
    history.replaceState(null, '', `#${new URLSearchParams(used)}`);
  } catch {}  // in <iframe srcdoc>, the page has no address of its own
}

function followLink() {
  return show(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
}

// Shows what a link holds; what it lacks is as at the start.
async function show({edit = '', a = '', b = '', ...rest}) {
  Object.assign(state, START, rest);
  byId('text').value = state.text;
  byId('lines').value = edit;
  await change({edit, a, b});
}

// ------------------------------------------------------------------------------------------------
// Responses to the user.

// Shows a wrong prediction and the edit that repairs it.
function wrongButton(wrong) {
  return make('button', {type: 'button', onclick: () => show(wrong)}, `${wrong.text} `,
    make('del', {}, wrong.a), ' → ', make('ins', {}, wrong.b));
}

// Shows the senses of the token at j.
async function choose(j) {
  Object.assign(state, {token: String(j), sense: ''});
  await refresh();
  byId('word').scrollIntoView({block: 'nearest'});
}

// The sense under the pointer, or with the focus, shows its weights.
for (const type of ['pointerover', 'focusin']) {
  byId('cards').addEventListener(type, ({target}) => {
    const card = target.closest('article');
    if (card === null) return;
    state.sense = card.dataset.sense;
    drawAlpha();
  });
}

byId('text').addEventListener('input', () => {
  Object.assign(state, {a: '', b: '', token: '', sense: '', text: byId('text').value});
  document.body.className = 'old';
  clearWritten();
  refresh();
});

// Submits a form by a click on its button, or Enter: in a sandbox, the browser may submit none.
addEventListener('click', event => {
  const {form, type} = event.target;
  if (type !== 'submit') return;
  event.preventDefault();
  if (form.reportValidity()) form.dispatchEvent(new Event('submit', {bubbles: true}));
});

byId('edit').addEventListener('submit', () => change({edit: byId('lines').value.trim()}));
// The browser empties the box.
byId('edit').addEventListener('reset', () => change({edit: ''}));

byId('compare').addEventListener('submit', () => {
  change({a: byId('a').value.trim(), b: byId('b').value.trim()});
});

// ------------------------------------------------------------------------------------------------
// Writing: texts before and after the edits, drawn with the same random numbers.

let latestRun = 0;

function clearWritten() {
  latestRun++;
  byId('written').replaceChildren();
}

byId('write').addEventListener('submit', event => {
  clearWritten();
  const numbers = [...new FormData(event.target)].map(([name, value]) => [name, Number(value)]);
  const settings = {string: state.text, ...Object.fromEntries(numbers)};
  writeColumn('before', {...settings, lines: []});
  if (state.edit !== '') writeColumn('now', {...settings, lines: linesIn(state.edit)});
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
// The start.

async function start() {
  await ask('load', {data, weights: byId('weights').textContent});
  byId('weights').remove();  // the worker has its own copy
  byId('model').textContent = data.about;
  byId('wrong').append(...data.wrong.map(wrongButton));
  await followLink();
  addEventListener('hashchange', followLink);
  addEventListener('click', saveLink);  // on a token, a sense or off
  setInterval(saveLink, 300);  // what is typed; browsers limit how often an address may change
  document.body.inert = false;
}

const ready = start();
