'use strict';
// The interface of the page that sample.py --html writes. The model runs in a worker (model.js), so
// that the page stays responsive while it computes.
//
// j is a position in the text and l a sense of the token there, as in model.js. A and B are the two
// words that the page compares.

const byId = id => document.getElementById(id);
const data = JSON.parse(byId('data').textContent);
const k = data.config.n_sense;  // 0 for a Transformer, which has no senses to show
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

// Whether the worker can answer the question of a form. If it cannot, the page says why, below it.
async function canAnswer(question, args, form) {
  try {
    await ask(question, args);
    say('');
    return true;
  } catch (error) {
    say(error.message, form);
    return false;
  }
}

// ------------------------------------------------------------------------------------------------
// What is shown. The link holds all of state.

const noEdits = () => ({scale: {}, replace: []});

const state = {text: data.prompt, compare: null, edits: noEdits()};
let place = 0;        // the position of the chosen token, whose senses are shown
let lookedUp = null;  // or another word, whose senses are shown instead
let seen = null;      // the last answer to look

const isEdited = () => Object.keys(state.edits.scale).length > 0 || state.edits.replace.length > 0;

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
  try {
    seen = await ask('look', {string: state.text, edits: state.edits, compare: state.compare});
    state.compare = comparedNames();
    if (layOut) await layOut();
    draw();
  } catch (error) {
    say(error.message);
  }
  isRefreshing = false;
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

// All positions of the token that stands at j.
function placesOf(j) {
  const places = [];
  seen.names.forEach((name, i) => {
    if (name === seen.names[j]) places.push(i);
  });
  return places;
}

// The chosen token as people read it; a blank one has only the name that edits give it.
function chosenWord() {
  return seen.pieces[place].trim() || seen.names[place];
}

// The position of the token with the sense that decides most between A and B.
function strongestPlace() {
  if (k === 0) return 0;
  const strengths = seen.names.map((name, j) => {
    const isWord = name[0] !== '#' && /[\p{L}\p{N}]/u.test(name);
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

// Shows a message below an element: a form, or by default the buttons that act on all edits.
function say(text, element = byId('copy').parentElement) {
  const said = byId('said');
  if (element.nextElementSibling !== said) element.after(said);
  said.textContent = text;
}

// A text that was cut may no longer have the chosen token.
function keepPlaceInText() {
  place = Math.min(place, seen.pieces.length - 1);
}

function draw() {
  keepPlaceInText();
  drawTokens();
  drawLegend();
  drawNext();
  drawCards();
  drawPair();
  drawCompared();
  drawReplaced();
}

// ------------------------------------------------------------------------------------------------
// Drawing: the text and the prediction.

function drawTokens() {
  const strip = byId('tokens');
  const focused = [...strip.children].indexOf(document.activeElement);
  strip.replaceChildren(...seen.pieces.map(tokenButton));
  strip.children[focused]?.focus();
}

function tokenButton(text, j) {
  const effects = allSenses.map(l => effect(j, l));
  const isScaled = seen.rows[j].some(({factor}) => factor !== 1);
  const isChosen = lookedUp === null && j === place;
  const name = make('bdi', {}, visible(text));
  const stripes = make('i');
  const total = make('small', {}, k > 0 ? signed(sum(effects)) : '');
  if (isScaled || seen.areReplaced[j]) name.className = 'edited';
  if (k > 0) stripes.style.backgroundImage = `linear-gradient(${effects.map(stripe).join(', ')})`;
  const properties = {type: 'button', onclick: () => choose(j), aria: {pressed: isChosen}};
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

const SIGNS = {' ': '␣', '\n': '⏎', '\t': '⇥'};

// A token's text, with signs for blanks if it has nothing else.
function visible(text) {
  const isBlank = /^[\s\p{C}]*$/u.test(text);
  if (!isBlank) return text;
  const code = character => '\\u' + character.codePointAt().toString(16).padStart(4, '0');
  return text.replace(/./gsu, character => SIGNS[character] ?? code(character)) || '·';
}

function drawLegend() {
  const legend = byId('legend');
  if (k === 0) {
    legend.replaceChildren('This is a Transformer. It has no senses.');
  } else {
    legend.replaceChildren(...legendOfSenses());
  }
  if (seen.dropped > 0) {
    const dropped = seen.dropped.toLocaleString('en');
    legend.append(
      ` The text is longer than the model can read, so its first ${dropped} tokens are left out.`);
  }
}

function legendOfSenses() {
  const effects = seen.rows.flatMap((row, j) => allSenses.map(l => effect(j, l)));
  return [
    'Each stripe is a sense. ', make('span', {className: 'scale'}), ' Blue favours ',
    makeWord(seen.b, 'b'), ', orange ', makeWord(seen.a, 'a'), '. Full colour is 1 logit or more. ',
    `The numbers add up to ${signed(sum(effects))}: the logit of `, makeWord(seen.a, 'a'),
    ' minus the logit of ', makeWord(seen.b, 'b'), '.'];
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

// The line at the foot of the window: A, B and the likeliest word.
function drawPair() {
  const change = word =>
    isEdited() ? `${percent(word.before)} → ${percent(word.now)}` : percent(word.now);
  byId('pair').replaceChildren(
    makeWord(seen.a, 'a'), ` ${change(seen.a)} · `, makeWord(seen.b, 'b'), ` ${change(seen.b)} · `,
    'likeliest: ', makeWord(seen.next[0]));
}

function comparedNames() {
  return state.compare ?? [seen.a.name, seen.b.name];
}

// Fills in A and B, except in a field that the user is typing in, and the words to suggest.
function drawCompared() {
  ['a', 'b'].forEach((id, i) => {
    const field = byId(id);
    if (document.activeElement !== field) field.value = comparedNames()[i];
  });
  const words = seen.likely.filter(name => name[0] !== '#');
  byId('likely').replaceChildren(...words.map(word => new Option(word, word)));
}

// A button for each replacement, which undoes it.
function drawReplaced() {
  const buttons = state.edits.replace.map(words => {
    const [word, old, now] = words;
    const undo = () => {
      state.edits.replace = state.edits.replace.filter(other => other !== words);
      refresh(layCards);
      saveLink();
    };
    return make('button', {type: 'button', onclick: undo}, `${word}: ${old} → ${now}  ✕`);
  });
  byId('replaced').replaceChildren(...buttons);
  proposeReplacement();
}

// Fills the form with an edit of the chosen word, until someone types there.
let isTyped = false;

function proposeReplacement() {
  if (isTyped) return;
  const words = [seen.names[place], ...comparedNames()];
  for (const [i, field] of document.querySelectorAll('#replace input').entries()) {
    field.value = words[i];
  }
}

// ------------------------------------------------------------------------------------------------
// Drawing: a card for each sense of a word. The cards of a word in the text have sliders.

const LEAST_EFFECT = 0.02;  // in logits; cards of weaker senses are folded away

async function layCards() {
  if (k === 0) return;
  keepPlaceInText();
  const word = lookedUp ?? seen.names[place];
  const asked = lookedUp === null ? {id: seen.ids[place]} : {word: lookedUp};
  const lists = await ask('cards', {...asked, edits: state.edits});  // words that each sense moves
  keepPlaceInText();  // someone may have chosen a token that is gone
  const isInText = lookedUp === null;
  const order = isInText ? strongestFirst() : allSenses;
  const cards = order.map(l => card(l, lists[l]));
  const nStrong = isInText ? countStrong(order) : k;
  byId('cards').replaceChildren(...cards.slice(0, nStrong));
  if (nStrong < k) byId('cards').append(foldedCards(cards.slice(nStrong)));
  byId('scope-label').hidden = !isInText;
  if (isInText) {
    byId('word').textContent = chosenWord();
    byId('about').textContent = `These are its ${k} senses, those with the largest effect here ` +
      'first. 0 turns a sense off, 1 leaves it unchanged, 2 doubles it.';
  } else {
    byId('word').textContent = word;
    byId('about').textContent =
      `These are its ${k} senses, the same in any text. To get sliders, add it to your text.`;
  }
}

// How much sense l of the chosen token decides with its slider at 1, over all its positions.
function strength(l) {
  return sum(placesOf(place).map(j => Math.abs(effectAtWeight1(j, l))));
}

function strongestFirst() {
  return [...allSenses].sort((l, m) => strength(m) - strength(l));
}

// How many senses, strongest first, have cards that are not folded away: at least one.
function countStrong(order) {
  const strong = order.filter(l => strength(l) >= LEAST_EFFECT);
  return Math.max(1, strong.length);
}

function foldedCards(cards) {
  const summary = `Show ${cards.length} more with almost no effect here`;
  return make('details', {}, make('summary', {}, summary), make('div', {}, ...cards));
}

function card(l, lists) {
  const title = make('span', {}, `sense ${l}`);
  const adds = make('span', {className: 'adds'});
  const article = make('article', {aria: {label: `sense ${l}`}}, make('h3', {}, title, adds));
  article.dataset.sense = l;
  if (lookedUp === null) {
    article.append(
      make('div', {className: 'effect'}, make('span')), slider(l),
      make('p', {className: 'faint alpha'}));
  }
  article.append(wordTable(lists));
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
  const sense = `sense ${l} of ${chosenWord()}`;
  const off = make('button', {type: 'button', aria: {label: `Turn ${sense} off`}}, 'off');
  const range = make('input', {
    type: 'range', min: 0, max: 2, step: 0.01, aria: {label: `Weight of ${sense}`}});
  off.addEventListener('click', () => {
    setScale(l, scaleOf(l) === 0 ? 1 : 0);
    saveLink();
  });
  range.addEventListener('input', () => setScale(l, range.valueAsNumber));
  range.addEventListener('change', saveLink);
  range.addEventListener('keydown', event => {
    const weight = weightAfterKey(event, range.valueAsNumber);
    if (weight === null) return;
    event.preventDefault();
    range.value = weight;
    setScale(l, range.valueAsNumber);  // which the range has clamped and rounded
    saveLink();
  });
  return make('div', {className: 'slider'}, off, range, make('output'));
}

const DIRECTIONS = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1};

// The weight that a key on a slider asks for; null if the key asks for none.
function weightAfterKey({key, shiftKey, ctrlKey, altKey, metaKey}, weight) {
  if (ctrlKey || altKey || metaKey) return null;
  if (key === '0' || key === '1') return Number(key);
  if (!(key in DIRECTIONS)) return null;
  const step = shiftKey ? 0.25 : 0.05;
  return weight + DIRECTIONS[key] * step;
}

// What the slider of sense l changes: a key of an edit's scale, as model.js reads it.
function keyOf(l) {
  const scope = byId('scope').value;
  if (scope === 'all') return `*:${l}`;
  if (scope === 'place') return `@${place}:${l}`;
  return `${seen.names[place]}:${l}`;
}

function scaleOf(l) {
  return state.edits.scale[keyOf(l)] ?? 1;
}

function setScale(l, factor) {
  if (factor === 1) {
    delete state.edits.scale[keyOf(l)];
  } else {
    state.edits.scale[keyOf(l)] = Math.round(100 * factor) / 100;
  }
  say('');
  refresh();
}

function drawCards() {
  const isInText = lookedUp === null;
  if (k === 0 || !isInText) return;
  const places = byId('scope').value === 'place' ? [place] : placesOf(place);
  for (const article of byId('cards').querySelectorAll('article')) drawCard(article, places);
}

// The numbers of a card, summed over the places on which its slider acts.
function drawCard(article, places) {
  const l = Number(article.dataset.sense);
  const {logits} = seen.rows[place][l];
  const isOff = places.every(j => seen.rows[j][l].factor === 0);
  const x = sum(places.map(j => isOff ? effectAtWeight1(j, l) : effect(j, l)));
  const sameToken = places.filter(j => seen.ids[j] === seen.ids[place]);
  const alpha = sum(sameToken.map(j => seen.rows[j][l].alpha));
  const over = sameToken.length > 1 ? `, summed over ${sameToken.length} positions` : '';
  article.querySelector('.adds').replaceChildren(...effectInWords(x, isOff));
  article.querySelector('.alpha').textContent =
    `weight α ${alpha.toFixed(2)}${over} × ${signed(logits)} logits`;
  drawEffectBar(article.querySelector('.effect span'), x, isOff);
  drawSlider(article.querySelector('.slider'), scaleOf(l));
}

function effectInWords(x, isOff) {
  if (Math.abs(x) < 0.005) return ['no effect here'];
  const kind = x < 0 ? 'b' : 'a';
  const verb = isOff ? 'would add ' : 'adds ';
  const size = make('b', {className: kind}, Math.abs(x).toFixed(2));
  return [verb, size, ' for ', makeWord(x < 0 ? seen.b : seen.a, kind)];
}

// A bar from the middle, to the left for B and to the right for A; 2 logits fill its half.
function drawEffectBar(span, x, isOff) {
  const width = 50 * Math.min(1, Math.abs(x) / 2);
  span.style.background = `var(--${x < 0 ? 'b' : 'a'})`;
  span.style.opacity = isOff ? 0.35 : 1;
  span.style.width = `${width}%`;
  span.style.left = `${x < 0 ? 50 - width : 50}%`;
}

function drawSlider(element, scale) {
  const range = element.querySelector('input');
  const isMovedNow = document.activeElement === range;
  const isRight = range.valueAsNumber.toFixed(2) === scale.toFixed(2);
  if (!isMovedNow || !isRight) range.value = scale;
  element.querySelector('output').textContent = scale.toFixed(2);
  element.querySelector('button').setAttribute('aria-pressed', scale === 0);
}

// ------------------------------------------------------------------------------------------------
// The link: the fragment of the address holds the text, the two words and the edits.

function link() {
  const {text, compare, edits} = state;
  const fragment = new URLSearchParams({text, compare: compare?.join(' ') ?? ''});
  if (isEdited()) fragment.set('edits', JSON.stringify(edits));
  return `${location.href.split('#')[0]}#${fragment}`;
}

function saveLink() {
  try {
    history.replaceState(null, '', link());
  } catch {
    // Some browsers allow only so many changes a second; Copy link works all the same.
  }
}

let following = Promise.resolve();  // links are followed one at a time

function follow() {
  following = following.then(followLink);
  return following;
}

async function followLink() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  state.text = fragment.get('text') ?? data.prompt;
  lookedUp = null;
  byId('text').value = state.text;
  const complaints = [
    await followEdits(fragment.get('edits') ?? '{}'),
    await followCompared(fragment.get('compare'))];
  say(complaints.filter(Boolean).join('. '));
  await refresh(() => {
    place = strongestPlace();
    return layCards();
  });
}

// Takes the edits in a link; returns what is wrong with them, if anything is.
async function followEdits(json) {
  state.edits = noEdits();
  try {
    const {scale = {}, replace = []} = JSON.parse(json);
    const edits = {scale: {...scale}, replace: [...replace]};
    await ask('look', {string: state.text, edits});
    state.edits = edits;
  } catch (error) {
    return `Cannot apply the edits in this link: ${error.message}`;
  }
}

// Compares the words in a link, "A B"; returns what is wrong with them, if anything is. Without a
// link these are she and he, if the model knows them. (Older links have A/B.)
async function followCompared(pair) {
  const compare = pair ? pair.split(pair.includes(' ') ? ' ' : '/') : ['she', 'he'];
  try {
    await ask('look', {string: state.text, compare});
    state.compare = compare;
  } catch (error) {
    state.compare = null;  // refresh takes the two likeliest
    if (pair !== null) return error.message;
  }
}

// ------------------------------------------------------------------------------------------------
// Responses to the user.

function choose(j) {
  place = j;
  lookedUp = null;
  showCards();
}

// Shows the senses of the chosen or looked-up word, and scrolls there if they are out of view.
async function showCards() {
  await refresh(layCards);
  const {top, bottom} = byId('word').getBoundingClientRect();
  const isInView = top >= 0 && bottom <= innerHeight - 260;
  if (isInView) return;
  const isCalm = matchMedia('(prefers-reduced-motion: reduce)').matches;
  byId('word').scrollIntoView({block: 'start', behavior: isCalm ? 'auto' : 'smooth'});
}

// The values of a form's fields.
function valuesOf(form, names) {
  return names.map(name => form.elements[name].value.trim());
}

byId('text').addEventListener('input', () => {
  state.text = byId('text').value;
  for (const key of Object.keys(state.edits.scale)) {
    const isOfPlace = key[0] === '@';
    if (isOfPlace) delete state.edits.scale[key];
  }
  lookedUp = null;
  say('');
  refresh(() => {
    place = strongestPlace();
    return layCards();
  });
});
byId('text').addEventListener('change', saveLink);

byId('compare').addEventListener('submit', async event => {
  event.preventDefault();
  const compare = valuesOf(event.target, ['a', 'b']);
  if (!await canAnswer('look', {string: state.text, compare}, event.target)) return;
  state.compare = compare;
  refresh(layCards);
  saveLink();
});

byId('look').addEventListener('submit', async event => {
  event.preventDefault();
  const word = event.target.querySelector('input').value.trim();
  if (word === '') return;
  if (!await canAnswer('cards', {word, n: 1}, event.target)) return;
  const j = seen.names.indexOf(word);
  if (j >= 0) {
    choose(j);
  } else {
    lookedUp = word;
    showCards();
  }
});

byId('scope').addEventListener('change', draw);

byId('reset').addEventListener('click', () => {
  state.edits = noEdits();
  refresh(layCards);
  saveLink();
  say('All edits undone.');
});

document.querySelector('#replace form').addEventListener('input', () => { isTyped = true; });

document.querySelector('#replace form').addEventListener('submit', async event => {
  event.preventDefault();
  const words = valuesOf(event.target, ['word', 'old', 'now']);
  const replace = [...state.edits.replace, words];
  if (!await canAnswer('look', {string: state.text, edits: {replace}}, event.target)) return;
  state.edits.replace = replace;
  refresh(layCards);
  saveLink();
});

byId('copy').addEventListener('click', async () => {
  saveLink();
  try {
    await navigator.clipboard.writeText(link());
    say('Copied. The link works while this file stays where it is.');
  } catch {
    say(`Copy this link: ${link()}`);
  }
});

// ------------------------------------------------------------------------------------------------
// Writing: texts before and after the edits, drawn with the same random numbers.

let latestRun = 0;

document.querySelector('#write form').addEventListener('submit', event => {
  event.preventDefault();
  const settings = valuesOf(event.target, ['n', 'temperature', 'seed']).map(Number);
  latestRun++;
  if (isEdited()) {
    const before = writtenColumn('before', undefined, settings);
    const now = writtenColumn('now', state.edits, settings);
    byId('written').replaceChildren(before, now);
  } else {
    byId('written').replaceChildren(writtenColumn('', undefined, settings));
  }
});

// A column in which the model continues the text, with edits.
function writtenColumn(title, edits, [n, temperature, seed]) {
  const string = state.text;
  const prompt = make('span', {className: 'faint'}, string);
  const continuation = make('b');
  const tell = part => { continuation.textContent = part; };
  const args = {string, n, temperature, seed, edits, run: latestRun};
  ask('generate', args, tell).catch(error => say(error.message));
  const heading = title ? [make('h2', {}, title)] : [];
  return make('div', {}, ...heading, make('p', {}, prompt, continuation));
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
  for (const id of ['replace', 'look', 'scope-label']) byId(id).hidden = k === 0;
  addEventListener('hashchange', follow);
  await follow();
  byId('hint').textContent = hint();
  byId('text').disabled = false;
  for (const element of document.querySelectorAll('[inert]')) element.inert = false;
}

function hint() {
  if (k === 0) return 'Type some text and see what the model expects next.';
  return `Every token of your text has ${k} senses. Each adds to the logits of the next token. ` +
    `Drag the first sense of “${chosenWord()}” to 0 and watch “${seen.a.label}” and ` +
    `“${seen.b.label}”. Then type your own text.`;
}

// The interface for other scripts. scale is as in an edit, such as {'nurse:10': 0}; see model.js.
const ready = start();
ready.catch(error => {
  byId('hint').textContent = `Cannot run the model: ${error.message}`;
  byId('hint').style.display = 'block';  // small windows have no hint
});
window.rucksack = {
  ready,

  // Resolves to the ten likeliest next tokens, [[token, probability], ...].
  async predict(string, scale) {
    await ready;
    return ask('predict', {string, edits: {scale: scale ?? {}}});
  },

  // Resolves to the string and n more tokens.
  async generate(string, n, {seed, temperature, edits: scale} = {}) {
    await ready;
    return ask('generate', {string, n, seed, temperature, edits: {scale: scale ?? {}}});
  },
};
