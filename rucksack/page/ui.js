'use strict';
// The interface of the page that sample.py --html writes. The model runs in a worker (model.js), so
// that the page stays responsive while it computes.
//
// j is a position in the text and l a sense of the token there, as in model.js. A and B are the two
// words that the page compares.

const byId = id => document.getElementById(id);
const data = JSON.parse(byId('data').textContent);
const k = data.config.n_sense;
const allSenses = Array.from({length: k}, (_, l) => l);

// ------------------------------------------------------------------------------------------------
// Questions to the worker. A question gets one answer; partial results before it go to tell.

const worker = new Worker(URL.createObjectURL(new Blob([byId('worker').textContent])));
const waiting = new Map();  // by number, the questions without an answer yet
let nAsked = 0;

function ask(question, args, tell = null) {
  return new Promise((resolve, reject) => {
    nAsked++;
    waiting.set(nAsked, {resolve, reject, tell});
    worker.postMessage({n: nAsked, ask: question, args});
  });
}

worker.onmessage = ({data: {n, answer, part, error}}) => {
  if (!waiting.has(n)) return;
  const {resolve, reject, tell} = waiting.get(n);
  if (part !== undefined) {
    tell?.(part);
    return;
  }
  waiting.delete(n);
  if (error === undefined) {
    resolve(answer);
  } else {
    reject(Error(error));
  }
};

worker.onerror = ({message}) => {
  for (const {reject} of waiting.values()) reject(Error(message || 'its worker has failed'));
  waiting.clear();
};

// ------------------------------------------------------------------------------------------------
// What is shown.

const state = {text: data.prompt, lines: [], compare: null};  // the link has no compare
let place = 0;    // the position of the chosen token, whose senses are shown
let seen = null;  // the last answer to look

// Asks for the prediction with the current text and edits, and draws it; layOut, if given, runs
// before drawing. Only one question is open at a time; of any asked meanwhile, the last is kept.
let isRefreshing = false;
let nextRefresh = null;

async function refresh(layOut = null) {
  if (isRefreshing) {
    nextRefresh = {layOut: layOut ?? nextRefresh?.layOut};
    return;
  }
  isRefreshing = true;
  const busy = setTimeout(() => document.body.classList.add('busy'), 200);  // milliseconds
  try {
    const {text: string, lines, compare} = state;
    seen = await ask('look', {string, lines, compare});
    if (layOut) await layOut();
    draw();
  } catch (error) {
    say(error.message);
  }
  isRefreshing = false;
  clearTimeout(busy);
  document.body.classList.remove('busy');
  if (nextRefresh) {
    const next = nextRefresh;
    nextRefresh = null;
    refresh(next.layOut);
  }
}

// What sense l of the token at j adds to the log odds of A to B.
function effect(j, l) {
  const {alpha, logits, factor} = seen.rows[j][l];
  return alpha * logits * factor;
}

// What the sense would add with its slider at 1.
function effectAtWeight1(j, l) {
  const {alpha, logits} = seen.rows[j][l];
  return alpha * logits;
}

// All positions of the word that stands at j; that position alone for a token that is no word.
function placesOf(j) {
  if (seen.names[j] === null) return [j];
  const all = seen.names.map((_, i) => i);
  return all.filter(i => seen.names[i] === seen.names[j]);
}

// The position of the token with the sense that decides most between A and B.
function strongestPlace() {
  const strengths = seen.names.map((name, j) => {
    const isWord = name !== null && /[\p{L}\p{N}]/u.test(name);
    const effects = allSenses.map(l => Math.abs(effectAtWeight1(j, l)));
    return isWord ? Math.max(...effects) : 0;
  });
  return strengths.indexOf(Math.max(...strengths));
}

// ------------------------------------------------------------------------------------------------
// Drawing: numbers and elements.

function sum(numbers) {
  return numbers.reduce((x, y) => x + y, 0);
}

function percent(p) {
  if (p < 0.0005) return '<0.1%';
  if (p < 0.0995) return `${(100 * p).toFixed(1)}%`;
  return `${Math.round(100 * p)}%`;
}

function signed(x) {
  const sign = x < 0 ? '−' : '+';
  return sign + Math.abs(x).toFixed(2);
}

// A new element. Children that are strings become text, so markup in a prompt has no effect.
function make(tag, {aria = {}, ...properties} = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}

// A word; kind is a or b, for the colour of one of the two words that are compared.
function makeWord(word, kind = '') {
  return make('bdi', {className: kind}, word.label ?? word);
}

// Shows a message below an element: a form, or by default the line box.
function say(text, element = byId('edit')) {
  element.after(byId('said'));
  byId('said').textContent = text;
}

// A text that was cut may no longer have the chosen token.
function keepPlaceInText() {
  place = Math.min(place, seen.labels.length - 1);
}

function draw() {
  keepPlaceInText();
  drawTokens();
  drawLegend();
  drawNext();
  drawCards();
  drawCompared();
  drawLines();
}

// ------------------------------------------------------------------------------------------------
// Drawing: the text and the prediction.

function drawTokens() {
  const strip = byId('tokens');
  const focused = [...strip.children].indexOf(document.activeElement);
  strip.replaceChildren(...seen.labels.map(tokenButton));
  strip.children[focused]?.focus();
}

function tokenButton(label, j) {
  const effects = allSenses.map(l => effect(j, l));
  const name = make('bdi', {}, label);
  const stripes = make('i');
  const total = make('small', {}, signed(sum(effects)));
  if (seen.areEdited[j]) name.className = 'edited';
  stripes.style.backgroundImage = `linear-gradient(${effects.map(stripe).join(', ')})`;
  const properties = {type: 'button', onclick: () => choose(j), aria: {pressed: j === place}};
  return make('button', properties, name, stripes, total);
}

// The stops of a gradient that paint sense l, stronger for a larger effect.
function stripe(x, l) {
  const colour = x > 0 ? 'a' : 'b';
  const strength = 100 * Math.min(1, Math.abs(x)) ** 0.6;
  const top = 100 * l / k;
  const bottom = 100 * (l + 1) / k;
  return `color-mix(in srgb, var(--${colour}) ${strength}%, transparent) ${top}% ${bottom}%`;
}

function drawLegend() {
  const effects = seen.rows.flatMap((row, j) => allSenses.map(l => effect(j, l)));
  byId('legend').replaceChildren(
    'Each stripe is a sense. ', make('span', {className: 'scale'}), ' Blue favours ',
    makeWord(seen.b, 'b'), ', orange ', makeWord(seen.a, 'a'), '. Full colour is 1 logit or more. ',
    `The numbers add up to ${signed(sum(effects))}: the logit of `, makeWord(seen.a, 'a'),
    ' minus the logit of ', makeWord(seen.b, 'b'), '.');
  if (seen.dropped > 0) {
    byId('legend').append(` The first ${seen.dropped.toLocaleString('en')} tokens are left out: ` +
      'the text is longer than the model can read.');
  }
}

function drawNext() {
  const largest = Math.max(...seen.next.flatMap(word => [word.before, word.now]));
  const rows = seen.next.map(word => nextRow(word, largest));
  document.querySelector('#next tbody').replaceChildren(...rows);
}

function nextRow(word, largest) {
  let className = '';
  if (word.id === seen.b.id) className = 'is-b';
  if (word.id === seen.a.id) className = 'is-a';
  const row = make('tr', {className}, make('th', {scope: 'row'}, makeWord(word)));
  for (const p of [word.before, word.now]) {
    const number = make('data', {value: p}, percent(p));
    row.append(make('td', {}, number), bar(p / largest));
  }
  return row;
}

function bar(share) {
  const span = make('span');
  span.style.width = `${100 * share}%`;
  return make('td', {aria: {hidden: true}}, span);
}

// Fills in A and B, except in a field that the user is typing in.
function drawCompared() {
  for (const [id, word] of [['a', seen.a], ['b', seen.b]]) {
    const field = byId(id);
    if (document.activeElement !== field) field.value = word.name ?? word.label;
  }
}

// Fills the line box, unless the user is typing there.
function drawLines() {
  const box = byId('lines');
  if (document.activeElement !== box) box.value = state.lines.join('\n');
}

// ------------------------------------------------------------------------------------------------
// Drawing: a card for each sense of the chosen token.

async function layCards() {
  keepPlaceInText();
  const lists = await ask('cards', {j: place, lines: state.lines});  // words that each sense moves
  keepPlaceInText();  // someone may have chosen a token that is gone
  const order = strongestFirst();
  byId('cards').replaceChildren(...order.map(l => card(l, lists[l])));
  const isWord = seen.names[place] !== null;
  const weights = isWord ? ' 0 turns a sense off, 1 leaves it unchanged, 2 doubles it.' :
    ' This token is no word by itself, so it has no sliders.';
  byId('word').textContent = seen.labels[place];
  byId('about').textContent =
    `These are its ${k} senses, those with the largest effect here first.${weights}`;
}

// How much sense l of the chosen token decides with its slider at 1, over all its positions.
function strength(l) {
  return sum(placesOf(place).map(j => Math.abs(effectAtWeight1(j, l))));
}

function strongestFirst() {
  return [...allSenses].sort((l, m) => strength(m) - strength(l));
}

function card(l, lists) {
  const title = make('span', {}, `sense ${l}`);
  const adds = make('span', {className: 'adds'});
  const article = make('article', {aria: {label: `sense ${l}`}}, make('h3', {}, title, adds));
  article.dataset.sense = l;
  if (seen.names[place] !== null) article.append(slider(l));
  article.append(make('p', {className: 'faint alpha'}), wordTable(lists));
  return article;
}

// The words that a sense raises most and lowers most, each with what it adds to their logits.
function wordTable([raised, lowered]) {
  const head = text => make('th', {scope: 'col', colSpan: 2}, text);
  const cells = ([word, logit]) => [
    make('td', {}, make('bdi', {title: word}, word)), make('td', {}, signed(logit))];
  const rows = raised.map((word, i) => make('tr', {}, ...cells(word), ...cells(lowered[i])));
  const headRow = make('tr', {}, head('raises'), head('lowers'));
  return make('table', {}, make('thead', {}, headRow), make('tbody', {}, ...rows));
}

function slider(l) {
  const sense = `sense ${l} of ${seen.labels[place]}`;
  const off = make('button', {type: 'button', aria: {label: `Turn ${sense} off`}}, 'off');
  const range = make('input', {
    type: 'range', min: 0, max: 2, step: 0.01, aria: {label: `Weight of ${sense}`}});
  off.addEventListener('click', () => {
    setScale(l, scaleOf(l) === 0 ? 1 : 0);
    saveLink();
  });
  range.addEventListener('input', () => setScale(l, range.valueAsNumber));
  range.addEventListener('change', saveLink);
  return make('div', {className: 'slider'}, off, range, make('output'));
}

// The line that a slider writes begins so.
function keyOf(l) {
  return `${seen.names[place]}:${l}`;
}

function isLineOf(line, l) {
  return line === keyOf(l) || line.startsWith(`${keyOf(l)}=`);
}

// The factor in the line of a slider.
function scaleOf(l) {
  const line = state.lines.find(line => isLineOf(line, l));
  if (line === undefined) return 1;
  return Number(line.split('=')[1] ?? 0);
}

function setScale(l, factor) {
  const others = state.lines.filter(line => !isLineOf(line, l));
  const scale = factor === 0 ? '' : `=${Math.round(100 * factor) / 100}`;
  state.lines = factor === 1 ? others : [...others, keyOf(l) + scale];
  say('');
  refresh();
}

function drawCards() {
  for (const article of byId('cards').querySelectorAll('article')) drawCard(article);
}

// The numbers of a card, summed over the places on which its slider acts.
function drawCard(article) {
  const l = Number(article.dataset.sense);
  const places = placesOf(place);
  const {logits} = seen.rows[place][l];
  const isOff = places.every(j => seen.rows[j][l].factor === 0);
  const x = sum(places.map(j => isOff ? effectAtWeight1(j, l) : effect(j, l)));
  const sameToken = places.filter(j => seen.ids[j] === seen.ids[place]);
  const alpha = sum(sameToken.map(j => seen.rows[j][l].alpha));
  const over = sameToken.length > 1 ? `, summed over ${sameToken.length} positions` : '';
  article.querySelector('.adds').replaceChildren(...effectInWords(x, isOff));
  article.querySelector('.alpha').textContent =
    `weight α ${alpha.toFixed(2)}${over} × ${signed(logits)} logits`;
  const slider = article.querySelector('.slider');
  if (slider) drawSlider(slider, scaleOf(l));
}

function effectInWords(x, isOff) {
  if (Math.abs(x) < 0.005) return ['no effect here'];
  const kind = x < 0 ? 'b' : 'a';
  const verb = isOff ? 'would add ' : 'adds ';
  const size = make('b', {className: kind}, Math.abs(x).toFixed(2));
  return [verb, size, ' for ', makeWord(x < 0 ? seen.b : seen.a, kind)];
}

function drawSlider(element, scale) {
  element.querySelector('input').value = scale;
  element.querySelector('output').textContent = scale.toFixed(2);
  element.querySelector('button').setAttribute('aria-pressed', scale === 0);
}

// ------------------------------------------------------------------------------------------------
// The link: the fragment of the address holds the text and the edits.

function saveLink() {
  const fragment = new URLSearchParams({text: state.text});
  if (state.lines.length > 0) fragment.set('edit', state.lines.join('\n'));
  history.replaceState(null, '', `#${fragment}`);
}

async function followLink() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  state.text = fragment.get('text') ?? data.prompt;
  byId('text').value = state.text;
  state.lines = [];
  await setLines(fragment.get('edit') ?? '');
  await refresh(openStrongest);
}

// ------------------------------------------------------------------------------------------------
// Responses to the user.

// Takes edits, one a line, and says what is wrong if they cannot be read. Resolves to whether they
// can.
async function setLines(text) {
  const lines = text.split('\n').map(line => line.trim()).filter(line => line !== '');
  byId('lines').value = text;
  try {
    await ask('look', {string: state.text, lines, compare: null});
    state.lines = lines;
    say('');
    return true;
  } catch (error) {
    say(error.message);
    return false;
  }
}

function openStrongest() {
  place = strongestPlace();
  return layCards();
}

// Shows the senses of the token at j.
async function choose(j) {
  place = j;
  await refresh(layCards);
  byId('word').scrollIntoView({block: 'nearest'});
}

byId('text').addEventListener('input', () => {
  const most = 20 * data.config.block_size;  // letters; tokens are shorter
  const isCut = byId('text').value.length > most;
  if (isCut) byId('text').value = byId('text').value.slice(-most);
  state.text = byId('text').value;
  say(isCut ? `Only the last ${most.toLocaleString('en')} letters are kept.` : '');
  refresh(openStrongest);
});
byId('text').addEventListener('change', saveLink);

byId('edit').addEventListener('submit', async event => {
  event.preventDefault();
  if (!await setLines(byId('lines').value)) return;
  await refresh(layCards);
  saveLink();
});

byId('reset').addEventListener('click', () => {
  state.lines = [];
  refresh(layCards);
  saveLink();
});

byId('compare').addEventListener('submit', async event => {
  event.preventDefault();
  const compare = ['a', 'b'].map(id => byId(id).value.trim());
  try {
    await ask('look', {string: state.text, lines: [], compare});
    state.compare = compare;
    say('');
    refresh(layCards);
  } catch (error) {
    say(error.message, event.target);
  }
});

// ------------------------------------------------------------------------------------------------
// Writing: texts before and after the edits, drawn with the same random numbers.

let latestRun = 0;

document.querySelector('#write form').addEventListener('submit', event => {
  event.preventDefault();
  const {n, temperature, seed} = event.target.elements;
  const settings = {
    n: n.valueAsNumber, temperature: temperature.valueAsNumber, seed: seed.valueAsNumber};
  latestRun++;
  const columns = [writtenColumn('before', [], settings)];
  if (state.lines.length > 0) columns.push(writtenColumn('now', state.lines, settings));
  byId('written').replaceChildren(...columns);
});

// A column in which the model continues the text, with edits.
function writtenColumn(title, lines, settings) {
  const string = state.text;
  const prompt = make('span', {className: 'faint'}, string);
  const continuation = make('b');
  const tell = part => { continuation.textContent = part; };
  const args = {string, lines, run: latestRun, ...settings};
  ask('generate', args, tell).catch(error => say(error.message));
  return make('div', {}, make('h2', {}, title), make('p', {}, prompt, continuation));
}

// A later run ends the runs before it; this run writes nothing.
byId('stop').addEventListener('click', () => {
  latestRun++;
  ask('generate', {string: '', n: 0, run: latestRun});
});

// ------------------------------------------------------------------------------------------------
// The start.

async function start() {
  await ask('load', {data, weights: byId('weights').textContent});
  byId('weights').remove();  // the worker has its own copy
  byId('model').textContent = data.about;
  addEventListener('hashchange', followLink);
  await followLink();
  byId('hint').textContent = hint();
  byId('text').disabled = false;
  for (const element of document.querySelectorAll('[inert]')) element.inert = false;
}

function hint() {
  return `Every token of your text has ${k} senses. Each adds to the logits of the next token. ` +
    `Drag the first sense of “${seen.labels[place]}” to 0 and watch “${seen.a.label}” and ` +
    `“${seen.b.label}”. Then type your own text.`;
}

// The interface for other scripts.
const ready = start();
ready.catch(error => {
  byId('hint').textContent = `Cannot run the model: ${error.message}`;
  byId('hint').style.display = 'block';  // small windows have no hint
});
window.rucksack = {
  ready,

  // Resolves to the ten likeliest next tokens, [[token, probability], ...], under edits such as
  // ['nurse:10'].
  async predict(string, lines = []) {
    await ready;
    return ask('predict', {string, lines});
  },
};
