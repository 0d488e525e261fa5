'use strict';
// A Backpack in plain JavaScript: tokenizer, forward pass, edits and generation.
//
// It runs in a worker of the page that rucksack page writes, and answers questions from ui.js.
// Names, shapes and equation numbers are as in model.py. The page predicts from one position i at
// a time, usually the last, so two shapes lack the index i, and one is flat:
//
//     alpha     the weights (i + 1, k) that position i gives to all senses of all tokens so far
//     o         the weighted sum (d)
//     C         the senses (k*d) of a token, side by side
//
// A vector is a typed array; so is a matrix, row after row.

let model;  // answers.load sets it, its tokenizer and the grammar of edits
let tokenizer;
let grammar;

// ------------------------------------------------------------------------------------------------
// Text -> ids: GPT-2's byte-pair encoding, or a vocabulary of whole words.
// A token is a string of its bytes, one character per byte.

// The patterns are tiktoken's, with \w and \s spelled out: in JavaScript, \w and \s match less.
const WORD_CHARACTER = String.raw`\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}`;
const SPACE = String.raw`\p{White_Space}`;
const WORDS_PATTERN = ` ?[${WORD_CHARACTER}]+|[^${WORD_CHARACTER}${SPACE}]|${SPACE}+`;
const GPT2_PATTERN =
  String.raw`'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^${SPACE}\p{L}\p{N}]+|` +
  `${SPACE}+(?![^${SPACE}])|${SPACE}+`;

// Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese: scripts without spaces between words.
const WITHOUT_SPACES = RegExp(
  String.raw`^[\u0e00-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff` +
  String.raw`\uff00-\uffef\u{20000}-\u{3ffff}]`, 'u');

class Tokenizer {
  constructor({tokens, words}) {
    this.pattern = new RegExp(words ? WORDS_PATTERN : GPT2_PATTERN, 'gu');
    this.rank = new Map(tokens.map((token, id) => [token, id]));
    this.end = tokens.length;  // the id of end-of-text, which no text spells
    this.tokens = [...tokens, '<|endoftext|>'];
    this.firstWord = words ? 256 : 0;  // a vocabulary of words begins with the 256 bytes
  }

  encode(text) {
    const pieces = text.match(this.pattern) ?? [];
    return pieces.flatMap(piece => this.merge(bytes(piece)));
  }

  // Byte-pair encoding: keep joining the two neighbours whose token has the lowest rank.
  merge(piece) {
    if (this.rank.has(piece)) return [this.rank.get(piece)];
    let parts = [...piece];
    while (true) {
      const ranks = parts.slice(1).map((part, i) => this.rank.get(parts[i] + part) ?? Infinity);
      const lowest = ranks.reduce((x, y) => Math.min(x, y), Infinity);
      if (lowest === Infinity) return parts.map(part => this.rank.get(part));
      const joined = [];
      for (let i = 0; i < parts.length; i++) {
        const isPair = ranks[i] === lowest;
        joined.push(isPair ? parts[i] + parts[i + 1] : parts[i]);
        if (isPair) i++;
      }
      parts = joined;
    }
  }

  // The text of ids; bytes that are only part of a character become U+FFFD.
  decode(ids) {
    const token = ids.map(id => this.tokens[id]).join('');
    const codes = Uint8Array.from(token, character => character.charCodeAt());
    return new TextDecoder('utf-8', {ignoreBOM: true}).decode(codes);
  }

  // A token as people read it, with signs for blanks; a dot stands before letters that have no
  // space before them.
  label(id) {
    const text = this.decode([id]);
    const signs = {'\n': '⏎', '\t': '⇥'};
    const label = text.replace(/^ (?=.)/s, '').replace(/[\p{C}\p{Z}]/gu, c => signs[c] ?? '␣');
    const lacksSpace = /^[\p{L}\p{N}]/u.test(text) && !WITHOUT_SPACES.test(text);
    return lacksSpace ? '·' + label : label;
  }

  // The ids of a word inside a text, leaving out a leading space that is a separate token.
  inside(word) {
    const ids = this.encode(WITHOUT_SPACES.test(word) ? word : ' ' + word);
    const isApart = this.firstWord === 0 && ids.length > 1 && this.tokens[ids[0]] === ' ';
    return isApart ? ids.slice(1) : ids;
  }

  // The id of a word inside a text.
  id(word) {
    const ids = this.inside(word);
    if (ids.length === 1) return ids[0];
    const labels = ids.map(id => this.label(id));
    throw Error(`“${word}” is not one token (it splits into ${labels.join(' + ')})`);
  }

  // The ids of two different words.
  pair(words) {
    const [a, b] = words.map(word => this.id(word.trim()));
    if (a === b) throw Error(`“${words.join('/')}” has the same word twice`);
    return [a, b];
  }

  // The ids of a word, inside a text and at the start: [[id, ..], ..]. The form at the start counts
  // only if both are one token or both are several. A vocabulary of words has no unknown words.
  // null means every word.
  forms(word) {
    if (word === '*') return null;
    const inside = this.inside(word);
    const isUnknown = this.firstWord > 0 && this.tokens[inside[0]] === ' ';
    if (isUnknown) return [[this.id(word)]];
    const isOne = inside.length === 1;
    return [inside, this.encode(word)].filter(ids => (ids.length === 1) === isOne);
  }

  // The word by which a line of an edit can name an id; null if there is none.
  word(id) {
    const word = this.decode([id]).replace(/^ /, '');
    const canBeInLine = word !== '' && !/[\s:,=@*]/.test(word);
    if (!canBeInLine || this.inside(word).length > 1) return null;
    return this.forms(word).flat().includes(id) ? word : null;
  }

  // Whether a token is a word with a space before it, where its script has spaces.
  isWord(id) {
    const text = this.decode([id]);
    return /^ \p{L}/u.test(text) || WITHOUT_SPACES.test(text);
  }
}

function bytes(text) {
  const array = new TextEncoder().encode(text);
  return Array.from(array, code => String.fromCharCode(code)).join('');
}

// ------------------------------------------------------------------------------------------------
// Arithmetic on vectors. Arrays hold float32; sums are computed in float64.

// Vector i of several vectors of n numbers stored side by side in x: a view, not a copy.
function part(x, i, n) {
  return x.subarray(i * n, (i + 1) * n);
}

// W x + b: W (m, n), b (m) or none, x (n) -> (m).
function linear(W, b, x) {
  const n = x.length;
  const y = new Float32Array(W.length / n);
  for (let i = 0; i < y.length; i++) {
    let sum = b ? b[i] : 0;
    for (let j = 0; j < n; j++) sum += W[i * n + j] * x[j];
    y[i] = sum;
  }
  return y;
}

function dot(x, y) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] * y[i];
  return sum;
}

// y += factor * x, in place.
function add(y, x, factor = 1) {
  for (let i = 0; i < x.length; i++) y[i] += factor * x[i];
  return y;
}

function argmax(x) {
  return x.indexOf(x.reduce((largest, y) => Math.max(largest, y)));
}

function softmax(scores) {
  const largest = scores[argmax(scores)];
  const exponentials = scores.map(score => Math.exp(score - largest));
  const sum = exponentials.reduce((x, y) => x + y);
  return exponentials.map(x => x / sum);
}

// The weights (T) of one head: softmax of query (n) times the keys (n) of T positions.
function attention(query, keys) {
  const scale = Math.sqrt(query.length);
  return softmax(Float32Array.from(keys, key => dot(query, key) / scale));
}

// GPT-2's GELU, approximated with tanh.
function gelu(x) {
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));
}

// ------------------------------------------------------------------------------------------------
// The model: what is the same in every text.

class Backpack {
  constructor({config, arrays}, blob) {
    this.config = config;
    this.weights = unpack(arrays, blob);
    this.sensesOf = new Map();
  }

  wte(id) {
    return part(this.weights['wte.weight'], id, this.config.n_embd);
  }

  linear(name, x) {
    return linear(this.weights[name + '.weight'], this.weights[name + '.bias'], x);
  }

  mlp(name, x) {
    const hidden = this.linear(name + '.c_fc', x).map(gelu);
    return this.linear(name + '.c_proj', hidden);
  }

  layerNorm(name, x) {
    const n = x.length;
    const mean = x.reduce((sum, value) => sum + value) / n;
    const variance = x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / n;
    const scale = 1 / Math.sqrt(variance + 1e-5);
    const weight = this.weights[name + '.weight'];
    const bias = this.weights[name + '.bias'];
    return x.map((value, i) => (value - mean) * scale * weight[i] + bias[i]);
  }

  // Eq. 10: the senses C (k*d) of an id, the same in every text, so they are computed once.
  senses(id) {
    if (!this.sensesOf.has(id)) this.sensesOf.set(id, this.senseNetwork(this.wte(id)));
    return this.sensesOf.get(id);
  }

  senseNetwork(e) {
    const r = add(this.layerNorm('sense_network.ln_0', e), e);
    add(r, this.mlp('sense_network.mlp', this.layerNorm('sense_network.ln_1', r)));
    return this.mlp('sense_network.final_mlp', this.layerNorm('sense_network.ln_2', r));
  }

  // Eq. 9: the logits (V) of o, or of any vector (d).
  project(o) {
    return linear(this.weights['wte.weight'], null, o);
  }
}

// The weights by name. arrays describes each as [name, rows, columns, isIn8Bits]; blob holds their
// bytes one after another: float32 numbers or, for an 8-bit matrix, a scale for each row and then
// whole numbers. rucksack/page/__init__.py writes them.
function unpack(arrays, blob) {
  const weights = {};
  let offset = 0;

  function take(ArrayType, n) {
    const end = offset + n * ArrayType.BYTES_PER_ELEMENT;
    const array = new ArrayType(blob.slice(offset, end).buffer);
    offset = end;
    return array;
  }

  for (const [name, rows, columns, isIn8Bits] of arrays) {
    const scales = isIn8Bits ? take(Float32Array, rows) : null;
    const numbers = take(isIn8Bits ? Int8Array : Float32Array, rows * columns);
    weights[name] = Float32Array.from(
      numbers, isIn8Bits ? (n, i) => n * scales[Math.floor(i / columns)] : undefined);
  }
  return weights;
}

// ------------------------------------------------------------------------------------------------
// A text: what the model has computed for each token, kept while the text grows or is cut short.

class Text {
  constructor(ids) {
    this.ids = [];
    this.qkv = Array.from({length: model.config.n_layer}, () => []);  // for each layer, (3*d) each
    this.queryAndKey = [];  // for the sense weights, (2*d) each
    this.read(ids);
  }

  read(ids) {
    let nKnown = 0;
    while (nKnown < ids.length && ids[nKnown] === this.ids[nKnown]) nKnown++;
    this.ids = ids;
    for (const cache of [...this.qkv, this.queryAndKey]) cache.splice(nKnown);
    for (let j = nKnown; j < ids.length; j++) {
      const h = this.contextualizer(j);  // (d)
      this.queryAndKey.push(model.linear('sense_weights.c_attn', h));
    }
  }

  // Eq. 11: h (d) at position j, by a GPT-2.
  contextualizer(j) {
    const x = model.wte(this.ids[j]).slice();
    add(x, part(model.weights['contextualizer.wpe.weight'], j, x.length));
    this.qkv.forEach((cache, i) => {
      const name = `contextualizer.blocks.${i}`;
      add(x, this.selfAttention(`${name}.attn`, model.layerNorm(`${name}.ln_1`, x), cache));
      add(x, model.mlp(`${name}.mlp`, model.layerNorm(`${name}.ln_2`, x)));
    });
    return model.layerNorm('contextualizer.ln_f', x);
  }

  selfAttention(name, x, cache) {
    const {n_embd: d, n_head} = model.config;
    const size = d / n_head;
    const qkv = model.linear(`${name}.c_attn`, x);  // (3*d), the heads of each side by side
    cache.push(qkv);
    const y = new Float32Array(d);  // heads side by side
    for (let head = 0; head < n_head; head++) {
      const keys = cache.map(past => part(past, n_head + head, size));
      const weights = attention(part(qkv, head, size), keys);  // (T)
      const sum = part(y, head, size);
      cache.forEach((past, j) => add(sum, part(past, 2 * n_head + head, size), weights[j]));
    }
    return model.linear(`${name}.c_proj`, y);
  }

  // Eq. 12: the weights alpha (i + 1, k) that position i gives, by default the last.
  alpha(i = this.ids.length - 1) {
    const {n_embd: d, n_sense: k} = model.config;
    const alpha = new Float32Array((i + 1) * k);
    for (let l = 0; l < k; l++) {
      const query = part(this.queryAndKey[i], l, d / k);
      const keys = this.queryAndKey.slice(0, i + 1).map(past => part(past, k + l, d / k));
      attention(query, keys).forEach((weight, j) => { alpha[j * k + l] = weight; });
    }
    return alpha;
  }

  // Eq. 2 and 9: the logits (V) after position i, with the senses and factors of an edit.
  logits(edit, i = this.ids.length - 1) {
    const {n_embd: d, n_sense: k} = model.config;
    const alpha = this.alpha(i);
    const o = new Float32Array(d);
    for (let j = 0; j <= i; j++) {
      const {C, factors} = edit.at(this.ids, j);
      for (let l = 0; l < k; l++) add(o, part(C, l, d), alpha[j * k + l] * factors[l]);
    }
    return model.project(o);
  }

  // The probabilities (V) of the next token.
  probs(edit, temperature = 1) {
    return softmax(this.logits(edit).map(x => x / temperature));
  }

  // For each token and each sense, what the sense adds to the log odds of a to b, and the same
  // unscaled: alpha_jl * logits, where logits = C(x_j)_l . (E_a - E_b), after replacements.
  explain(edit, a, b) {
    const {n_embd: d, n_sense: k} = model.config;
    const direction = add(model.wte(a).slice(), model.wte(b), -1);
    const weights = this.alpha();
    return this.ids.map((_, j) => {
      const {C, factors} = edit.at(this.ids, j);
      return Array.from(factors, (factor, l) => {
        const alpha = weights[j * k + l];
        const logits = dot(part(C, l, d), direction);
        return {alpha, logits, unscaled: alpha * logits, adds: alpha * logits * factor};
      });
    });
  }
}

// ------------------------------------------------------------------------------------------------
// An edit: lines as in rucksack/edits.py, except topics and files. Scaling a sense and replacing a
// fact in it are both linear, so their order does not matter; the order of replacements does.

class Edit {
  // The text chooses the sense in nurse:she/he.
  constructor(lines, text) {
    this.steps = lines.flatMap(line => parse(line, text));
  }

  // The senses C (k*d) at position j after replacements, and the factors (k) that scale them.
  at(ids, j) {
    const C = model.senses(ids[j]).slice();
    const factors = new Float32Array(model.config.n_sense).fill(1);
    const steps = this.steps.filter(({forms}) => endsAt(ids, j, forms));
    for (const {apply} of steps) apply(C, factors);
    return {C, factors, isEdited: steps.length > 0};
  }
}

// Whether one of a word's forms ends at position j of ids; null is every word.
function endsAt(ids, j, forms) {
  const endsHere = form => form.every((id, i) => ids[j - form.length + 1 + i] === id);
  return forms === null || forms.some(endsHere);
}

// The steps of a line, one for each of its words.
function parse(line, text) {
  const {words, old, new: now, senses, factor = '0'} = grammar.exec(line)?.groups ?? {};
  if (words === undefined || words.startsWith('@')) {
    throw Error(`“${line}” is not an edit; write nurse:10, nurse,teacher:3-5,10=0.5, ` +
      'nurse:she/he, *:3 or MacBook: Apple -> HP (topics and files work in sample.py only)');
  }
  return wordList(words).map(word => {
    const forms = tokenizer.forms(word);
    if (old !== undefined) return {word, forms, apply: replaceWord(old, now)};
    const {numbers, note} = findSenses(word, forms, senses, text);
    const apply = (C, factors) => numbers.forEach(l => { factors[l] *= Number(factor); });
    return {word, forms, apply, note};
  });
}

// Section 6.3, with r = E_old and a = E_now: C' = C + (C . r) (a / |a|^2 - r / |r|^2).
function replaceWord(old, now) {
  const r = model.wte(tokenizer.id(old));
  const a = model.wte(tokenizer.id(now));
  const move = r.map(x => -x / dot(r, r));  // (d)
  add(move, a, 1 / dot(a, a));
  return C => {
    for (let l = 0; l < model.config.n_sense; l++) {
      const sense = part(C, l, r.length);
      add(sense, move, dot(sense, r));
    }
  };
}

// The senses in spans, such as 3-5,10, or the sense of a word that most separates a pair: its terms
// alpha * C . (E_a - E_b) have the largest sum over the text in absolute value.
function findSenses(word, forms, which, text) {
  if (!which.includes('/')) return {numbers: sensesIn(which)};
  if (word === '*') throw Error(`“*:${which}” needs a word in place of *`);
  const [a, b] = tokenizer.pair(which.split('/'));
  const unedited = new Edit([]);
  let rows = text.explain(unedited, a, b).filter((_, j) => endsAt(text.ids, j, forms));
  let where = 'after this text';
  if (rows.length === 0) {
    rows = new Text(forms[0].slice(-1)).explain(unedited, a, b);  // one token: all weights are 1
    where = `at weight 1, because the text has no ${word}`;
  }
  const sizes = rows[0].map((_, l) => Math.abs(rows.reduce((sum, row) => sum + row[l].adds, 0)));
  const l = argmax(sizes);
  return {numbers: [l], note: `Sense ${l} of ${word} most separates ${which} ${where}.`};
}

function sensesIn(spans) {
  const k = model.config.n_sense;
  const numbers = new Set();
  for (const span of spans.split(',')) {
    const [, first, last = first] = /^\s*(\d+)(?:-(\d+))?\s*$/.exec(span) ?? [];
    if (!(Number(first) <= Number(last) && Number(last) < k)) {
      throw Error(`“${span}” is not a sense; write 10, 3-5,10 (up to ${k - 1}) or she/he`);
    }
    for (let l = Number(first); l <= Number(last); l++) numbers.add(l);
  }
  return numbers;
}

// The words in a,b,c; a text with an empty part, such as ",", is one word.
function wordList(text) {
  const words = [...new Set(text.split(',').map(word => word.trim()))];
  return words.includes('') ? [text] : words;
}

// ------------------------------------------------------------------------------------------------
// Choosing ids.

// The ids, from firstId on, of the n largest scores (V), largest first; ties go to the lower id.
function topIds(scores, n, firstId = 0) {
  const ids = [...scores.keys()].slice(firstId);
  return ids.sort((x, y) => scores[y] - scores[x]).slice(0, n);
}

// A function that draws numbers from 0 to 1 (mulberry32).
function randomNumbers(seed) {
  return () => {
    seed = seed + 0x6d2b79f5 | 0;
    let t = Math.imul(seed ^ seed >>> 15, seed | 1);
    t ^= t + Math.imul(t ^ t >>> 7, t | 61);
    return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
  };
}

// The id at which the sum of the probabilities (V) passes a number u from 0 to 1.
function idAt(probs, u) {
  let sum = 0;
  const id = probs.findIndex(p => {
    sum += p;
    return sum > u;
  });
  return id < 0 ? probs.length - 1 : id;  // rounding can leave a remainder
}

// Continues a text by up to n tokens, like Backpack.generate in model.py; yields the new text so
// far after each token.
function* generate({string, lines, n, temperature, seed}) {
  const {block_size} = model.config;
  const draw = randomNumbers(seed);
  const prompt = idsOf(string);
  const text = new Text(prompt);
  const edit = new Edit(lines, text);
  const ids = prompt.slice();
  while (ids.length < prompt.length + n) {
    text.read(ids.slice(-block_size));
    const probs = text.probs(edit, Math.max(temperature, 1e-9));  // 0 takes the likeliest id
    const id = idAt(probs, draw());
    if (id === tokenizer.end) return;
    ids.push(id);
    yield tokenizer.decode(ids.slice(prompt.length));
  }
}

// ------------------------------------------------------------------------------------------------
// Answers to the page's questions. Edits are lists of lines; texts are strings.

// The last block_size ids of a string; an empty one is the end of a text.
function idsOf(string) {
  const ids = tokenizer.encode(string);
  return ids.length > 0 ? ids.slice(-model.config.block_size) : [tokenizer.end];
}

// The ids of the two words to compare; by default she and he if both are among the ten likeliest
// next words, or else the two likeliest.
function comparedIds(words, probs) {
  if (words !== null) return tokenizer.pair(words);
  const ids = topIds(probs, probs.length, tokenizer.firstWord);
  const likely = ids.slice(0, 10).map(id => tokenizer.tokens[id]);
  if (likely.includes(' she') && likely.includes(' he')) return tokenizer.pair(['she', 'he']);
  const [a = ids[0], b = ids[1]] = ids.filter(id => tokenizer.isWord(id));
  return [a, b];
}

// The factors (k) by which a position's senses are scaled without the lines of its own sliders,
// which are name:l or name:l=factor.
function factorsOfOthers(lines, ids, j) {
  const name = tokenizer.word(ids[j]);
  const own = Array.from({length: model.config.n_sense}, (_, l) => `${name}:${l}`);
  const others = lines.filter(line => !own.includes(line.replaceAll(/=.*|\s/g, '')));
  return new Edit(others, pageText).at(ids, j).factors;
}

// The position of the word whose sense decides most between the two words.
function strongestPlace(tokens) {
  const strengths = tokens.map(({name, senses}) => {
    if (!/[\p{L}\p{N}]/u.test(name ?? '')) return 0;  // no word
    return Math.max(...senses.map(({unscaled}) => Math.abs(unscaled)));
  });
  return argmax(strengths);
}

// For each sense in C (k*d), rows of the word that it raises most at weight 1 and the word that it
// lowers most, the next of each, and so on: [[[word, logit], [word, logit]], ..].
function wordsMoved(C) {
  const {n_embd: d, n_sense: k} = model.config;
  return Array.from({length: k}, (_, l) => {
    const logits = model.project(part(C, l, d));
    const lowered = topIds(logits.map(x => -x), 6, tokenizer.firstWord);
    const withLogit = id => [tokenizer.label(id), logits[id]];
    return topIds(logits, 6, tokenizer.firstWord)
      .map((id, i) => [withLogit(id), withLogit(lowered[i])]);
  });
}

let pageText;
const writers = {};  // title of a column -> what generate yields for it

const answers = {
  load({data, weights}) {
    const blob = Uint8Array.from(atob(weights), character => character.charCodeAt());
    model = new Backpack(data, blob);
    tokenizer = new Tokenizer(data.tokenizer);
    grammar = RegExp(`^(?:${data.line})$`);
    pageText = new Text([]);
  },

  // What the page shows about a prediction. place is the position of the chosen token; if the text
  // lacks it, the page chooses. Finding the words that its senses move takes a while.
  look({string, lines, compare, place, withWords}) {
    const ids = idsOf(string);
    pageText.read(ids);
    const edit = new Edit(lines, pageText);
    const before = pageText.probs(new Edit([]));
    const now = pageText.probs(edit);
    const changes = now.map((p, id) => Math.abs(p - before[id]));
    const [a, b] = comparedIds(compare, before);
    const rows = pageText.explain(edit, a, b);
    const notes = edit.steps.map(({word, forms, note = ''}) => {
      const isInText = ids.some((_, j) => endsAt(ids, j, forms));
      return isInText ? note : `${note} Not in the text, so it has no effect: ${word}.`;
    });
    const tokens = ids.map((id, j) => ({
      label: tokenizer.label(id),
      name: tokenizer.word(id),
      isEdited: edit.at(ids, j).isEdited,
      senses: rows[j],
    }));
    const chosen = place in tokens ? place : strongestPlace(tokens);
    const describe = id => ({
      id,
      label: tokenizer.label(id),
      before: before[id],
      now: now[id],
    });
    return {
      nDropped: tokenizer.encode(string).length - ids.length,
      tokens,
      place: chosen,
      words: withWords ? wordsMoved(edit.at(ids, chosen).C) : null,
      otherFactors: factorsOfOthers(lines, ids, chosen),
      next: topIds(now, 10).map(describe),
      moved: topIds(changes, 6).filter(id => changes[id] >= 0.0005).map(describe),
      notes: [...new Set(notes)],
      a: describe(a),
      b: describe(b),
    };
  },

  // After how many tokens the edits change the likeliest next word, such as "2 of the 8 tokens".
  countChanged({string, lines}) {
    pageText.read(idsOf(string));
    const unedited = new Edit([]);
    const edit = new Edit(lines, pageText);
    const isChanged = (_, i) =>
      argmax(pageText.logits(unedited, i)) !== argmax(pageText.logits(edit, i));
    const {ids} = pageText;
    return `${ids.filter(isChanged).length} of the ${ids.length} tokens`;
  },

  // The new text after one more token; undefined at its end. With settings, a new text begins.
  write({title, settings}) {
    if (settings) writers[title] = generate(settings);
    return writers[title].next().value;
  },
};

onmessage = ({data: {question, args}}) => {
  try {
    postMessage({answer: answers[question](args)});
  } catch (error) {
    postMessage({error: error.message});
  }
};
