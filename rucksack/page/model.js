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
const SIGNS = {' ': '␣', '\n': '⏎', '\t': '⇥'};

class Tokenizer {
  constructor({tokens, words}) {
    const pattern = words ? WORDS_PATTERN : GPT2_PATTERN;
    this.pattern = new RegExp(pattern, 'gu');
    this.tokens = tokens;
    this.rank = new Map(tokens.map((token, id) => [token, id]));
    this.end = tokens.length;  // the id of end-of-text, which no text spells
    this.firstWord = words ? 256 : 0;  // a vocabulary of words begins with the 256 bytes
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

  // A token as people read it, with signs for blanks; a dot stands before letters that have no space
  // before them. The bytes of a character that takes several tokens are in hexadecimal.
  label(id) {
    const token = this.tokens[id] ?? END_OF_TEXT;
    const text = utf8(token.replace(/^ (?=.)/s, ''));
    if (text.includes('\ufffd')) {
      return [...token].map(byte => '\\x' + byte.charCodeAt().toString(16)).join('');
    }
    const code = blank => '\\u' + blank.codePointAt().toString(16).padStart(4, '0');
    const label = text.replace(/[\p{C}\p{Z}]/gu, blank => SIGNS[blank] ?? code(blank));
    const needsDot = token[0] !== ' ' && /[\p{L}\p{N}]/u.test(label[0]);
    return needsDot ? '·' + label : label;
  }

  // The id of a word inside a text.
  id(word) {
    const ids = this.encode(' ' + word);
    if (ids.length === 1 && word !== '') return ids[0];
    const labels = ids.map(id => this.label(id));
    throw Error(`“${word}” is not one token (it splits into ${labels.join(' + ')})`);
  }

  // The ids of a word, inside a text and at its start: [[id, ..], ..]. The form at the start counts
  // only if both are one token or both are several. A vocabulary of words has no unknown words.
  forms(word) {
    const inside = this.encode(' ' + word);
    const isUnknown = this.firstWord > 0 && this.tokens[inside[0]] === ' ';
    if (isUnknown || word === '') return [[this.id(word)]];
    const isOne = inside.length === 1;
    return [inside, this.encode(word)].filter(ids => (ids.length === 1) === isOne);
  }

  // The word by which a line of an edit can name an id; null if there is none.
  word(id) {
    const word = utf8(this.tokens[id] ?? '').replace(/^ /, '');
    const canBeInLine = word !== '' && !/[\s:,=@*]/.test(word);
    if (!canBeInLine || this.encode(' ' + word).length > 1) return null;
    return this.forms(word).flat().includes(id) ? word : null;
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
    this.ids.forEach((_, j) => {
      const C = edit.senses(this.ids, j);
      const factors = edit.factors(this.ids, j);
      for (let l = 0; l < k; l++) add(o, part(C, l, d), alpha[j * k + l] * factors[l]);
    });
    return o;
  }

  // The logits (V) of the next token. read() has computed h.
  logits(edit) {
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
// An edit: lines as in rucksack/edits.py, but for topics and files. Scaling a sense and replacing a
// fact in it are both linear, so their order does not matter; that of replacements does.

const NUMBER = String.raw`(?:\d{1,4}(?:\.\d*)?|\.\d+)`;
const SPANS = String.raw`\d{1,4}(?:-\d{1,4})?(?:\s*,\s*\d{1,4}(?:-\d{1,4})?)*`;
const SCALING = RegExp(
  String.raw`^(?!\*.*/)(.*\S)\s*:\s*(${SPANS}|[^/=]+/[^/=]+?)\s*(?:=\s*(-?${NUMBER}))?$`);
const REPLACEMENT = /^(.*\S)\s*:\s*(\S.*?)\s*->\s*(\S.*)$/;
const FORMS = 'write nurse:10, nurse,teacher:3-5,10=0.5, nurse:she/he, *:3 or MacBook: Apple -> HP';

class Edit {
  constructor(model, tokenizer, lines = []) {
    this.model = model;
    this.tokenizer = tokenizer;
    this.replaced = new Map();  // senses (k*d) by id and replacements
    this.steps = lines.flatMap(line => this.parse(line.trim()));
  }

  // The steps of a line, one for each of its words.
  parse(line) {
    if (line === '') return [];
    const needsPython = line[0] === '@' || /^topic\s[^:]*$/.test(line);
    if (needsPython) throw Error(`“${line}” works in sample.py only: a page reads no files and ` +
      'turns up no topics');
    const replacement = REPLACEMENT.exec(line);
    if (replacement) {
      const [, words, old, now] = replacement;
      return wordList(words).map(word => this.replacement(word, old, now));
    }
    const scaling = SCALING.exec(line);
    const spans = scaling && !scaling[2].includes('/') ? scaling[2].split(',').map(span) : [];
    const isEdit = scaling && spans.every(([first, last]) => first <= last);
    if (!isEdit) throw Error(`“${line}” is not an edit; ${FORMS}`);
    const [, words, which, factor = '0'] = scaling;
    return wordList(words).map(word => this.scaling(word, which, spans, Number(factor)));
  }

  // Multiply senses, those in spans or the one that separates the pair in which.
  scaling(word, which, spans, factor) {
    const k = this.model.config.n_sense;
    const forms = this.forms(word);
    if (which.includes('/')) return {forms, senses: [this.separatingSense(forms, which)], factor};
    const largest = Math.max(...spans.map(([, last]) => last));
    if (largest >= k) throw Error(`${word} has no sense ${largest}; choose from 0 to ${k - 1}`);
    const all = Array.from({length: k}, (_, l) => l);
    const senses = all.filter(l => spans.some(([first, last]) => first <= l && l <= last));
    return {forms, senses, factor};
  }

  // Section 6.3, with r = E_old and a = E_now: C' = C + (C . r) (a / |a|^2 - r / |r|^2).
  replacement(word, old, now) {
    const r = this.model.wte(this.tokenizer.id(old));
    const a = this.model.wte(this.tokenizer.id(now));
    const move = r.map(x => -x / dot(r, r));  // (d)
    add(move, a, 1 / dot(a, a));
    return {forms: this.forms(word), r, move};
  }

  // The forms of a word; null is every word.
  forms(word) {
    return word === '*' ? null : this.tokenizer.forms(word);
  }

  // The sense l of a word's last token whose C_l . (E_a - E_b) is largest, whatever its sign.
  separatingSense(forms, pair) {
    const {model} = this;
    const [a, b] = pair.split('/').map(word => this.tokenizer.id(word.trim()));
    if (a === b) throw Error(`“${pair}” is one word twice`);
    const C = model.senses(forms[0].at(-1));
    const gaps = Array.from({length: model.config.n_sense}, (_, l) => {
      const sense = part(C, l, model.config.n_embd);
      return Math.abs(dot(sense, model.wte(a)) - dot(sense, model.wte(b)));
    });
    return gaps.indexOf(Math.max(...gaps));
  }

  // The steps that act at position j of a text.
  stepsAt(ids, j) {
    const endsHere = form => form.every((id, i) => ids[j - form.length + 1 + i] === id);
    return this.steps.filter(({forms}) => forms === null || forms.some(endsHere));
  }

  // What the senses at position j are multiplied by, (k).
  factors(ids, j) {
    const factors = new Float32Array(this.model.config.n_sense).fill(1);
    for (const {senses = [], factor} of this.stepsAt(ids, j)) {
      for (const l of senses) factors[l] *= factor;
    }
    return factors;
  }

  // The senses (k*d) at position j after replacements.
  senses(ids, j) {
    const replacements = this.stepsAt(ids, j).filter(({move}) => move);
    if (replacements.length === 0) return this.model.senses(ids[j]);
    const key = [ids[j], ...replacements.map(step => this.steps.indexOf(step))].join();
    if (!this.replaced.has(key)) this.replaced.set(key, this.replace(ids[j], replacements));
    return this.replaced.get(key);
  }

  replace(id, replacements) {
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
}

// The words in a,b,c; a text with an empty part, such as ",", is one word.
function wordList(text) {
  const words = text.split(',').map(word => word.trim());
  return words.every(word => word !== '') ? words : [text];
}

// The first and the last number in 3-5, or in 3.
function span(text) {
  const [first, last = first] = text.split('-').map(Number);
  return [first, last];
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
let latestRun = 0;  // the highest run number that generate was given

function editOf(lines) {
  return new Edit(model, tokenizer, lines);
}

// The ids of a string; an empty one is the end of a text.
function idsOf(string) {
  const ids = tokenizer.encode(string);
  return ids.length > 0 ? ids : [tokenizer.end];
}

// The ids that the model reads of a string: the last block_size.
function lastIdsOf(string) {
  return idsOf(string).slice(-model.config.block_size);
}

function topWords(scores, n) {
  return topIds(scores, n, tokenizer.firstWord);
}

// The ids of the two words to compare; by default she and he or, if these are unknown, the two
// likeliest.
function comparedIds(words, probs) {
  if (words === null) {
    const known = ['she', 'he'].map(word => tokenizer.encode(' ' + word));
    const areKnown = known.every(ids => ids.length === 1);
    return areKnown ? known.flat() : topWords(probs, 2);
  }
  const [a, b] = words.map(word => tokenizer.id(word));
  if (a === b) throw Error('Give two different words to compare');
  return [a, b];
}

// For each token and each sense, what the sense adds to the log odds of a to b: the product
// alpha_jl * logits * factor, where logits = C(x_j)_l . (E_a - E_b), after replacements.
function explain(edit, a, b) {
  const {n_embd: d, n_sense: k} = model.config;
  const direction = model.wte(a).slice();
  add(direction, model.wte(b), -1);
  const alpha = text.alpha();
  return text.ids.map((_, j) => {
    const C = edit.senses(text.ids, j);
    const factors = edit.factors(text.ids, j);
    return Array.from({length: k}, (_, l) => ({
      alpha: alpha[j * k + l],
      logits: dot(part(C, l, d), direction),
      factor: factors[l],
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
  predict({string, lines, n = 10}) {
    const probs = text.read(lastIdsOf(string)).probs(editOf(lines));
    return topIds(probs, n).map(id => [utf8(tokenizer.tokens[id] ?? END_OF_TEXT), probs[id]]);
  },

  // Everything that the page shows about a prediction.
  look({string, lines, compare}) {
    const edit = editOf(lines);
    const ids = lastIdsOf(string);
    text.read(ids);
    const before = text.probs(editOf([]));
    const now = text.probs(edit);
    const [a, b] = comparedIds(compare, before);
    const describe = id => ({
      id, name: tokenizer.word(id), label: tokenizer.label(id), before: before[id], now: now[id]});
    return {
      dropped: idsOf(string).length - ids.length,
      ids,
      labels: ids.map(id => tokenizer.label(id)),
      names: ids.map(id => tokenizer.word(id)),
      areEdited: ids.map((_, j) => edit.stepsAt(ids, j).length > 0),
      rows: explain(edit, a, b),
      next: topIds(now, 10).map(describe),
      a: describe(a),
      b: describe(b),
    };
  },

  // The n words that each sense of the token at position j raises most at weight 1, and the n that
  // it lowers most, after replacements.
  cards({j, lines, n = 6}) {
    const {n_embd: d, n_sense: k} = model.config;
    const C = editOf(lines).senses(text.ids, j);
    return Array.from({length: k}, (_, l) => {
      const logits = model.project(part(C, l, d));
      const raised = topWords(logits, n);
      const lowered = topWords(logits.map(x => -x), n);
      return [raised, lowered].map(words => words.map(v => [tokenizer.label(v), logits[v]]));
    });
  },

  // Continues a text, like Backpack.generate in model.py; calls tell with the new text so far after
  // each token. A run ends when a run with a higher number begins.
  async generate({string, n, seed, temperature, lines, run = latestRun}, tell) {
    const {block_size} = model.config;
    const draw = randomNumbers(seed);
    const newText = new Text(model);
    const edit = editOf(lines);
    const prompt = lastIdsOf(string);
    const ids = prompt.slice();
    let start = 0;  // the first token that is still read
    latestRun = Math.max(latestRun, run);
    while (ids.length < prompt.length + n) {
      if (ids.length - start > block_size) {
        start = ids.length - Math.max(1, Math.floor(block_size / 2));
      }
      newText.read(ids.slice(start));
      if (temperature < 1e-30) {
        const probs = newText.probs(edit);
        ids.push(probs.indexOf(maximum(probs)));
      } else {
        const probs = newText.probs(edit, temperature);
        ids.push(idAt(probs, draw()));
      }
      tell(tokenizer.decode(ids.slice(prompt.length)));
      await new Promise(resolve => setTimeout(resolve));  // lets other questions in
      if (run < latestRun || ids.at(-1) === tokenizer.end) break;
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
