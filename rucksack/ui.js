'use strict';
// The interface of the page of sample.py --html. The model runs in a worker (page.js), so that nothing freezes.

const $ = id => document.getElementById(id);
const data = JSON.parse($('data').textContent), k = data.config.n_sense;

// ----------------------------------------------------------------------------
// Questions to the worker: an answer each; what comes before the answer goes to tell.

const worker = new Worker(URL.createObjectURL(new Blob([$('worker').textContent])));
const waiting = new Map();
let asked = 0;

function ask(question, args, tell) {
  return new Promise((resolve, reject) => {
    waiting.set(++asked, {resolve, reject, tell});
    worker.postMessage({n: asked, ask: question, args});
  });
}

worker.onmessage = ({data: {n, answer, part, error}}) => {
  const {resolve, reject, tell} = waiting.get(n);
  if (part !== undefined) return tell?.(part);
  waiting.delete(n);
  error === undefined ? resolve(answer) : reject(Error(error));
};

// ----------------------------------------------------------------------------
// What is chosen: all of it is in the link.

const state = {text: data.prompt, compare: null, edits: {scale: {}, replace: []}};
let place = 0;                           // of the chosen token in the text, or
let lookedUp = null;                     // another word whose senses are shown
let seen = null;                         // the last answer to look

const edited = () => Object.keys(state.edits.scale).length + state.edits.replace.length > 0;
const percent = p => p < 0.0005 ? '<0.1%' : p < 0.0995 ? `${(100 * p).toFixed(1)}%` : `${Math.round(100 * p)}%`;
const signed = x => (x < 0 ? '−' : '+') + Math.abs(x).toFixed(2);

// Text goes into the page as text: whatever a prompt holds, it is no markup.
function make(tag, properties = {}, ...children) {
  const {aria = {}, ...own} = properties, element = Object.assign(document.createElement(tag), own);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}
const named = (word, kind = '') => make('bdi', {className: kind}, word.label ?? word);
const say = text => { $('said').textContent = text; };

// One question at a time: while it is open, only the last of those that follow is kept.
let open = false, again = null;

async function refresh(then = null) {
  if (open) { again = {then: then ?? again?.then}; return; }
  open = true;
  try {
    seen = await ask('look', {string: state.text, edits: state.edits, compare: state.compare});
    state.compare ??= [seen.a.name, seen.b.name];
    if (then) await then();
    draw();
  } catch (error) { say(error.message); }
  open = false;
  if (again) { const next = again.then; again = null; refresh(next); }
}

// ----------------------------------------------------------------------------
// Drawing.

const adds = (j, l) => seen.rows[j][l][0] * seen.rows[j][l][1] * seen.rows[j][l][2];  // alpha * C.(E_a - E_b) * factor
const ifOn = (j, l) => seen.rows[j][l][0] * seen.rows[j][l][1];
const places = j => seen.names.flatMap((name, i) => name === seen.names[j] ? [i] : []);
const sum = numbers => numbers.reduce((x, y) => x + y, 0);

function draw() {
  drawTokens();
  drawNext();
  drawCards();
  const {a, b} = seen, moved = x => edited() ? `${percent(x.before)} → ${percent(x.now)}` : percent(x.now);
  $('pair').replaceChildren(named(a, 'a'), ` ${moved(a)} · `, named(b, 'b'), ` ${moved(b)} · next: `, named(seen.next[0]));
  if (document.activeElement !== $('a')) $('a').value = state.compare[0];
  if (document.activeElement !== $('b')) $('b').value = state.compare[1];
  $('likely').replaceChildren(...seen.likely.filter(name => name[0] !== '#').map(name => new Option(name, name)));
  $('replaced').replaceChildren(...state.edits.replace.map(([word, old, now], i) => make('button', {
    type: 'button', onclick: () => { state.edits.replace.splice(i, 1); refresh(layCards); }},
    `${word}: ${old} → ${now}  ✕`)));
}

function drawTokens() {
  const strip = $('tokens');
  const all = seen.pieces.map((text, j) => {
    const effects = Array.from({length: k}, (_, l) => adds(j, l)), blank = /^[\s\p{C}]*$/u.test(text);
    const stops = effects.map((x, l) => `color-mix(in srgb, var(--${x > 0 ? 'a' : 'b'}) ` +
      `${100 * Math.min(1, Math.abs(x)) ** 0.6}%, transparent) ${100 * l / k}% ${100 * (l + 1) / k}%`);
    const button = make('button', {type: 'button', onclick: () => choose(j)},
      make('bdi', {}, blank ? text.replace(/ /g, '␣').replace(/\n/g, '⏎') || '·' : text), make('i', {}),
      make('small', {}, k ? signed(sum(effects)) : ''));
    if (k) button.children[1].style.backgroundImage = `linear-gradient(${stops})`;
    if (seen.rows[j].some(row => row[2] !== 1)) button.firstChild.className = 'edited';
    button.setAttribute('aria-pressed', lookedUp === null && j === place);
    return button;
  });
  const focus = [...strip.children].indexOf(document.activeElement);
  strip.replaceChildren(...all);
  strip.children[focus]?.focus();
  const total = sum(seen.rows.flatMap((row, j) => row.map((_, l) => adds(j, l))));
  $('legend').replaceChildren(...!k ? ['A Transformer: it has no senses to open.'] : [
    `A token has ${k} stripes, its senses: `, make('span', {className: 'scale'}), ' from 1 logit for ', named(seen.b, 'b'),
    ' to 1 for ', named(seen.a, 'a'), `. All numbers add up to ${signed(total)}, the log odds.`,
    seen.dropped ? ` The text is longer than the model reads: its first ${seen.dropped.toLocaleString('en')} tokens are left out.` : '']);
}

function drawNext() {
  const largest = Math.max(...seen.next.flatMap(word => [word.before, word.now]));
  document.querySelector('#next tbody').replaceChildren(...seen.next.map(word => make('tr',
    {className: word.id === seen.a.id ? 'is-a' : word.id === seen.b.id ? 'is-b' : ''},
    make('th', {scope: 'row'}, named(word)), ...[word.before, word.now].flatMap(p => [
      make('td', {}, make('data', {value: p}, percent(p))), bar(p / largest)]))));
}

function bar(share) {
  const span = make('span');
  span.style.width = `${100 * share}%`;
  return make('td', {aria: {hidden: true}}, span);
}

// The cards of a word: as lists, and in the text each with a slider.
const keyOf = (l, scope = $('scope').value) =>
  (scope === 'all' ? '*' : scope === 'place' ? `@${place}` : seen.names[place]) + `:${l}`;

function setScale(l, factor) {
  if (factor === 1) delete state.edits.scale[keyOf(l)];
  else state.edits.scale[keyOf(l)] = Math.round(100 * factor) / 100;
  refresh();
}

function list(lists) {                   // the words that a sense raises and lowers most
  const head = text => make('th', {scope: 'col', colSpan: 2}, text);
  return make('table', {}, make('thead', {}, make('tr', {}, head('raises'), head('lowers'))), make('tbody', {},
    ...lists[0].map((_, i) => make('tr', {}, ...lists.flatMap(words => [
      make('td', {}, make('bdi', {title: words[i][0]}, words[i][0])), make('td', {}, signed(words[i][1]))])))));
}

function card(l, lists) {
  const article = make('article', {aria: {label: `sense ${l}`}},
    make('h3', {}, make('span', {}, `sense ${l}`), make('span', {className: 'adds'})));
  article.dataset.sense = l;
  if (lookedUp === null) {
    const of = `sense ${l} of ${seen.names[place]}`;
    const range = make('input', {type: 'range', min: 0, max: 2, step: 0.01, aria: {label: `Weight of ${of}`}});
    const off = make('button', {type: 'button', aria: {label: `Turn ${of} off`}}, 'off');
    range.addEventListener('input', () => setScale(l, range.valueAsNumber));
    range.addEventListener('change', keep);
    range.addEventListener('keydown', event => {
      const step = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1}[event.key];
      const to = '01'.includes(event.key) ? +event.key : step && range.valueAsNumber + step * (event.shiftKey ? 0.25 : 0.05);
      if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      range.value = to;
      setScale(l, range.valueAsNumber);
      keep();
    });
    off.addEventListener('click', () => { setScale(l, (state.edits.scale[keyOf(l)] ?? 1) ? 0 : 1); keep(); });
    article.append(make('div', {className: 'effect'}, make('span')), make('div', {className: 'slider'}, off, range,
      make('output')), make('p', {className: 'faint alpha'}));
  }
  article.append(list(lists));
  return article;
}

async function layCards() {
  if (!k) return;
  if (place >= seen.pieces.length) place = seen.pieces.length - 1;
  const word = lookedUp ?? seen.names[place], lists = await ask('cards', {word, edits: state.edits});
  const weight = l => sum(places(place).map(j => Math.abs(ifOn(j, l))));
  const order = Array.from({length: k}, (_, l) => l);  // the strongest first
  if (lookedUp === null) order.sort((l, m) => weight(m) - weight(l));
  const strong = lookedUp === null ? order.filter((l, i) => weight(l) >= 0.02 || !i) : order;
  const all = order.map(l => card(l, lists[l])), rest = all.slice(strong.length);
  $('cards').replaceChildren(...all.slice(0, strong.length), ...rest.length ? [make('details', {},
    make('summary', {}, `${rest.length} more senses, with next to no effect here`), make('div', {}, ...rest))] : []);
  $('scope-label').hidden = lookedUp !== null;
  $('word').replaceChildren(lookedUp === null ? seen.pieces[place].trim() || seen.names[place] : word);
  $('about').textContent = lookedUp !== null ?
    `What its ${k} senses say in whatever text. To drag them, write the word into the text.` :
    `Its ${k} senses, those first that decide most here. 0 turns one off, 1 is as it was, 2 doubles it.`;
}

function drawCards() {
  if (lookedUp !== null || !k) return;
  const here = $('scope').value === 'place' ? [place] : places(place);
  for (const article of $('cards').querySelectorAll('article')) {
    const l = +article.dataset.sense, factor = seen.rows[place][l][2], [off, range, number] =
      article.querySelector('.slider').children;
    const x = sum(here.map(j => factor ? adds(j, l) : ifOn(j, l))), kind = x < 0 ? 'b' : 'a', width = 50 * Math.min(1, Math.abs(x) / 2);
    article.querySelector('.adds').replaceChildren(...Math.abs(x) < 0.005 ? ['no effect here'] :
      [factor ? 'adds ' : 'would add ', make('b', {className: kind}, Math.abs(x).toFixed(2)), ' for ',
        named(x < 0 ? seen.b : seen.a, kind)]);
    article.querySelector('.effect span').style.cssText = `background: var(--${kind}); opacity: ${factor ? 1 : 0.35}; ` +
      `width: ${width}%; left: ${x < 0 ? 50 - width : 50}%`;
    const own = state.edits.scale[keyOf(l)] ?? 1;
    if (document.activeElement !== range || range.valueAsNumber.toFixed(2) !== own.toFixed(2)) range.value = own;
    number.textContent = own.toFixed(2);
    off.setAttribute('aria-pressed', own === 0);
    article.querySelector('.alpha').textContent = `attention weight α ${sum(here.map(j => seen.rows[j][l][0])).toFixed(2)}` +
      `${here.length > 1 ? `, over ${here.length} places` : ''} × ${signed(seen.rows[place][l][1])} logits`;
  }
}

// ----------------------------------------------------------------------------
// What happens.

function show() {                        // the cards, in view
  return refresh(layCards).then(() => {
    const {top, bottom} = $('word').getBoundingClientRect();
    if (top < 0 || bottom > innerHeight - 260) $('word').scrollIntoView({block: 'start', behavior: calm()});
  });
}

function choose(j) {
  [place, lookedUp] = [j, null];
  show();
}

const calm = () => matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth';

function strongest() {                   // the token whose senses decide most between the two words
  const effect = j => Math.max(0, ...Array.from({length: k}, (_, l) => Math.abs(ifOn(j, l))));
  const own = seen.names.map((name, j) => name[0] === '#' ? 0 : effect(j));
  return k ? own.indexOf(Math.max(...own)) : 0;
}

$('text').addEventListener('input', () => {
  state.text = $('text').value;
  for (const key of Object.keys(state.edits.scale)) if (key[0] === '@') delete state.edits.scale[key];
  lookedUp = null;
  refresh(() => { place = strongest(); return layCards(); });
});
$('text').addEventListener('change', keep);

$('compare').addEventListener('submit', async event => {
  event.preventDefault();
  const words = ['a', 'b'].map(id => $(id).value.trim()), before = state.compare;
  state.compare = words;
  say('');
  try { await ask('look', {string: state.text, compare: words}); } catch (error) {
    state.compare = before;
    return say(error.message);
  }
  refresh(layCards);
  keep();
});

$('look').addEventListener('submit', async event => {
  event.preventDefault();
  const word = event.target.querySelector('input').value.trim();
  if (!word) return;
  try { await ask('cards', {word, n: 1}); } catch (error) { return say(error.message); }
  say('');
  lookedUp = word;
  const j = seen.names.indexOf(word);
  if (j >= 0) [place, lookedUp] = [j, null];
  show();
});

$('scope').addEventListener('change', draw);
$('reset').addEventListener('click', () => {
  state.edits = {scale: {}, replace: []};
  refresh(layCards);
  keep();
  say('As it was.');
});

let run = 0;
document.querySelector('#write form').addEventListener('submit', event => {
  event.preventDefault();
  const [n, temperature, seed] = ['n', 'temperature', 'seed'].map(name => +event.target.elements[name].value);
  const columns = edited() ? [['before', undefined], ['now', state.edits]] : [['', undefined]];
  run++;
  $('written').replaceChildren(...columns.map(([title, edits]) => {
    const more = make('b'), column = make('div', {}, make('h2', {}, title), make('p', {}, make('span', {className: 'faint'},
      state.text), more));
    ask('generate', {string: state.text, n, temperature, seed, edits, run}, part => { more.textContent = part; })
      .catch(error => say(error.message));
    return column;
  }));
});
$('stop').addEventListener('click', () => ask('generate', {string: '', n: 0, run: ++run}));

document.querySelector('#replace form').addEventListener('submit', async event => {
  event.preventDefault();
  const words = ['word', 'old', 'now'].map(name => event.target.elements[name].value.trim());
  const replace = [...state.edits.replace, words];
  try { await ask('look', {string: state.text, edits: {replace}}); } catch (error) { return say(error.message); }
  say('');
  state.edits.replace = replace;
  refresh(layCards);
  keep();
});

function keep() {                        // the link, and a word on what has come of the edit
  const {text, compare, edits} = state, hash = new URLSearchParams({text, compare: compare?.join('/') ?? ''});
  if (edited()) hash.set('edits', JSON.stringify(edits));
  history.replaceState(null, '', `#${hash}`);
}

async function follow() {
  const hash = new URLSearchParams(location.hash.slice(1));
  if (hash.has('text')) state.text = hash.get('text');
  state.edits = {scale: {}, replace: []};
  state.compare = hash.get('compare')?.includes('/') ? hash.get('compare').split('/') : ['she', 'he'];
  try {
    const {scale = {}, replace = []} = JSON.parse(hash.get('edits') ?? '{}');
    const edits = {scale: {...scale}, replace: [...replace]};
    await ask('look', {string: state.text, edits});
    state.edits = edits;
  } catch (error) { say(`The link asks for an edit that cannot be made here: ${error.message}`); }
  try { await ask('look', {string: state.text, compare: state.compare}); } catch (error) {
    if (hash.has('compare')) say(error.message);
    state.compare = null;
  }
  $('text').value = state.text;
  await refresh(() => { place = strongest(); return layCards(); });
}

$('copy').addEventListener('click', async () => {
  keep();
  try {
    await navigator.clipboard.writeText(location.href);
    say('Copied: it opens this file, where it is now, with text, words and edits as they are.');
  } catch { say(`Copy it from here: ${location.href}`); }
});
addEventListener('hashchange', follow);

// What other scripts may ask: predict('My nurse said that', {'nurse:10': 0}) -> [[word, probability], ...]
const ready = (async () => {
  await ask('load', {data, weights: $('weights').textContent});
  $('weights').remove();
  $('model').textContent = data.about;
  $('text').disabled = false;
  for (const id of ['replace', 'look', 'scope-label']) $(id).hidden = !k;
  await follow();
  const word = k ? seen.names[place] : '';
  $('hint').textContent = k ? `Every word of your text offers ${k} senses; the prediction is their weighted sum. Drag the first ` +
    `sense of “${word}” to 0 and watch “${seen.a.label}” and “${seen.b.label}” below; then write a text of your own.` :
    'Write a text, and see what the model expects next.';
})();
window.rucksack = {
  ready,
  predict: async (string, scale) => { await ready; return ask('predict', {string, edits: {scale}}); },
  generate: async (string, n, {seed, temperature, edits: scale} = {}) => {
    await ready;
    return ask('generate', {string, n, seed, temperature, edits: {scale}});
  },
};
