'use strict';
// A Backpack in plain JavaScript: tokenizer, forward pass, edits and generation.
//
// It runs in a worker of the page that sample.py --html writes, and answers the questions of ui.js.
// Names, shapes and equation numbers are those of model.py:
//
//     T         tokens in the text
//     V         ids in the vocabulary, without unused rows
//     d         width of a vector, n_embd
//     k         senses per token, n_sense
//     j         a position
//     l         a sense
//     wte       the token embeddings E (V, d): input, senses and output share them
//     h         the contextualizer's output (d) at a position
//     C         the senses (k*d) of a token, side by side
//     alpha     the weights (T, k) that the last position gives to all senses of all tokens
//     o         the weighted sum (d)
//
// The page predicts only the token after the last position, so alpha and o have no index i here.
// A vector is a typed array; a matrix is one typed array too, row after row.

// ------------------------------------------------------------------------------------------------
// Text -> ids: GPT-2's byte-pair encoding, or a vocabulary of whole words.
// A token is a string of its bytes, one character a byte.

// The patterns are tiktoken's, with \w and \s spelled out: in JavaScript these match less.
const WORD_CHARACTER = String.raw`\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}`;
const SPACE = String.raw`\p{White_Space}`;
const WORDS_PATTERN = ` ?[${WORD_CHARACTER}]+|[^${WORD_CHARACTER}${SPACE}]|${SPACE}+`;
const GPT2_PATTERN =
  String.raw`'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^${SPACE}\p{L}\p{N}]+|` +
  `${SPACE}+(?![^${SPACE}])|${SPACE}+`;
const END_OF_TEXT = '<|endoftext|>';

class Tokenizer {
  constructor({tokens, words}) {
    const pattern = words ? WORDS_PATTERN : GPT2_PATTERN;
    this.pattern = new RegExp(pattern, 'gu');
    this.tokens = tokens;
    this.rank = new Map(tokens.map((token, id) => [token, id]));
    this.end = tokens.length;  // the id of end-of-text, which no text spells
    this.firstWord = words ? 256 : 0;  // a vocabulary of words begins with the 256 bytes
    this.words = new Map();            // by id, what word() has found
  }

  encode(text) {
    const pieces = text.match(this.pattern) ?? [];
    return pieces.flatMap(piece => this.merge(bytes(piece)));
  }

  // Byte-pair encoding: keep joining the two neighbours that make the token of the lowest rank.
  merge(piece) {
    if (this.rank.has(piece)) return [this.rank.get(piece)];
    const parts = [...piece];
    const rankOfPair = i => this.rank.get(parts[i] + parts[i + 1]) ?? Infinity;
    const ranks = parts.slice(1).map((_, i) => rankOfPair(i));
    let best = indexOfSmallest(ranks);
    while (ranks[best] < Infinity) {
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      ranks.splice(best, 1);
      if (best < ranks.length) ranks[best] = rankOfPair(best);
      if (best > 0) ranks[best - 1] = rankOfPair(best - 1);
      best = indexOfSmallest(ranks);
    }
    return parts.map(part => this.rank.get(part));
  }

  decode(ids) {
    const tokens = ids.filter(id => id < this.end).map(id => this.tokens[id]);
    return utf8(tokens.join(''));
  }

  // The text of each token. A character that takes several tokens stands at the last of them.
  pieces(ids) {
    const decoder = new TextDecoder('utf-8', {ignoreBOM: true});
    return ids.map((id, j) => {
      const token = this.tokens[id] ?? END_OF_TEXT;
      const isLast = j === ids.length - 1;
      return decoder.decode(codes(token), {stream: !isLast});
    });
  }

  // A token as people read it; a dot stands before letters that have no space before them.
  label(id) {
    const token = this.tokens[id] ?? END_OF_TEXT;
    const text = utf8(token.replace(/^ (?=.)/s, ''));
    const isPartOfCharacter = text.includes('\ufffd');
    const label = isPartOfCharacter ? hexadecimal(token) : visible(text);
    const needsDot = token[0] !== ' ' && /[\p{L}\p{N}]/u.test(label[0]);
    return needsDot ? '·' + label : label;
  }

  // The ids of a word: inside a text and, if it is one token there too, at the start of a text.
  forms(word) {
    const ids = this.formsIfAny(word);
    if (ids.length > 0) return ids;
    const labels = this.encode(' ' + word).map(id => this.label(id));
    throw Error(`“${word}” is not one token (it splits into ${labels.join(' + ')})`);
  }

  // The same; none if the word is not one token.
  formsIfAny(word) {
    if (/^#\d+$/.test(word)) {
      const id = Number(word.slice(1));
      if (id <= this.end) return [id];
    }
    const inside = this.encode(' ' + word);
    const atStart = this.encode(word);
    if (inside.length !== 1 || word === '') return [];
    return atStart.length === 1 ? [inside[0], atStart[0]] : inside;
  }

  // The word by which an edit names an id, and with it the word's other form; else #id.
  word(id) {
    if (!this.words.has(id)) {
      const word = utf8(this.tokens[id] ?? '').replace(/^ /, '');
      const canBeInKey = word === word.trim() && !/[:#@*=&]/.test(word);
      const isForm = canBeInKey && this.formsIfAny(word).includes(id);
      this.words.set(id, isForm ? word : `#${id}`);
    }
    return this.words.get(id);
  }

  // The word of an id if that is its form inside a text; else #id.
  name(id) {
    const word = this.word(id);
    return this.forms(word)[0] === id ? word : `#${id}`;
  }
}

function bytes(text) {
  const array = new TextEncoder().encode(text);
  return Array.from(array, code => String.fromCharCode(code)).join('');
}

function codes(token) {
  return Uint8Array.from(token, character => character.charCodeAt());
}

function utf8(token) {
  return new TextDecoder('utf-8', {ignoreBOM: true}).decode(codes(token));
}

function hexadecimal(token) {
  return [...token].map(character => '\\x' + character.charCodeAt().toString(16)).join('');
}

function visible(text) {
  const escape = character => {
    const escaped = JSON.stringify(character).slice(1, -1);
    if (escaped !== character) return escaped;
    return '\\u' + character.codePointAt().toString(16).padStart(4, '0');
  };
  return text.replace(/ /g, '␣').replace(/[\p{C}\p{Z}]/gu, escape);
}

// ------------------------------------------------------------------------------------------------
// Arithmetic on vectors. Arrays hold float32; sums are computed in float64.

// Vector i of several vectors of n numbers that stand side by side in x: a view, not a copy.
function part(x, i, n) {
  return x.subarray(i * n, (i + 1) * n);
}

// W x + b: W (m, n), b (m) or none, x (n) -> (m).
function linear(W, b, x) {
  const n = x.length;
  const m = W.length / n;
  const y = new Float32Array(m);
  const multipleOf4 = n - n % 4;
  for (let i = 0; i < m; i++) {
    const row = i * n;
    // Four independent sums are faster: a single sum would have to wait for each addition.
    let sum0 = b ? b[i] : 0;
    let sum1 = 0;
    let sum2 = 0;
    let sum3 = 0;
    let j = 0;
    for (; j < multipleOf4; j += 4) {
      sum0 += W[row + j] * x[j];
      sum1 += W[row + j + 1] * x[j + 1];
      sum2 += W[row + j + 2] * x[j + 2];
      sum3 += W[row + j + 3] * x[j + 3];
    }
    for (; j < n; j++) sum0 += W[row + j] * x[j];
    y[i] = sum0 + sum1 + sum2 + sum3;
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

// Softmax of scores, in place.
function softmax(scores) {
  const largest = maximum(scores);
  let sum = 0;
  for (let i = 0; i < scores.length; i++) {
    const exponential = Math.exp(scores[i] - largest);
    scores[i] = exponential;
    sum += exponential;
  }
  for (let i = 0; i < scores.length; i++) scores[i] /= sum;
  return scores;
}

// Math.max(...x) would fail for a large vocabulary: it would get too many arguments.
function maximum(x) {
  return x.reduce((a, b) => a > b ? a : b, -Infinity);
}

function indexOfSmallest(x) {
  let best = 0;
  for (let i = 1; i < x.length; i++) {
    if (x[i] < x[best]) best = i;
  }
  return best;
}

// The weights (T) of one head: softmax of query (n) times the keys (n) of T positions.
function attention(query, keys) {
  const scale = Math.sqrt(query.length);
  const scores = keys.map(key => dot(query, key) / scale);
  return softmax(Float32Array.from(scores));
}

// GPT-2's GELU, approximated with tanh.
function gelu(x) {
  const SQRT_2_OVER_PI = 0.7978845608028654;
  return 0.5 * x * (1 + Math.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)));
}

// ------------------------------------------------------------------------------------------------
// The model: what is the same in every text.

const SENSES_KEPT = 1000;  // ids whose senses are kept in memory

class Backpack {
  constructor({config, arrays}, blob) {
    this.config = config;
    this.weights = unpack(arrays, blob);
    this.sensesOf = new Map();
  }

  // A row of a matrix (.., d): a view.
  row(name, i) {
    return part(this.weights[name], i, this.config.n_embd);
  }

  wte(id) {
    return this.row('wte.weight', id);
  }

  wpe(j) {
    return this.row('contextualizer.wpe.weight', j);
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

  // Eq. 10: the senses C (k*d) of an id, the same in every text.
  senses(id) {
    if (!this.sensesOf.has(id)) {
      if (this.sensesOf.size > SENSES_KEPT) this.sensesOf.clear();
      this.sensesOf.set(id, this.senseNetwork(this.wte(id)));
    }
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
    if (isIn8Bits) {
      const scales = take(Float32Array, rows);
      weights[name] = scaleRows(take(Int8Array, rows * columns), scales);
    } else {
      weights[name] = take(Float32Array, rows * columns);
    }
  }
  return weights;
}

// Whole numbers (m, n) times the scale of their row (m): float32 (m, n).
function scaleRows(whole, scales) {
  const x = new Float32Array(whole.length);
  const columns = whole.length / scales.length;
  for (let i = 0; i < scales.length; i++) {
    const end = (i + 1) * columns;
    for (let at = i * columns; at < end; at++) x[at] = whole[at] * scales[i];
  }
  return x;
}

// ------------------------------------------------------------------------------------------------
// A text: what the model has computed for each token, kept while the text grows or is cut short.

class Text {
  constructor(model) {
    this.model = model;
    this.ids = [];
    this.h = [];
    this.query = [];  // of the sense weights
    this.key = [];
    this.blocks = Array.from({length: model.config.n_layer}, () => ({key: [], value: []}));
  }

  read(ids) {
    let nKnown = 0;
    while (nKnown < ids.length && ids[nKnown] === this.ids[nKnown]) nKnown++;
    this.ids = ids.slice();
    this.truncate(nKnown);
    for (let t = nKnown; t < ids.length; t++) this.step(t);
    return this;
  }

  // Forget what was computed for positions from T on.
  truncate(T) {
    const caches = [this.h, this.query, this.key];
    for (const block of this.blocks) caches.push(block.key, block.value);
    for (const cache of caches) cache.splice(T);
  }

  // Read the token at position t: h, and the query and key of the sense weights.
  step(t) {
    const {model} = this;
    this.h[t] = this.contextualizer(t);  // (d)
    if (model.config.n_sense === 0) return;
    const d = model.config.n_embd;
    const queryAndKey = model.linear('sense_weights.c_attn', this.h[t]);  // (2*d)
    this.query[t] = part(queryAndKey, 0, d);
    this.key[t] = part(queryAndKey, 1, d);
  }

  // Eq. 11: h (d) at position t, by a GPT-2.
  contextualizer(t) {
    const {model} = this;
    const x = model.wte(this.ids[t]).slice();
    add(x, model.wpe(t));
    this.blocks.forEach((cache, i) => {
      const name = `contextualizer.blocks.${i}`;
      add(x, this.selfAttention(`${name}.attn`, model.layerNorm(`${name}.ln_1`, x), cache));
      add(x, model.mlp(`${name}.mlp`, model.layerNorm(`${name}.ln_2`, x)));
    });
    return model.layerNorm('contextualizer.ln_f', x);
  }

  selfAttention(name, x, cache) {
    const {n_embd: d, n_head} = this.model.config;
    const size = d / n_head;
    const qkv = this.model.linear(`${name}.c_attn`, x);  // (3*d)
    const query = part(qkv, 0, d);
    cache.key.push(part(qkv, 1, d));
    cache.value.push(part(qkv, 2, d));
    const y = new Float32Array(d);  // heads side by side
    for (let head = 0; head < n_head; head++) {
      const keys = cache.key.map(key => part(key, head, size));
      const weights = attention(part(query, head, size), keys);  // (T)
      const sum = part(y, head, size);
      cache.value.forEach((value, j) => add(sum, part(value, head, size), weights[j]));
    }
    return this.model.linear(`${name}.c_proj`, y);
  }

  // Eq. 12: the weights alpha (T, k) that the last position gives.
  alpha() {
    const T = this.ids.length;
    const {n_embd: d, n_sense: k} = this.model.config;
    const alpha = new Float32Array(T * k);
    for (let l = 0; l < k; l++) {
      const query = part(this.query[T - 1], l, d / k);
      const keys = this.key.map(key => part(key, l, d / k));
      attention(query, keys).forEach((weight, j) => { alpha[j * k + l] = weight; });
    }
    return alpha;
  }

  // Eq. 2: o (d) = sum_j sum_l alpha_jl C(x_j)_l, with the senses and factors of an edit.
  weightedSum(alpha, edit) {
    const {n_embd: d, n_sense: k} = this.model.config;
    const o = new Float32Array(d);
    this.ids.forEach((id, j) => {
      const C = edit.senses(id);
      for (let l = 0; l < k; l++) {
        add(o, part(C, l, d), alpha[j * k + l] * edit.factor(id, j, l));
      }
    });
    return o;
  }

  // The logits (V) of the next token. read() has computed h.
  logits(edit) {
    if (this.model.config.n_sense === 0) return this.model.project(this.h.at(-1));
    const alpha = this.alpha();               // (T, k)  Eq. 12
    const o = this.weightedSum(alpha, edit);  // (d)     Eq. 2
    return this.model.project(o);             // (V)     Eq. 9
  }

  // The probabilities (V) of the next token.
  probs(edit, temperature = 1) {
    let logits = this.logits(edit);
    if (temperature !== 1) logits = logits.map(x => x / temperature);
    return softmax(logits);
  }
}

// ------------------------------------------------------------------------------------------------
// An edit: {scale: {'nurse:10': 0}, replace: [['MacBook', 'Apple', 'HP']]}.
//
// A key of scale is WHERE:SENSES. WHERE is a word, #id, * for every word, or @j for position j.
// SENSES are numbers, as in 10 or 3-5,10, or for a word two others, as in she/he: the sense that
// separates them most. As in senses.py, scaling comes first, and [word, old, now] gives now what a
// word, or every word for *, gave old.

const NUMBERS = String.raw`\s*\d+(?:-\d+)?\s*`;
const KEY = RegExp(`^(?!\\*:.*/)(?<where>.+):(?<which>${NUMBERS}(?:,${NUMBERS})*|[^/]+/[^/]+)$`);

const LARGEST_FACTOR = 1e12;  // far larger ones overflow

// A value as code has it: a string in quotes.
function shown(value) {
  return typeof value === 'string' ? JSON.stringify(value) : String(value);
}

class Edit {
  constructor(model, tokenizer, {scale = {}, replace = []} = {}) {
    this.model = model;
    this.tokenizer = tokenizer;
    this.factorsOfAll = this.ones();
    this.factorsOfWord = new Map();   // by id
    this.factorsOfPlace = new Map();  // by position
    this.replacements = [];           // in order: the ids, or null for every id, r and a change
    this.replaced = new Map();        // senses (k*d) by id, after all replacements
    const isEdit = replace.length > 0 || Object.keys(scale).length > 0;
    if (isEdit && model.config.n_sense === 0) throw Error('This model has no senses to edit');
    for (const [key, factor] of Object.entries(scale)) this.scale(key, factor);
    for (const [word, old, now] of replace) this.replace(word, old, now);
  }

  ones() {
    return new Float32Array(this.model.config.n_sense).fill(1);
  }

  scale(key, factor) {
    const k = this.model.config.n_sense;
    const match = KEY.exec(key);
    const senses = match ? this.parseSenses(match.groups) : [];
    const areSenses = senses.length > 0 && senses.every(l => l < k);
    if (!areSenses) throw Error(`“${key}” is not WORD:SENSES with senses 0 to ${k - 1}`);
    const isFactor = typeof factor === 'number' && Math.abs(factor) <= LARGEST_FACTOR;
    if (!isFactor) throw Error(`“${key}” has the factor ${shown(factor)}; it must be a number ` +
      'from -1e12 to 1e12');
    for (const factors of this.factorsAt(match.groups.where)) {
      for (const l of new Set(senses)) factors[l] *= factor;
    }
  }

  // The numbers of the senses that a key names; none if one of its ranges is empty, as in 5-3.
  parseSenses({where, which}) {
    if (which.includes('/')) {
      const [a, b] = which.split('/');
      return [this.separatingSense(where, a, b)];
    }
    const k = this.model.config.n_sense;
    const ranges = which.split(',').map(range => {
      const [first, last = first] = range.split('-').map(Number);
      const length = Math.min(k + 1, last - first + 1);  // enough to see that one is too large
      return Array.from({length}, (_, i) => first + i);
    });
    return ranges.every(range => range.length > 0) ? ranges.flat() : [];
  }

  // The sense l of a word whose C(word)_l . (E_a - E_b) is largest, whatever its sign.
  separatingSense(word, a, b) {
    const {model, tokenizer} = this;
    const [wordId, aId, bId] = [word, a, b].map(name => tokenizer.forms(name.trim())[0]);
    if (aId === bId) throw Error(`“${a}/${b}” is one word twice`);
    const C = model.senses(wordId);
    const gaps = Array.from(this.ones(), (_, l) => {
      const sense = part(C, l, model.config.n_embd);
      return Math.abs(dot(sense, model.wte(aId)) - dot(sense, model.wte(bId)));
    });
    return gaps.indexOf(Math.max(...gaps));
  }

  // The factors (k) to change for WHERE in a key: an array for each id that WHERE names.
  factorsAt(where) {
    if (where === '*') return [this.factorsOfAll];
    if (/^@\d+$/.test(where)) return [this.factorsIn(this.factorsOfPlace, Number(where.slice(1)))];
    const ids = this.tokenizer.forms(where.trim());
    return ids.map(id => this.factorsIn(this.factorsOfWord, id));
  }

  factorsIn(map, key) {
    if (!map.has(key)) map.set(key, this.ones());
    return map.get(key);
  }

  // Section 6.3, with r = E_old and a = E_now: C' = C + (C . r) (a / |a|^2 - r / |r|^2).
  replace(word, old, now) {
    const {model, tokenizer} = this;
    const r = model.wte(tokenizer.forms(old)[0]);
    const a = model.wte(tokenizer.forms(now)[0]);
    const move = r.map(x => -x / dot(r, r));  // (d)
    add(move, a, 1 / dot(a, a));
    const ids = word === '*' ? null : tokenizer.forms(word);
    this.replacements.push({ids, r, move});
  }

  // The replacements that change the senses of an id.
  replacementsOf(id) {
    return this.replacements.filter(({ids}) => ids === null || ids.includes(id));
  }

  senses(id) {
    const own = this.replacementsOf(id);
    if (own.length === 0) return this.model.senses(id);
    if (!this.replaced.has(id)) this.replaced.set(id, this.replacedSenses(id, own));
    return this.replaced.get(id);
  }

  // The senses (k*d) of an id after its replacements, each of the senses that the last one left.
  replacedSenses(id, replacements) {
    const {n_embd: d, n_sense: k} = this.model.config;
    const C = this.model.senses(id).slice();
    for (const {r, move} of replacements) {
      for (let l = 0; l < k; l++) {
        const sense = part(C, l, d);
        add(sense, move, dot(sense, r));
      }
    }
    return C;
  }

  // What sense l of the id at position j is multiplied by.
  factor(id, j, l) {
    const ofWord = this.factorsOfWord.get(id)?.[l] ?? 1;
    const ofPlace = this.factorsOfPlace.get(j)?.[l] ?? 1;
    return this.factorsOfAll[l] * ofWord * ofPlace;
  }
}

// ------------------------------------------------------------------------------------------------
// Choosing ids.

// The ids, from firstId on, of the n largest scores (V), largest first; ties go to the lower id.
function topIds(scores, n, firstId = 0) {
  const ids = [];
  for (let id = firstId; id < scores.length; id++) {
    const isAmongThem = ids.length < n || scores[id] > scores[ids[n - 1]];
    if (!isAmongThem) continue;
    const next = ids.findIndex(other => scores[id] > scores[other]);
    const rank = next < 0 ? ids.length : next;
    ids.splice(rank, 0, id);
    if (ids.length > n) ids.pop();
  }
  return ids;
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
  let rest = u;
  const id = probs.findIndex(p => {
    rest -= p;
    return rest < 0;
  });
  return id < 0 ? probs.length - 1 : id;  // rounding can leave a remainder
}

// ------------------------------------------------------------------------------------------------
// Answers to the page's questions. Edits are as above; texts are strings.

let model;
let tokenizer;
let text;           // the text on the page
let encoded = {};   // the last string, and its ids
let unedited = {};  // the probabilities of a text without edits
let latestRun = 0;  // the highest run number that generate was given

function editOf(edits) {
  return new Edit(model, tokenizer, edits);
}

// The ids of a string; those of the last string are kept, as only edits change most of the time.
function idsOf(string) {
  if (encoded.string !== string) {
    const ids = tokenizer.encode(string);
    encoded = {string, ids: ids.length > 0 ? ids : [tokenizer.end]};
  }
  return encoded.ids;
}

// The ids that the model reads of a string: the last block_size.
function lastIdsOf(string) {
  return idsOf(string).slice(-model.config.block_size);
}

function topWords(scores, n) {
  return topIds(scores, n, tokenizer.firstWord);
}

// The probabilities (V) after the page's text without edits; kept, as edits change more often.
function uneditedProbs() {
  const key = text.ids.join();
  if (unedited.key !== key) unedited = {key, probs: text.probs(editOf())};
  return unedited.probs;
}

// The ids of the two words to compare; by default the two likeliest.
function comparedIds(words, probs) {
  if (words === null) return topWords(probs, 2);
  const [a, b] = words.map(word => tokenizer.forms(word)[0]);
  if (b === undefined || a === b) throw Error('Give two different words to compare');
  return [a, b];
}

// For each token and each sense, what the sense adds to the log odds of a to b: the product
// alpha_jl * logits * factor, where logits = C(x_j)_l . (E_a - E_b), after replacements.
function explain(edit, a, b) {
  const {n_embd: d, n_sense: k} = model.config;
  if (k === 0) return text.ids.map(() => []);
  const direction = model.wte(a).slice();
  add(direction, model.wte(b), -1);
  const alpha = text.alpha();
  return text.ids.map((id, j) => {
    const C = edit.senses(id);
    return Array.from({length: k}, (_, l) => ({
      alpha: alpha[j * k + l],
      logits: dot(part(C, l, d), direction),
      factor: edit.factor(id, j, l),
    }));
  });
}

const answers = {
  load({data, weights}) {
    const binary = atob(weights);
    const blob = new Uint8Array(binary.length);
    for (let i = 0; i < blob.length; i++) blob[i] = binary.charCodeAt(i);
    model = new Backpack(data, blob);
    tokenizer = new Tokenizer(data.tokenizer);
    text = new Text(model);
  },

  encode({string}) {
    return tokenizer.encode(string);
  },

  // The likeliest tokens and their probabilities.
  predict({string, edits, n = 10}) {
    const probs = text.read(lastIdsOf(string)).probs(editOf(edits));
    return topIds(probs, n).map(id => [tokenizer.pieces([id])[0], probs[id]]);
  },

  // Everything that the page shows about a prediction.
  look({string, edits, compare}) {
    const edit = editOf(edits);
    const ids = lastIdsOf(string);
    text.read(ids);
    const before = uneditedProbs();
    const now = text.probs(edit);
    const [a, b] = comparedIds(compare ?? null, before);
    const name = id => tokenizer.name(id);
    const describe = id => ({
      id, name: name(id), label: tokenizer.label(id), before: before[id], now: now[id]});
    return {
      dropped: idsOf(string).length - ids.length,
      ids,
      pieces: tokenizer.pieces(ids),
      names: ids.map(id => tokenizer.word(id)),
      areReplaced: ids.map(id => edit.replacementsOf(id).length > 0),
      rows: explain(edit, a, b),
      next: topIds(now, 10).map(describe),
      likely: topWords(before, 12).map(name),
      a: describe(a),
      b: describe(b),
    };
  },

  // The n words that each sense of an id, or of a word, raises most at weight 1, and the n that it
  // lowers most.
  cards({word, id = tokenizer.forms(word)[0], edits, n = 6}) {
    const {n_embd: d, n_sense: k} = model.config;
    const C = editOf({replace: edits?.replace}).senses(id);
    return Array.from({length: k}, (_, l) => {
      const logits = model.project(part(C, l, d));
      const raised = topWords(logits, n);
      const lowered = topWords(logits.map(x => -x), n);
      return [raised, lowered].map(words => words.map(v => [tokenizer.label(v), logits[v]]));
    });
  },

  // Continues a text, like Backpack.generate in model.py; calls tell with the new text so far after
  // each token. A run with a number ends when a run with a higher number begins.
  async generate({string, n = 40, seed = 0, temperature = 0.8, edits, run = null}, tell) {
    for (const [name, value] of Object.entries({n, seed, temperature})) {
      const isRight = Number.isFinite(value) && value >= 0;
      if (!isRight) throw Error(`${name} is ${shown(value)}; it must be a number, at least 0`);
    }
    const {block_size} = model.config;
    const isGreedy = temperature < 1e-30;
    const draw = randomNumbers(seed);
    const newText = new Text(model);
    const edit = editOf(edits);
    const prompt = lastIdsOf(string);
    const ids = prompt.slice();
    let start = 0;  // the first token that is still read
    if (run !== null) latestRun = Math.max(latestRun, run);
    while (ids.length < prompt.length + n) {
      if (ids.length - start > block_size) {
        start = ids.length - Math.max(1, Math.floor(block_size / 2));
        edit.factorsOfPlace.clear();  // their positions are no longer in the text
      }
      newText.read(ids.slice(start));
      if (isGreedy) {
        const probs = newText.probs(edit);
        ids.push(probs.indexOf(maximum(probs)));
      } else {
        const probs = newText.probs(edit, temperature);
        ids.push(idAt(probs, draw()));
      }
      tell(tokenizer.decode(ids.slice(prompt.length)));
      await new Promise(resolve => setTimeout(resolve));  // lets other questions in
      const isStopped = run !== null && run < latestRun;
      if (isStopped || ids.at(-1) === tokenizer.end) break;
    }
    return string + tokenizer.decode(ids.slice(prompt.length));
  },
};

// The answers to {n, ask, args} are {n, part} for each part, then {n, answer} or {n, error}.
onmessage = async ({data: {n, ask, args}}) => {
  try {
    const tell = part => postMessage({n, part});
    const answer = await answers[ask](args, tell);
    postMessage({n, answer});
  } catch (error) {
    postMessage({n, error: error.message});
  }
};
